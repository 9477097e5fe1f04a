"""The errors of the API, each a Kubernetes `Status` object: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ApiError",
    "already_exists",
    "bad_request",
    "conflict",
    "forbidden",
    "invalid",
    "not_found",
    "wrong_uid",
]


class ApiError(Exception):
    """A request that is answered with a `Status`: HTTP code, machine-readable reason, message for people."""

    def __init__(self, code: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}

    def status(self) -> dict[str, Any]:
        """The body of the answer."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def not_found(plural: str, name: str) -> ApiError:
    """404: there is no such object."""
    return ApiError(404, "NotFound", f'{plural} "{name}" not found', {"name": name, "kind": plural})


def already_exists(plural: str, name: str) -> ApiError:
    """409: the name is taken."""
    return ApiError(409, "AlreadyExists", f'{plural} "{name}" already exists', {"name": name, "kind": plural})


def conflict(plural: str, name: str, why: str) -> ApiError:
    """409: the object is not the one that the client saw."""
    message = f'Operation cannot be fulfilled on {plural} "{name}": {why}'
    return ApiError(409, "Conflict", message, {"name": name, "kind": plural})


def wrong_uid(kind: str, name: str, wanted: str, found: str) -> ApiError:
    """409: by this name there is another object than the one that is meant."""
    return conflict(
        kind,
        name,
        f"the UID in the precondition ({wanted}) does not match the UID in record ({found}). The object might have "
        "been deleted and then recreated",
    )


def bad_request(message: str) -> ApiError:
    """400: the request itself makes no sense."""
    return ApiError(400, "BadRequest", message)


def forbidden(plural: str, name: str, why: str) -> ApiError:
    """403: understood and refused."""
    message = f'{plural} "{name}" is forbidden: {why}'
    return ApiError(403, "Forbidden", message, {"name": name, "kind": plural})


def invalid(kind: str, name: str, causes: Sequence[tuple[str, str]]) -> ApiError:
    """422: a manifest that breaks rules; `causes` are (field, "Required value"-like message) pairs."""
    text = [f"{field}: {message}" for field, message in causes]
    joined = text[0] if len(text) == 1 else f"[{', '.join(text)}]"
    details = {
        "name": name,
        "kind": kind,
        "causes": [
            {"reason": _cause_reason(message), "message": message, "field": field}
            for field, message in causes
        ],
    }
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {joined}', details)


def _cause_reason(message: str) -> str:
    """The machine word of a cause: "Required value" -> FieldValueRequired."""
    words = {
        "Required value": "Required",
        "Not found": "NotFound",
        "Duplicate value": "Duplicate",
        "Forbidden": "Forbidden",
        "Unsupported value": "NotSupported",
    }
    head = message.split(":", 1)[0]
    return f"FieldValue{words.get(head, 'Invalid')}"

"""The errors that the serving rooms raise on purpose.

    ServingError                 code, failure class, hint
    ├── BadRequest               USER    the server refuses the request: names, types, shapes, JSON
    │   └── RequestTooLarge      USER    the request or its answer exceeds the message size limit
    ├── ModelNotFound            CONFIG  no such model, version, label or signature is served
    ├── NotAllowed               CONFIG  the server wants an API token, or another one
    ├── ServerUnavailable        INFRA   the server can't be reached, is starting, stopping or overloaded
    ├── DeadlineExceeded         INFRA   no answer, or no wanted state, within the deadline
    ├── ServerFailed             INFRA   the server answers with a fault of its own
    ├── VersionFailed            USER    a version can't be loaded; quotes the server's message
    ├── VerificationFailed       USER    a served version answers otherwise than its exporter did
    ├── CanaryFailed             USER    a canary was taken back: it failed, was slow, or nothing is known of it
    ├── ExportInvalid            DATA    an export folder is incomplete, corrupt or unknown
    ├── ConfigInvalid            CONFIG  a config file or an argument is wrong
    ├── ReleaseNotFound          CONFIG  a release asked for by name or version does not exist
    ├── ReleaseConflict          CONFIG  a version number or model name is taken by something else
    └── StoreBusy                INFRA   another process holds the lock of the store or the config file

Each has a stable `code` ("serving.bad_request"), `failure_class` (the name that a training job's failure
table uses), and a `hint` that says what to do.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BadRequest",
    "CanaryFailed",
    "ConfigInvalid",
    "DeadlineExceeded",
    "ExportInvalid",
    "ModelNotFound",
    "NotAllowed",
    "ReleaseConflict",
    "ReleaseNotFound",
    "RequestTooLarge",
    "ServerFailed",
    "ServerUnavailable",
    "ServingError",
    "StoreBusy",
    "VerificationFailed",
    "VersionFailed",
]


class ServingError(Exception):
    """Base of all errors raised on purpose by the serving rooms."""

    code: ClassVar[str] = "serving"
    failure_class: ClassVar[str] = "INFRA"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class BadRequest(ServingError):
    """The server refuses the request."""

    code = "serving.bad_request"
    failure_class = "USER"


class RequestTooLarge(BadRequest):
    """The request or its answer exceeds the message size limit."""

    code = "serving.too_large"


class ModelNotFound(ServingError):
    """No such model, version, label or signature is served."""

    code = "serving.model_not_found"
    failure_class = "CONFIG"


class NotAllowed(ServingError):
    """The server wants an API token, or another one."""

    code = "serving.not_allowed"
    failure_class = "CONFIG"


class ServerUnavailable(ServingError):
    """The server can't be reached, is starting, stopping or overloaded."""

    code = "serving.unavailable"


class DeadlineExceeded(ServingError):
    """No answer, or no wanted state, within the deadline."""

    code = "serving.deadline"


class ServerFailed(ServingError):
    """The server answers with a fault of its own."""

    code = "serving.server_failed"


class VersionFailed(ServingError):
    """A version can't be loaded; `server_message` is the server's own word."""

    code = "serving.version_failed"
    failure_class = "USER"

    def __init__(self, model: str, version: int, server: str, server_message: str, *, hint: str = "") -> None:
        super().__init__(f"{server} can't load version {version} of {model}: {server_message}", hint=hint)
        self.model = model
        self.version = version
        self.server = server
        self.server_message = server_message


class VerificationFailed(ServingError):
    """A served version answers otherwise than its exporter did."""

    code = "serving.verification_failed"
    failure_class = "USER"


class CanaryFailed(ServingError):
    """A canary was taken back: it failed, was slow, or nothing is known of it."""

    code = "serving.canary_failed"
    failure_class = "USER"


class ExportInvalid(ServingError):
    """An export folder is incomplete, corrupt or of an unknown format."""

    code = "serving.export_invalid"
    failure_class = "DATA"


class ConfigInvalid(ServingError, ValueError):
    """A config file or an argument is wrong."""

    code = "serving.config_invalid"
    failure_class = "CONFIG"


class ReleaseNotFound(ServingError):
    """A release asked for by name or version does not exist."""

    code = "serving.release_not_found"
    failure_class = "CONFIG"


class ReleaseConflict(ServingError):
    """A version number or a model name is taken by something else."""

    code = "serving.release_conflict"
    failure_class = "CONFIG"


class StoreBusy(ServingError):
    """Another process holds the lock of the release store or of the config file."""

    code = "serving.store_busy"

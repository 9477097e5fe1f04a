"""The one error that travels to clients: a gRPC status code with TF Serving's words."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Code", "Refused", "http_status"]


class Code(IntEnum):
    """gRPC status codes, which are also TensorFlow's error codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


# As TF Serving maps them; a failed precondition is 400 there, not 412.
_HTTP = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}


class Refused(Exception):  # a status, not a fault of ours
    """A request or a load ends with this status code and message."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def http_status(code: Code) -> int:
    """The HTTP status that TF Serving's REST API answers for a code."""
    return _HTTP.get(code, 500)

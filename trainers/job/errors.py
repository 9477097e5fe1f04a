"""The errors that Trainyard raises on purpose.

    TrainyardError
    ├── ConfigError           class CONFIG: the job or the platform is set up wrong; no retry
    │   ├── InvalidSpec       a value of a job spec is refused on construction
    │   └── MissingRecord     a job's folder holds no job
    ├── UserError             class USER: the user's code or hyperparameters are wrong; no retry
    ├── DataError             class DATA: the input data is wrong or missing; no retry
    ├── StalledError          class STALLED: no progress within a budget
    ├── PeerLostError         class PEER_LOST: another replica went away
    ├── InfraError            class INFRA: the machine, the network or the storage failed
    │   └── RecordConflict    a job's record was written by somebody else in a way that can't be merged
    └── QuotaError            class QUOTA: no room in the cluster for now

Every leaf has a stable `code` ("spec.invalid"), a failure class, and a message that says what, where and,
by `hint`, what to do. Other rooms add their leaves below these; nobody raises a bare RuntimeError.
"""

from __future__ import annotations

from typing import ClassVar

from trainers.job.failures import FailureClass

__all__ = [
    "ConfigError",
    "DataError",
    "InfraError",
    "InvalidSpec",
    "MissingRecord",
    "PeerLostError",
    "QuotaError",
    "RecordConflict",
    "StalledError",
    "TrainyardError",
    "UserError",
]


class TrainyardError(Exception):
    """Base of all errors raised on purpose; `hint` says what to do about it."""

    code: ClassVar[str] = "trainyard"
    failure_class: ClassVar[FailureClass] = FailureClass.INFRA

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(TrainyardError):
    """The job or the platform is set up wrong."""

    code = "config"
    failure_class = FailureClass.CONFIG


class InvalidSpec(ConfigError, ValueError):
    """A value of a job spec is refused; `field` names it as in the form."""

    code = "spec.invalid"

    def __init__(self, field: str, must: str, got: object, *, hint: str = "") -> None:
        super().__init__(f"{field} must {must}, got {got!r}", hint=hint)
        self.field = field
        self.got = got


class MissingRecord(ConfigError):
    """A job's folder holds no job."""

    code = "record.missing"


class UserError(TrainyardError):
    """The user's code or hyperparameters are wrong."""

    code = "user"
    failure_class = FailureClass.USER


class DataError(TrainyardError):
    """The input data is wrong or missing."""

    code = "data"
    failure_class = FailureClass.DATA


class StalledError(TrainyardError):
    """No progress within a budget."""

    code = "stalled"
    failure_class = FailureClass.STALLED


class PeerLostError(TrainyardError):
    """Another replica of the gang went away."""

    code = "peer_lost"
    failure_class = FailureClass.PEER_LOST


class InfraError(TrainyardError):
    """The machine, the network or the storage failed."""

    code = "infra"
    failure_class = FailureClass.INFRA


class RecordConflict(InfraError):
    """A job's record was written by somebody else in a way that can't be merged."""

    code = "record.conflict"


class QuotaError(TrainyardError):
    """No room in the cluster for now."""

    code = "quota"
    failure_class = FailureClass.QUOTA

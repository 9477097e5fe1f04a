"""What can be wrong with raw data or with a dataset of records.

DataError                     class DATA (trainers.job.errors)
└── RecordsError              below: every error of this room about data
    ├── SourceMissing         the source isn't there
    ├── SourceEmpty           it is there, but holds nothing to read
    ├── SourceUnreadable      a file can't be read as what it says it is
    ├── SourceChanged         a file changed between listing it and reading it
    ├── ColumnError           a column is missing, or has a type that records can't hold
    ├── TooManyBadRows        more rows were refused than the threshold allows
    ├── UnitsMissing          not all parts of a dataset have been written, so it can't be published
    ├── DatasetMissing        there is no manifest, so there is no dataset
    └── DatasetCorrupt        a file of the dataset isn't what its manifest says
InfraError                    class INFRA
├── SourceUnreachable         a store doesn't answer, or refuses us
└── WorkerLost                a process that wrote a part of the dataset was killed, or broke
ConfigError                   class CONFIG
├── InvalidOption             an option of `prepare` is refused
└── NativeUnavailable         the native encoder was asked for and isn't there
"""

from __future__ import annotations

from trainers.job.errors import ConfigError, DataError, InfraError

__all__ = [
    "ColumnError",
    "DatasetCorrupt",
    "DatasetMissing",
    "InvalidOption",
    "NativeUnavailable",
    "RecordsError",
    "SourceChanged",
    "SourceEmpty",
    "SourceMissing",
    "SourceUnreachable",
    "SourceUnreadable",
    "TooManyBadRows",
    "UnitsMissing",
    "WorkerLost",
]


class RecordsError(DataError):
    """Something is wrong with raw data or with a dataset."""

    code = "records"


class SourceMissing(RecordsError):
    """The source isn't there."""

    code = "records.missing_source"


class SourceEmpty(RecordsError):
    """The source holds nothing to read."""

    code = "records.empty_source"


class SourceUnreadable(RecordsError):
    """A file can't be read as what it says it is; `file` names it."""

    code = "records.unreadable_source"

    def __init__(self, file: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{file}: {problem}", hint=hint)
        self.file = file


class SourceChanged(RecordsError):
    """A file changed between listing it and reading it; `file` names it."""

    code = "records.changed_source"

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(
            f"{file} {problem} while it was being read",
            hint="wait until whoever writes the source is done, then run again; nothing was published",
        )
        self.file = file


class ColumnError(RecordsError):
    """A column is missing, or has a type that records can't hold; `column` names it."""

    code = "records.column"

    def __init__(self, column: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"column {column!r} {problem}", hint=hint)
        self.column = column


class TooManyBadRows(RecordsError):
    """More rows were refused than the threshold allows."""

    code = "records.too_many_bad_rows"

    def __init__(self, message: str, *, bad: int, total: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.bad = bad
        self.total = total


class UnitsMissing(RecordsError):
    """Not all parts of a dataset have been written, so it can't be published."""

    code = "records.missing_units"


class DatasetMissing(RecordsError):
    """There is no manifest, so there is no dataset."""

    code = "records.missing_dataset"


class DatasetCorrupt(RecordsError):
    """A file of a dataset isn't what its manifest says; `file` names it."""

    code = "records.corrupt_dataset"

    def __init__(self, file: str, problem: str, *, hint: str = "") -> None:
        super().__init__(
            f"{file} {problem}",
            hint=hint or "prepare the dataset again: a run that finds it damaged writes it anew",
        )
        self.file = file


class SourceUnreachable(InfraError):
    """A store doesn't answer, or refuses us; `location` names the file or folder."""

    code = "records.unreachable_source"

    def __init__(self, location: str, problem: str, *, hint: str = "") -> None:
        super().__init__(
            f"{location}: {problem}",
            hint=hint or "check the network, and that credentials are in the environment of the task",
        )
        self.location = location


class InvalidOption(ConfigError, ValueError):
    """An option of `prepare` is refused; `option` names it."""

    code = "records.invalid_option"

    def __init__(self, option: str, must: str, got: object) -> None:
        super().__init__(f"{option} must {must}, got {got!r}")
        self.option = option


class NativeUnavailable(ConfigError):
    """The native encoder was asked for and isn't there, or is of another version."""

    code = "records.native_unavailable"


class WorkerLost(InfraError):
    """A process that wrote a part of the dataset was killed, or failed in a way that isn't the data's."""

    code = "records.worker_lost"

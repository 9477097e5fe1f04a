"""How a pod's process hands back a result, or says why it failed.

A process writes one JSON of at most 4,096 bytes to the container's termination log; Kubernetes shows it in the
pod's status, where it outlives the process and needs no sidecar:

    {"ok": true, "result": {...}}
    {"ok": false, "failure": {"class": "DATA", "reason": ..., ...}}

A step of a pipeline is a module with `main(spec) -> result`, run as `python -m trainers.NAME --spec JSON`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.job import labels
from trainers.job.errors import ConfigError, TrainyardError
from trainers.job.failures import Failure, FailureClass, classify, exit_code_of
from trainers.job.files import share_with_group

__all__ = ["LIMIT", "Termination", "failure_of", "parse", "run_step", "write_failure", "write_result"]

LIMIT = 4096  # Kubernetes cuts a termination message there
DEFAULT_PATH = "/dev/termination-log"  # a mount that every container on Kubernetes has

# Errors of Python itself that say more than "an exception was not caught".
_EXCEPTION_CLASSES: Mapping[type[BaseException], FailureClass] = {
    MemoryError: FailureClass.OOM,
    OSError: FailureClass.INFRA,  # disk full, network, permissions
    KeyboardInterrupt: FailureClass.PREEMPTED,
}


@dataclasses.dataclass(frozen=True)
class Termination:
    """What a termination message says: a result, or a failure."""

    result: Mapping[str, Any] | None = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether the process succeeded."""
        return self.failure is None


def _write(text: str) -> None:
    path = Path(os.environ.get(labels.ENV_TERMINATION_LOG, DEFAULT_PATH))
    if str(path) == DEFAULT_PATH and not path.exists():
        return  # run by hand, outside a container: the result and the failure card are on the terminal
    try:
        # Not by rename: on Kubernetes the file is a mount of its own and can only be written in place.
        path.write_text(text)
    except OSError as e:
        print(f"could not write the termination message to {path}: {e}", file=sys.stderr)


def write_result(result: Mapping[str, Any]) -> None:
    """Write a result; ConfigError when its JSON is over 4,096 bytes."""
    text = json.dumps({"ok": True, "result": dict(result)})
    if len(text.encode()) > LIMIT:
        raise ConfigError(
            f"the result has {len(text.encode())} bytes, a termination message holds {LIMIT}",
            hint="hand over a URI instead of data",
        )
    _write(text)


def write_failure(failure: Failure) -> None:
    """Write a failure, its traceback and log tail cut from the top until it fits."""
    _write(_fit(failure))


def _fit(failure: Failure) -> str:
    def dump(value: Failure) -> str:
        return json.dumps({"ok": False, "failure": value.to_dict()})

    text = dump(failure)
    while len(text.encode()) > LIMIT:
        if sum(map(len, failure.log_tail)) > len(failure.detail):
            # The end of a log says most.
            failure = dataclasses.replace(
                failure, log_tail=failure.log_tail[(len(failure.log_tail) + 1) // 2 :]
            )
        elif len(failure.detail) > 80:
            failure = dataclasses.replace(
                failure, detail="..." + failure.detail[len(failure.detail) // 4 + 3 :]
            )
        elif failure.log_tail:
            failure = dataclasses.replace(failure, log_tail=())
        else:
            longest = max(
                ("reason", "hint", "code", "role", "detail"), key=lambda n: len(getattr(failure, n))
            )
            kept = getattr(failure, longest)
            failure = dataclasses.replace(failure, **{longest: kept[: len(kept) // 2]})
        text = dump(failure)
    return text


def parse(message: str | None) -> Termination | None:
    """What a termination message says, or None for one that is not ours (empty, a log tail, cut)."""
    if not message:
        return None
    try:
        data = json.loads(message)
        if data["ok"] is True:
            return Termination(result=dict(data["result"]))
        return Termination(failure=Failure.from_dict(data["failure"]))
    except (ValueError, KeyError, TypeError):
        return None


def failure_of(error: BaseException, *, role: str = "", index: int | None = None) -> Failure:
    """The failure that an exception means; errors of the user's code keep their traceback."""
    if isinstance(error, TrainyardError):
        cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        failure = Failure(error.failure_class, error.message, code=error.code, hint=error.hint, detail=cause)
    else:
        cls = next(
            (c for kind, c in _EXCEPTION_CLASSES.items() if isinstance(error, kind)), classify(exit_code=1)
        )
        reason = traceback.format_exception_only(type(error), error)[-1].strip()
        detail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        failure = Failure(cls, reason, code=f"python.{type(error).__name__}", detail=detail)
    return dataclasses.replace(failure, role=role, index=index, exit_code=exit_code_of(failure.failure_class))


def run_step(
    main: Callable[[Mapping[str, Any]], Mapping[str, Any]], argv: Sequence[str] | None = None
) -> int:
    """Run a step's `main` on the JSON of `--spec`; the exit code says the failure's class.

    Use as `sys.exit(run_step(main))`.
    """
    doc = (sys.modules[main.__module__].__doc__ or "").strip().partition("\n")[0]
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--spec", required=True, help="what to do, as one JSON object")
    text = parser.parse_args(argv).spec
    share_with_group()
    try:
        try:
            spec = json.loads(text)
        except ValueError as e:
            raise ConfigError(f"--spec is not JSON: {e}") from e
        if not isinstance(spec, dict):
            raise ConfigError(f"--spec must be a JSON object, got {type(spec).__name__}")
        result = main(spec)
        write_result(result)
        print(json.dumps(dict(result)), flush=True)
    except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001 - the one place where everything becomes a class
        failure = failure_of(e)
        write_failure(failure)
        print(failure.card(), file=sys.stderr, flush=True)
        return exit_code_of(failure.failure_class)
    return 0

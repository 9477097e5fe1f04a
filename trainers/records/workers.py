"""Several processes that write the units of a dataset, each unit in one of them.

The parent starts `python -m trainers.records.workers` for each, tells it what is to be done, and then the numbers
of units, one at a time; workers answer with lines of progress and results. Nothing depends on who writes what, so
neither do the dataset's bytes. Not by multiprocessing: that would run the caller's main module again.

No worker outlives its parent: each ends when its standard input does, and on Linux the kernel kills it with its
parent. A parent that loses a worker (killed for its memory, say) ends the others and raises WorkerLost; finished
units stay, and the next run goes on from them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import io
import json
import os
import pickle
import queue
import selectors
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.errors import TrainyardError
from trainers.records.errors import WorkerLost

if TYPE_CHECKING:
    from trainers.records.listing import SourceFile
    from trainers.records.options import Options
    from trainers.records.schema import Schema
    from trainers.records.units import Unit, UnitResult

__all__ = ["LARGE", "Work", "cores", "processes_for", "write"]

LARGE = 64 << 20
"""Bytes of input above which several processes are worth their start, about a CPU second each."""

_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Work:
    """What a worker must know to write units: all that `Build` is made from."""

    options: Options
    kind: str
    files: Sequence[SourceFile]
    fingerprint: str
    folder: Path
    schema: Schema


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: of its affinity and of its container's quota, at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return max(1, count)


def processes_for(wanted: int | None, size: int, units: int) -> int:
    """How many processes write so many units: as wanted, else one a core for large inputs, else one."""
    most = wanted if wanted is not None else cores() if size >= LARGE else 1
    return max(1, min(most, units))


# ------------------------------------------------------------------------------------------------------------
# The parent's side


class _Worker:
    """A process, the pipe that its answers come by, and the unit it is at."""

    def __init__(self, work: bytes) -> None:
        self.unit: int | None = None
        self._rest = b""
        answers, theirs = os.pipe()
        self.answers = answers
        # It must find what we found, checks of the user's own too.
        path = os.pathsep.join(dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainers.records.workers", str(theirs), str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs],
                env={**os.environ, "PYTHONPATH": path},
            )
        except BaseException:
            os.close(answers)
            raise
        finally:
            os.close(theirs)
        self._send(_LENGTH.pack(len(work)) + work)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, as the end of its answers will say
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def give(self, unit: int | None) -> None:
        """The next unit, or None when there are no more."""
        self.unit = unit
        self._send(b"stop\n" if unit is None else b"%d\n" % unit)

    def read(self) -> list[dict[str, Any]] | None:
        """Answers that have come; None when there will be no more."""
        data = os.read(self.answers, 1 << 20)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        os.close(self.answers)


def write(
    work: Work, units: Sequence[Unit], processes: int, progress: Callable[[str], None]
) -> list[UnitResult]:
    """Write units by so many processes; their results, in the order of the units.

    Raises what a worker raised, or WorkerLost; then no worker is left running.
    """
    pickled = pickle.dumps(work)
    waiting = [unit.index for unit in reversed(units)]
    results: dict[int, UnitResult] = {}
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for _ in range(processes):
            worker = _Worker(pickled)
            stack.callback(worker.close)
            selector.register(worker.answers, selectors.EVENT_READ, worker)
            worker.give(waiting.pop() if waiting else None)
        while selector.get_map():
            for key, _ in selector.select():
                worker = key.data
                answers = worker.read()
                if answers is None:
                    selector.unregister(worker.answers)
                    if worker.unit is not None:
                        raise _lost(worker, len(units))
                    continue
                for answer in answers:
                    if "say" in answer:
                        progress(answer["say"])
                    elif "error" in answer:
                        raise _error(answer["error"])
                    else:
                        results[worker.unit] = _result(answer["result"])
                        worker.give(waiting.pop() if waiting else None)
    return [results[unit.index] for unit in units]


def _result(data: dict[str, Any]) -> UnitResult:
    from trainers.records.units import UnitResult

    return UnitResult.from_dict(data)


def _lost(worker: _Worker, units: int) -> WorkerLost:
    code = worker.process.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    hint = "run again: finished units are kept"
    if code == -signal.SIGKILL:
        hint = f"if it was for its memory, give fewer processes or a smaller batch_rows; {hint}"
    return WorkerLost(f"the process that wrote unit {worker.unit + 1} of {units} {how}", hint=hint)


def _error(data: dict[str, Any]) -> Exception:
    """The error that a worker raised, as itself when it is one of ours."""
    module, name = data["type"]
    if module.startswith("trainers."):
        found = getattr(importlib.import_module(module), name, None)
        if isinstance(found, type) and issubclass(found, TrainyardError):
            error = found.__new__(found)
            error.args = tuple(data["args"])
            error.__dict__.update(data["fields"])
            return error
    return WorkerLost(f"a process that wrote units failed:\n{data['traceback']}")


# ------------------------------------------------------------------------------------------------------------
# The worker's side


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, where it knows how to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _orders(orders_file: io.FileIO) -> Iterator[int]:
    """Numbers of units as they come; the process ends at once when its input does before a stop."""
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in orders_file:
            orders.put(line)
            if line == b"stop\n":
                return
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while (line := orders.get()) != b"stop\n":
        yield int(line)


def _exactly(file: io.FileIO, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = file.read(size - len(data))
        if not piece:
            os._exit(1)  # the parent went away
        data += piece
    return bytes(data)


def main(answers: int, parent: int) -> int:
    """Write the units that the parent names."""
    _die_with(parent)
    # Unbuffered, or the listening thread would hold a buffer's lock when the interpreter ends.
    orders = io.FileIO(0, "rb", closefd=False)
    size = _LENGTH.unpack(_exactly(orders, _LENGTH.size))[0]
    work: Work = pickle.loads(_exactly(orders, size))  # noqa: S301 - our own parent's, by a pipe
    from trainers.records.build import Build, Listing

    def answer(**data: Any) -> None:
        view = memoryview(json.dumps(data).encode() + b"\n")
        while view:
            view = view[os.write(answers, view) :]

    try:
        listing = Listing(work.kind, work.files, work.fingerprint, work.folder)
        build = Build(work.options, listing, lambda text: answer(say=text))
        units: list[Unit] | None = None
        for index in _orders(orders):
            if units is None:
                units = build.units(work.schema, quiet=True)
            answer(result=build.unit(units[index], work.schema).to_dict())
    except Exception as e:  # noqa: BLE001 - told to the parent, who raises it
        fields = e.__dict__ if isinstance(e, TrainyardError) else {}
        answer(
            error={
                "type": [type(e).__module__, type(e).__qualname__],
                "args": [str(argument) for argument in e.args],
                "fields": json.loads(json.dumps(fields, default=str)),
                "traceback": traceback.format_exc(),
            }
        )
        return 1
    return 0


if __name__ == "__main__":
    # By its full name, so that what is pickled is found where it belongs.
    from trainers.records import workers

    sys.exit(workers.main(int(sys.argv[1]), int(sys.argv[2])))

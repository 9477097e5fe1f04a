"""A whole gang on this machine: a launcher a replica, for tests, benchmarks and trying a plan out.

    gang = LocalGang(plan)
    gang.start()
    result = gang.wait(120)            # GangResult(outcome, exit_codes, seconds)

    python -m trainers.runtime.local_gang --plan plan.json

It does what Airflow does in a pipeline, and no more: it starts the launchers, and starts one again that left with
a class that may be retried. What its pods print is in `<job>/pods/<replica>.log`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from trainers.job import labels
from trainers.job.failures import RETRY_POLICIES, classify
from trainers.job.plan import Plan, ReplicaPlan
from trainers.job.record import JobRecord, Outcome

__all__ = ["GangResult", "LocalGang", "leftovers", "run_gang"]


@dataclasses.dataclass(frozen=True)
class GangResult:
    """How a gang ended: the record's outcome (None when it has none), the last exit code of each replica, seconds."""

    outcome: Outcome | None
    exit_codes: Mapping[str, int]
    seconds: float


def leftovers(job_folder: Path | str, *, name: str = "", patience: float = 0.0) -> list[int]:
    """Processes of a job that run, of one replica ("worker-0") or of all; on Linux.

    They are found by the job's folder in their environment, so that one that left its process group is found,
    too; zombies do not count. Those are returned that are still there after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        found = [pid for pid in _pids_of(str(job_folder), name) if pid != os.getpid()]
        if not found or time.monotonic() >= deadline:
            return sorted(found)
        time.sleep(0.05)


def _pids_of(folder: str, name: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            env = dict(pair.partition("=")[::2] for pair in path.read_text().split("\0"))
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, UnicodeDecodeError):
            continue
        replica = f"{env.get(labels.ENV_ROLE)}-{env.get(labels.ENV_INDEX)}"
        if env.get(labels.ENV_JOB) == folder and state != "Z" and name in ("", replica):
            yield int(path.parent.name)


class LocalGang:
    """The launchers of a plan as processes of this one; `retries` a replica, as an Airflow task has them."""

    def __init__(self, plan: Plan, *, env: Mapping[str, str] | None = None, retries: int = 0) -> None:
        self.plan = plan
        self.record = JobRecord.create(plan)
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.exit_codes: dict[str, int] = {}
        self.retries = dict.fromkeys((r.replica for r in plan.replicas), retries)
        self._env = {**os.environ, **(env or {})}
        self._began = time.monotonic()
        self._replicas = {replica.replica: replica for replica in plan.replicas}
        self.logs = self.record.folder / "pods"  # logs/ is where the replicas' own lines are kept
        self.logs.mkdir(exist_ok=True)

    def __enter__(self) -> LocalGang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, *names: str) -> None:
        """Start the launchers of these replicas, or of all."""
        self._began = time.monotonic()
        for name in names or self._replicas:
            self._start(self._replicas[name])

    def _start(self, replica: ReplicaPlan) -> None:
        command = [sys.executable if word == "python" else word for word in replica.command]
        env = {
            **self._env,
            **replica.env,
            labels.ENV_TERMINATION_LOG: str(self.termination_file(replica.replica)),
        }
        self.launchers[replica.replica] = self._launch(command, env, self.logs / f"{replica.replica}.log")

    def _launch(self, command: list[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def termination_file(self, name: str) -> Path:
        """Where a replica's termination message is."""
        return self.logs / f"{name}.termination.json"

    def log(self, name: str) -> str:
        """The log of a replica."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def signal(self, name: str, number: int) -> None:
        """Send a replica's launcher a signal, as a kubelet would."""
        self.launchers[name].send_signal(number)

    def poll(self) -> bool:
        """Note who has ended, start again who may; whether all have ended."""
        for name, process in list(self.launchers.items()):
            code = process.poll()
            if code is None:
                continue
            del self.launchers[name]
            self.exit_codes[name] = code
            if code and self.retries[name] > 0:
                policy = RETRY_POLICIES[classify(exit_code=code)]
                if policy.retry:
                    self.retries[name] -= policy.charged
                    self._start(self._replicas[name])
        return not self.launchers

    def wait(self, seconds: float) -> GangResult:
        """Until all have ended, at most so long; then the rest is killed."""
        deadline = time.monotonic() + seconds
        while not self.poll() and time.monotonic() < deadline:
            time.sleep(0.02)
        took = time.monotonic() - self._began
        self.stop()
        return GangResult(self.record.outcome(), dict(self.exit_codes), took)

    def stop(self) -> None:
        """Kill what still runs; trainers die with their launchers."""
        for name, process in self.launchers.items():
            process.kill()
            self.exit_codes[name] = process.wait()
        self.launchers.clear()


def run_gang(
    plan: Plan, *, seconds: float = 3600.0, env: Mapping[str, str] | None = None, retries: int = 0
) -> GangResult:
    """Run all replicas of a plan to their end."""
    with LocalGang(plan, env=env, retries=retries) as gang:
        gang.start()
        return gang.wait(seconds)


def main(argv: list[str] | None = None) -> int:
    """Run the plan in a file; the exit code of the chief."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", type=Path, required=True, help="a plan as JSON (Plan.to_dict)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most so long (default: 3600)")
    options = parser.parse_args(argv)
    plan = Plan.from_dict(json.loads(options.plan.read_text()))
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    result = run_gang(plan, seconds=options.seconds)
    print(json.dumps({"exit_codes": result.exit_codes, "seconds": round(result.seconds, 2)}))
    if result.outcome is not None:
        print(json.dumps(result.outcome.to_dict()))
    return result.exit_codes.get("chief-0", 1)


if __name__ == "__main__":
    sys.exit(main())

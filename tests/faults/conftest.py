"""Gangs of real processes on the digits."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.repeats import repeated_steps
from trainers.job import termination
from trainers.job.failures import Failure
from trainers.job.plan import Cluster, make_plan
from trainers.job.ports import free_ports
from trainers.job.record import JobState
from trainers.job.spec import Budgets, RestartPolicy, RoleKind, Strategy, TrainingJob, standard_roles
from trainers.models.digits_raw import write_raw
from trainers.records.build import prepare
from trainers.runtime.local_gang import GangResult, LocalGang, leftovers


def quiet(_line: str) -> None:
    """No progress in tests."""


LIMIT = 240.0  # seconds; a guard against hanging, not a time that is asked for


@pytest.fixture(scope="session")
def digits_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of the digits' records."""
    folder = tmp_path_factory.mktemp("digits")
    write_raw(folder / "raw", progress=quiet)
    return Path(
        prepare(folder / "raw", folder / "records", name="digits", label="label", progress=quiet).path
    )


# Launchers forked from a process that has TensorFlow imported, as the process kubelet starts them: an import of
# seconds is paid once for all gangs. The forks become children of the test process, which adopts orphans.
WARM = """
import json, os, signal, sys
from trainers.lean import import_tensorflow
import_tensorflow()
from trainers.runtime import launcher
for line in sys.stdin:
    request = json.loads(line)
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        child = os.fork()
        if child:
            os.write(write, str(child).encode())
            os._exit(0)
        os.setsid()
        out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(out, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:0] = [p for p in request["env"].get("PYTHONPATH", "").split(":") if p]
        code = 1
        try:
            code = launcher.main()
        finally:
            os._exit(code)
    os.waitpid(middle, 0)
    print(os.read(read, 32).decode(), flush=True)
    os.close(read)
    os.close(write)
"""


class Forked:
    """A forked launcher, as far as a gang uses subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # not ours yet: the process between is just ending
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 30.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, f"launcher {self.pid} does not end"
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def warm() -> Iterator[Callable[[Mapping[str, str], Path], Forked]]:
    """Forks a launcher with an environment and a log."""
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", WARM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def start(env: Mapping[str, str], log: Path) -> Forked:
        process.stdin.write(json.dumps({"env": dict(env), "log": str(log)}) + "\n")
        process.stdin.flush()
        return Forked(int(process.stdout.readline()))

    yield start
    process.communicate()
    assert process.returncode == 0


class Gang(LocalGang):
    """A gang with what tests ask of it."""

    fork: Callable[[Mapping[str, str], Path], Forked] | None = None

    def _launch(self, command: list[str], env: Mapping[str, str], log: Path) -> Any:
        return self.fork(env, log) if self.fork else super()._launch(command, env, log)

    def until(self, what: Callable[[], Any], seconds: float = LIMIT) -> Any:
        """Wait until something holds; the value. Fails with the logs when it does not, or the gang has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = what()
            if value:
                return value
            if self.poll():
                break
            time.sleep(0.02)
        logs = "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.exit_codes)
        raise AssertionError(f"it did not happen; exit codes {self.exit_codes}\n{logs}")

    def until_step(self, step: int) -> int:
        """Wait until the chief has finished so many steps."""

        def reached() -> int:
            beat = self.record.heartbeat("chief", 0)
            return (
                beat.step if beat and beat.phase in ("training", "saving") and (beat.step or 0) >= step else 0
            )

        return int(self.until(reached))

    def trainer_pid(self, role: str, index: int = 0) -> int:
        """The process of a replica's present attempt."""
        return self.record.attempts(role, index)[-1].pid

    def kill_trainer(self, role: str, index: int = 0, number: int = 9) -> None:
        """SIGKILL a replica's trainer, as the kernel does when memory is short."""
        os.kill(self.trainer_pid(role, index), number)

    def recover(self, blow: Callable[[], None], *, anew: bool = True) -> int:
        """Strike, and wait until the chief makes steps again: in a new process if it has to begin `anew`."""
        before = self.record.heartbeat("chief", 0)
        assert before is not None
        attempts = len(self.record.attempts("chief", 0))
        blow()

        def again() -> bool:
            beat = self.record.heartbeat("chief", 0)
            if beat is None or beat.phase not in ("training", "saving"):
                return False
            return beat.attempt > attempts if anew else (beat.step or 0) > (before.step or 0) + 1

        self.until(again)
        beat = self.record.heartbeat("chief", 0)
        assert beat is not None
        return beat.step or 0

    def resumed(self, name: str = "chief-0") -> list[int]:
        """The steps that each of the trainers of a replica began at."""
        return [
            int(step) for step in re.findall(rf"(?m)^{name} trains \S+ from step (\d+) to", self.log(name))
        ]

    def repeated(self) -> list[int]:
        """The steps that the chief made again after each of its restarts, as far as heartbeats had told them."""
        return repeated_steps(self.record, self.log("chief-0"))

    def leftovers(self, name: str = "") -> list[int]:
        """Processes of the job, or a replica, that still run a moment after its end."""
        return leftovers(self.record.folder, name=name, patience=5.0)


@pytest.fixture
def user_module(tmp_path: Path) -> Callable[[str, str], dict[str, str]]:
    """Writes a trainer module; the environment that has it found."""

    def write(name: str, text: str) -> dict[str, str]:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return {"PYTHONPATH": str(tmp_path)}

    return write


def card_of(gang: Gang, result: GangResult, failure_class: str) -> Failure:
    """The job's failure, once its card has been seen to say all that a card says, at every replica."""
    assert result.outcome is not None, gang.log("chief-0")
    failure = result.outcome.failure
    assert failure is not None
    assert result.outcome.state is JobState.FAILED
    assert failure.failure_class.value == failure_class, failure
    assert failure.reason
    assert failure.code
    assert failure.role in [role.value for role in RoleKind]
    assert failure.index is not None
    assert (failure.exit_code is None) != (failure.signal is None)
    card = failure.card("digits")
    rows = ["FAILED " + failure_class, "what:", "replica:", "last step:", "what to do:"]
    rows.append("exit code:" if failure.signal is None else "ended by:")
    rows.append("log tail:" if failure.log_tail else "")
    assert [row for row in rows if row not in card] == [], card
    for name in gang.exit_codes:
        message = termination.parse(gang.termination_file(name).read_text())
        assert message is not None
        assert message.failure is not None
        assert (message.failure.reason, message.failure.replica) == (failure.reason, failure.replica)
    assert gang.leftovers() == []
    return failure


def assert_arrived(gang: Gang, result: GangResult, steps: int, *, every: int | None = None) -> None:
    """All replicas left with 0, at exactly the asked step, none is left, at most one interval was repeated."""
    assert result.outcome is not None, gang.log("chief-0")
    assert (result.outcome.state, result.outcome.step) == (JobState.SUCCEEDED, steps), result.outcome
    assert set(result.exit_codes.values()) == {0}, result.exit_codes
    assert gang.leftovers() == []
    if every is not None:
        assert [steps for steps in gang.repeated() if steps > every] == []


@pytest.fixture
def gang(tmp_path: Path, digits_manifest: Path, warm: Callable[..., Forked]) -> Iterator[Callable[..., Gang]]:
    """Makes gangs on the digits, and ends them; `cold` ones start new interpreters."""
    made: list[Gang] = []

    def make(
        strategy: str | Mapping[str, Any] = "parameter_server",
        *,
        workers: int = 0,
        ps: int = 0,
        trainer: str = "trainers.models.digits",
        budgets: Mapping[str, float] | None = None,
        retries: int = 0,
        env: Mapping[str, str] | None = None,
        manifest: Path | None = None,
        evaluator: bool = False,
        caps: Mapping[str, int] | None = None,
        cold: bool = False,
        output: Path | None = None,
        **args: Any,
    ) -> Gang:
        kind = Strategy.from_dict(strategy)
        job = TrainingJob(
            "digits",
            trainer,
            args={"batch_size": 64, "learning_rate": 0.003, **args},
            roles=standard_roles(kind, workers=workers, ps=ps, evaluator=evaluator),
            strategy=kind,
            budgets=Budgets(**{"start": 120.0, "stall": 60.0, **(budgets or {})}),
            inputs={"records": str(manifest or digits_manifest)},
            restart=RestartPolicy(caps or {}),
            output=str(output or tmp_path / f"job{len(made)}"),
        )
        ports = free_ports(1 + workers + ps + evaluator)
        plan = make_plan(job, Cluster.process(ports), gang=f"digits-{secrets.token_hex(4)}")
        made.append(Gang(plan, env=env, retries=retries))
        made[-1].fork = None if cold else warm
        return made[-1]

    yield make
    for each in made:
        each.stop()
        assert each.leftovers() == []

"""Commands of one's own in place of our trainer: real gangs of small scripts, and what the launchers make of them."""

from __future__ import annotations

import dataclasses
import doctest
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainers.job.plan import Cluster, Plan, make_plan
from trainers.job.ports import free_ports
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import Budgets, RestartPolicy, Strategy, Success, TrainingJob, standard_roles
from trainers.runtime import command
from trainers.runtime.local_gang import GangResult, LocalGang, leftovers
from trainers.runtime.restarts import saved_step
from trainers.runtime.strategies import UnsupportedJob, check_supported

CUSTOM = Strategy("custom")
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0  # seconds; a guard against hanging

PRELUDE = """
import json, os, pathlib, signal, sys, time
role, index = os.environ["TRAINYARD_ROLE"], int(os.environ["TRAINYARD_INDEX"])
name, generation = f"{role}-{index}", int(os.environ["TRAINYARD_GENERATION"])
folder = pathlib.Path(os.environ["TRAINYARD_CHECKPOINTS"])
def there(name): return (folder / name).exists()
def mark(name): (folder / name).touch()
def until(name):
    while not there(name): time.sleep(0.02)
"""


def script(text: str) -> list[str]:
    """A command that runs some Python."""
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(text)]


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    def make(
        command: Sequence[str] | Mapping[str, Sequence[str]],
        *,
        workers: int = 1,
        ps: int = 0,
        rule: str = "chief",
        budgets: Mapping[str, float] | None = None,
        caps: Mapping[str, int] | None = None,
        **args: Any,
    ) -> Plan:
        job = TrainingJob(
            "own",
            args=args,
            strategy=CUSTOM,
            roles=standard_roles(CUSTOM, workers=workers, ps=ps, command=command),
            success=Success(rule),
            budgets=Budgets(**(budgets or {})),
            restart=RestartPolicy(caps or {}),
            inputs={"records": "/data/manifest.json"},
            output=str(tmp_path / "job"),
        )
        return make_plan(job, Cluster.process(free_ports(1 + workers + ps)), gang="own-12345678")

    return make


def run(
    plan: Plan, *, retries: int = 0, meanwhile: Callable[[LocalGang], None] = lambda gang: None
) -> GangResult:
    with LocalGang(plan, retries=retries, env={"PYTHONPATH": str(ROOT)}) as gang:
        gang.start()
        meanwhile(gang)
        result = gang.wait(LIMIT)
        assert leftovers(plan.job.output, patience=5.0) == []
        return result


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_what_each_replica_is_told(plan_of: Any) -> None:
    tell = script("(folder / f'{name}.json').write_text(json.dumps(dict(os.environ)))")
    words = [*tell, "--rank=$(RANK)", "$$(RANK)", "$(NONE)"]
    words[2] += "\n(folder / f'{name}.argv').write_text(json.dumps(sys.argv[1:]))"
    plan = plan_of({"default": words, "ps": tell}, workers=2, ps=1, rule="all_workers", steps=7, data="a b")
    result = run(plan)
    assert result.outcome is not None
    assert result.outcome.state is JobState.SUCCEEDED
    assert set(result.exit_codes.values()) == {0}
    folder = Path(plan.job.output) / "checkpoints"
    told = {r.replica: json.loads((folder / f"{r.replica}.json").read_text()) for r in plan.replicas}
    host, port = plan.replicas[-1].address.split(":")
    for name, env in told.items():
        assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"]) == (host, port, "3")
        assert (env["DMLC_TRACKER_URI"], env["DMLC_TRACKER_PORT"], env["DMLC_NUM_WORKER"]) == (
            host,
            port,
            "3",
        )
        assert env["TRAINYARD_CHECKPOINTS"] == str(folder)
        assert (env["TRAINYARD_GENERATION"], env["TRAINYARD_ATTEMPT"]) == ("1", "1")
        assert json.loads(env["TRAINYARD_ARGS"]) == {"steps": 7, "data": "a b"}
        assert (env["TRAINYARD_ARG_STEPS"], env["TRAINYARD_ARG_DATA"]) == ("7", "a b")
        assert env["TRAINYARD_RECORDS"] == "/data/manifest.json"
        cluster = json.loads(env["TF_CONFIG"])
        role, _, index = name.partition("-")
        assert cluster["task"] == {"type": role, "index": int(index)}
        assert cluster["cluster"][role][int(index)] == env["TRAINYARD_ADDRESS"]
    ranks = {name: env["RANK"] for name, env in told.items() if "RANK" in env}
    assert ranks == {"chief-0": "0", "worker-0": "1", "worker-1": "2"}
    for name, rank in ranks.items():
        env = told[name]
        assert (env["NODE_RANK"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (rank, "0", "1")
        assert (env["PET_NNODES"], env["PET_NODE_RANK"], env["PET_NPROC_PER_NODE"]) == ("3", rank, "1")
        assert (env["PET_MASTER_ADDR"], env["PET_MASTER_PORT"]) == (host, port)
        assert env["DMLC_TASK_ID"] == f"0000{rank}"
        assert json.loads((folder / f"{name}.argv").read_text()) == [f"--rank={rank}", "$(RANK)", "$(NONE)"]


def test_the_chiefs_end_is_the_jobs_by_the_rule_chief(plan_of: Any) -> None:
    command = {
        "chief": script("until('worker'); until('ps'); print('bye')"),
        "worker": script("mark('worker'); time.sleep(600)"),
        "ps": script(
            "signal.signal(15, lambda *_: (mark('told'), sys.exit(0))); mark('ps'); time.sleep(600)"
        ),
    }
    plan = plan_of(command, ps=1)
    result = run(plan)
    assert result.exit_codes == {"chief-0": 0, "worker-0": 0, "ps-0": 0}
    assert (Path(plan.job.output) / "checkpoints" / "told").exists()


def test_the_rule_all_workers_waits_for_each(plan_of: Any) -> None:
    def release(gang: LocalGang) -> None:
        folder = gang.record.folder / "checkpoints"
        wait_for(folder / "worker-1")
        while not any(a.role == "chief" and a.ended for a in gang.record.attempts()):
            time.sleep(0.02)
        time.sleep(0.5)
        assert gang.record.outcome() is None
        (folder / "go").touch()

    plan = plan_of(script("mark(name)\nif role == 'worker': until('go')"), workers=2, rule="all_workers")
    result = run(plan, meanwhile=release)
    assert result.outcome is not None
    assert result.outcome.state is JobState.SUCCEEDED
    assert set(result.exit_codes.values()) == {0}


def test_result_and_progress_come_to_the_record(plan_of: Any) -> None:
    text = """
    progress = pathlib.Path(os.environ["TRAINYARD_PROGRESS"])
    progress.write_text(json.dumps({"step": 30, "target": 40, "loss": 0.25, "saved_step": 20}))
    until("seen")
    said = {"step": 40, "metrics": {"accuracy": 0.5, "note": "no number"}}
    pathlib.Path(os.environ["TRAINYARD_RESULT"]).write_text(json.dumps(said))
    """
    plan = plan_of(script(text), workers=0)

    def look(gang: LocalGang) -> None:
        deadline = time.monotonic() + LIMIT
        while True:
            beat = gang.record.heartbeat("chief", 0)
            if beat is not None and beat.step == 30:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (beat.target, beat.loss, beat.phase) == (40, 0.25, "running")
        assert gang.record.state is JobState.RUNNING
        (gang.record.folder / "checkpoints" / "seen").touch()

    result = run(plan, meanwhile=look)
    assert result.outcome is not None
    assert (result.outcome.step, dict(result.outcome.metrics)) == (40, {"accuracy": 0.5})
    assert sum(result.outcome.seconds.values()) > 0
    record = JobRecord.open(plan.job.output)
    assert saved_step(record) == 20
    spool = (record.folder / "tracking" / "spool.jsonl").read_text()
    names = {line.get("metric") for line in map(json.loads, spool.splitlines())}
    assert {"loss", "accuracy"} <= names


LINE = [sys.executable, str(ROOT / "docs" / "examples" / "line_by_sockets.py")]


def test_a_killed_process_brings_a_new_generation_that_goes_on(plan_of: Any) -> None:
    def kill(gang: LocalGang) -> None:
        wait_for(gang.record.folder / "checkpoints" / "line.json")
        (worker,) = gang.record.attempts("worker", 1)
        os.kill(worker.pid, signal.SIGKILL)

    plan = plan_of(LINE, workers=2, rule="all_workers", steps=150, pause=0.05)
    result = run(plan, meanwhile=kill)
    record = JobRecord.open(plan.job.output)
    assert result.outcome is not None
    assert result.outcome.state is JobState.SUCCEEDED, result.outcome
    assert result.outcome.step == 150
    assert result.outcome.metrics["w"] == pytest.approx(3, abs=0.05)
    assert result.outcome.metrics["b"] == pytest.approx(2, abs=0.05)
    generation = record.generation()
    assert (generation.number, generation.by) == (2, "worker-1")
    assert generation.reason.startswith("INFRA: the command was ended by SIGKILL")
    first = record.attempts("worker", 1)[0]
    assert (first.signal, first.failure_class) == (9, "INFRA")
    # The others' connections broke: no fault of theirs.
    for role, index in (("chief", 0), ("worker", 0)):
        assert record.attempts(role, index)[0].failure_class is None
    log = (record.folder / "logs" / "worker-1.log").read_text()
    assert "rank 2 of 3 goes on from step 0" in log.splitlines()[0]
    assert any(f"goes on from step {n}" in log for n in range(10, 151, 10))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 88)])
def test_a_lost_pod_comes_back_and_all_go_on(plan_of: Any, number: int, code: int) -> None:
    seen: list[int] = []

    def lose(gang: LocalGang) -> None:
        wait_for(gang.record.folder / "checkpoints" / "line.json")
        gang.signal("worker-0", number)
        seen.append(gang.launchers["worker-0"].wait(LIMIT))

    plan = plan_of(LINE, workers=1, rule="all_workers", steps=150, pause=0.05)
    result = run(plan, retries=1, meanwhile=lose)
    record = JobRecord.open(plan.job.output)
    assert seen == [code]
    assert result.outcome is not None
    assert result.outcome.state is JobState.SUCCEEDED, result.outcome
    assert result.exit_codes == {"chief-0": 0, "worker-0": 0}
    assert record.generation().number >= 2
    assert all(a.failure_class in (None, "PREEMPTED", "PEER_LOST") for a in record.attempts())


def test_an_error_of_ones_own_ends_the_job_with_its_log(plan_of: Any) -> None:
    # Rank 0 loses its connection because of it, and fails too: a moment later, and not by its own fault.
    command = {
        "chief": script("until('broken'); time.sleep(0.2); raise ConnectionError('peer closed')"),
        "worker": script("mark('broken'); raise ValueError('the shape is wrong')"),
    }
    plan = plan_of(command)
    result = run(plan)
    assert result.outcome is not None
    failure = result.outcome.failure
    assert failure is not None
    assert (str(failure.failure_class), failure.replica, failure.exit_code) == ("USER", "worker-0", 1)
    assert failure.reason == "the command exited with 1"
    assert failure.log_tail[-1] == "ValueError: the shape is wrong"
    assert result.exit_codes == {"chief-0": 81, "worker-0": 81}
    assert JobRecord.open(plan.job.output).generation().number == 1


@pytest.mark.parametrize(("code", "name"), [(82, "DATA"), (127, "CONFIG"), (83, "CONFIG")])
def test_exit_codes_say_the_class(plan_of: Any, code: int, name: str) -> None:
    result = run(plan_of(script(f"sys.exit({code})"), workers=0))
    assert result.outcome is not None
    assert result.outcome.failure is not None
    assert str(result.outcome.failure.failure_class) == name


def test_what_may_be_retried_is_up_to_its_cap(plan_of: Any) -> None:
    plan = plan_of(script("os.kill(os.getpid(), 9)"), workers=0, caps={"INFRA": 2})
    result = run(plan)
    assert result.outcome is not None
    assert result.outcome.failure is not None
    assert result.outcome.failure.reason == "the command was ended by SIGKILL (failure 3 of its class)"
    record = JobRecord.open(plan.job.output)
    assert [a.generation for a in record.attempts()] == [1, 2, 3]


def test_a_command_that_is_not_there(plan_of: Any) -> None:
    result = run(plan_of(["no-such-program", "--fast"]))
    assert result.outcome is not None
    failure = result.outcome.failure
    assert failure is not None
    assert (failure.code, str(failure.failure_class)) == ("runtime.command", "CONFIG")
    assert failure.reason.startswith("can't start 'no-such-program'")
    assert "image" in failure.hint


def test_no_command_starts_before_all_have_met(plan_of: Any) -> None:
    plan = plan_of(script("mark(name)"), workers=2, budgets={"start": 1.0})
    with LocalGang(plan, env={"PYTHONPATH": str(ROOT)}) as gang:
        gang.start("chief-0", "worker-1")
        result = gang.wait(LIMIT)
    assert result.exit_codes == {"chief-0": 86, "worker-1": 86}
    assert result.outcome is None
    # On a busy machine worker-1 may be late too.
    assert re.search(r"worker-0(, worker-1)? did not come within 1 s", gang.log("chief-0"))
    assert list((gang.record.folder / "checkpoints").iterdir()) == []
    assert gang.record.attempts() == []


def test_silence_is_no_stall_but_ending_to_speak_is(plan_of: Any) -> None:
    speak = """
    if generation == 1 and role == "chief":
        pathlib.Path(os.environ["TRAINYARD_PROGRESS"]).touch()
        time.sleep(600)
    time.sleep(3)  # longer than the budget, without a word
    """
    plan = plan_of(script(speak), budgets={"stall": 1.0})
    result = run(plan)
    assert result.outcome is not None
    assert result.outcome.state is JobState.SUCCEEDED
    record = JobRecord.open(plan.job.output)
    first, second = record.attempts("chief", 0)
    assert (first.failure_class, second.failure_class) == ("STALLED", None)
    assert record.generation().reason.startswith("STALLED: the command has not written its progress file")
    assert [a.failure_class for a in record.attempts("worker", 0)] == [None, None]


def test_a_finished_job_starts_nothing(plan_of: Any) -> None:
    plan = plan_of(script("mark(name)"), workers=0)
    record = JobRecord.create(plan)
    record.finish(JobState.SUCCEEDED, step=3)
    with LocalGang(plan, env={"PYTHONPATH": str(ROOT)}) as gang:
        gang.start()
        assert gang.wait(LIMIT).exit_codes == {"chief-0": 0}
    assert record.attempts() == []


def test_the_examples_of_the_module_hold() -> None:
    assert doctest.testmod(command).failed == 0
    assert doctest.testmod(command).attempted == 2


def test_a_share_of_the_workers_is_no_rule_for_commands() -> None:
    job = TrainingJob(
        "own",
        strategy=CUSTOM,
        roles=standard_roles(CUSTOM, workers=2, command=["x"]),
        success=Success("fraction", 0.5),
    )
    with pytest.raises(UnsupportedJob, match="use rule chief or all_workers"):
        check_supported(job)


def test_an_interpreter_with_nothing_but_the_trainer_package_is_enough(plan_of: Any, tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "trainer_wheel.py"), str(tmp_path / "dist")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    wheel = Path(built.stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        metadata = archive.read(f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/METADATA").decode()
        assert {name.split("/")[0].partition("-")[0] for name in archive.namelist()} == {
            "trainers",
            "trainyard_trainer",
        }
    assert "Requires-Dist" not in metadata
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"\nVersion: {version[1]}\n" in metadata
    # -I: no PYTHONPATH, no user site; -S: no site-packages. What is not in the wheel or Python is not there.
    bare = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    bare += "runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    words = [sys.executable, "-I", "-S", "-W", "error", "-c", bare, str(tmp_path / "site")]
    plan = plan_of([*words[:-1], str(tmp_path / "both"), "line_by_sockets"], workers=1, steps=20)
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "trainers").symlink_to(tmp_path / "site" / "trainers")
    (tmp_path / "both" / "line_by_sockets.py").symlink_to(LINE[1])
    replicas = tuple(
        dataclasses.replace(r, command=(*words, "trainers.runtime.launcher")) for r in plan.replicas
    )
    result = run(dataclasses.replace(plan, replicas=replicas))
    assert result.exit_codes == {"chief-0": 0, "worker-0": 0}
    assert result.outcome is not None
    assert result.outcome.step == 20


def test_a_command_s_job_has_no_model_of_ours(plan_of: Any) -> None:
    from trainers.runtime.restore import NoTrainer, load_trained

    plan = plan_of(["x"], workers=0)
    JobRecord.create(plan)
    with pytest.raises(NoTrainer, match="ran a command of its own"):
        load_trained(plan.job.output)


def test_a_peer_that_is_silent_for_good_is_not_waited_for(plan_of: Any) -> None:
    """Its launcher stands still, as on a node that hangs: the chief leaves, and holds its machine no longer."""
    plan = plan_of(script("mark(name)\ntime.sleep(600)"), budgets={"start": 6.0})
    with LocalGang(plan, env={"PYTHONPATH": str(ROOT)}) as gang:
        gang.start()
        wait_for(gang.record.folder / "checkpoints" / "worker-0")
        wait_for(gang.record.folder / "checkpoints" / "chief-0")
        gang.signal("worker-0", signal.SIGSTOP)
        assert gang.launchers["chief-0"].wait(LIMIT) == 86
        assert "worker-0 gave no sign of life for 6 s" in gang.log("chief-0")

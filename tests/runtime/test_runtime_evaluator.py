"""The evaluator: what it makes of checkpoints, in this process; and its launcher, with small scripts in its place."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launching import QUICK, Run
from trainers.job.failures import FailureClass
from trainers.job.observations import Evaluation, add_evaluation, add_warning, evaluations, warnings
from trainers.job.plan import Plan
from trainers.job.record import Heartbeat, JobRecord, JobState
from trainers.job.spec import RoleKind
from trainers.runtime import evaluator as evaluator_module
from trainers.runtime.evaluator import Evaluator
from trainers.runtime.run import train


def train_here(plan: Plan) -> JobRecord:
    record = JobRecord.open(plan.job.output)
    train(record, plan, plan.replica(RoleKind.CHIEF, 0))
    return record


def evaluator_of(plan: Plan, **more: Any) -> Evaluator:
    return Evaluator(JobRecord.open(plan.job.output), plan, plan.replica(RoleKind.EVALUATOR, 0), **more)


def test_checkpoints_are_evaluated_as_they_come(digits_jobs: Any, tmp_path: Path) -> None:
    """Looks are forced between the steps of a training that is made by hand."""
    plan = digits_jobs.plan(evaluator=True, steps=300, checkpoint_every=100, learning_rate=0.003)
    done = train_here(digits_jobs.plan("source", steps=300, checkpoint_every=100, learning_rate=0.003))
    record = JobRecord.open(plan.job.output)
    source, target = done.folder / "checkpoints", record.folder / "checkpoints"
    target.mkdir()
    coming = [100, 300]  # it falls behind: 200 has come and gone by the time it looks

    def next_checkpoint(_: float) -> None:
        if not coming:
            record.finish(JobState.SUCCEEDED, step=300)
            return
        step = coming.pop(0)
        for file in source.glob(f"step-{step}.*"):
            shutil.copy(file, target)
        (target / "checkpoint").write_text(
            f'model_checkpoint_path: "step-{step}"\nall_model_checkpoint_paths: "step-{step}"\n'
        )

    evaluator_of(plan, sleep=next_checkpoint).run()
    found = evaluations(record.folder)
    assert [evaluation.step for evaluation in found] == [100, 300]
    assert all({"accuracy", "loss", "brier"} <= set(e.metrics) and e.examples == 364 for e in found)
    assert found[1].metrics["accuracy"] > 0.9
    assert found[1].metrics["loss"] < found[0].metrics["loss"]
    beat = record.heartbeat("evaluator", 0)
    assert beat is not None
    assert (beat.phase, beat.step, beat.target) == ("ended", 300, 300)
    assert beat.loss == pytest.approx(found[1].metrics["loss"])
    assert beat.examples_per_s is not None
    # Started again it finds all done.
    evaluator_of(plan, sleep=lambda _: pytest.fail("nothing was left to wait for")).run()
    assert len(evaluations(record.folder)) == 2


def test_the_same_figures_as_evaluation_after_training(digits_jobs: Any, digits_manifest: Path) -> None:
    from trainers.evaluate import main

    plan = digits_jobs.plan(evaluator=True, steps=60)
    record = train_here(plan)
    evaluator_of(plan).run()
    after = main({"job": str(record.folder), "manifest": str(digits_manifest)})
    (found,) = evaluations(record.folder)
    assert found.step == 60
    # All that are means of the examples; those of the whole take longer, and are left to the end.
    assert found.metrics == pytest.approx({name: after["metrics"][name] for name in found.metrics})
    assert set(after["metrics"]) - set(found.metrics) == {"macro_f1", "ece"}
    assert found.examples == after["examples"]


def test_a_checkpoint_that_is_deleted_while_it_is_read(
    digits_jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = digits_jobs.plan(evaluator=True, steps=60, checkpoint_every=20)
    record = train_here(plan)
    (record.folder / "outcome.json").unlink()
    folder = record.folder / "checkpoints"
    look = evaluator_module._newest_step

    def looked(where: Path) -> int | None:
        step = look(where)
        for file in folder.glob("step-60.*"):
            file.unlink()  # between the look and the read
        return step

    monkeypatch.setattr(evaluator_module, "_newest_step", looked)

    def end(_: float) -> None:
        if record.outcome() is None:
            record.finish(JobState.SUCCEEDED, step=60)

    evaluator_of(plan, sleep=end).run()
    assert [evaluation.step for evaluation in evaluations(record.folder)] == [40]


def test_it_leaves_a_job_that_failed(digits_jobs: Any) -> None:
    plan = digits_jobs.plan(evaluator=True, steps=60)
    record = JobRecord.open(plan.job.output)
    evaluator_of(plan, sleep=lambda _: record.finish(JobState.FAILED) and None).run()
    assert evaluations(record.folder) == []


def run_launcher(plan: Plan, script: str, log: Path, *, times: Any = None) -> Any:
    return Run(plan, script, role="evaluator", times=times or QUICK, log=log)


@pytest.fixture(autouse=True)
def _message(termination_log: Path) -> None:
    """Launchers write their termination message to the test's file."""


def test_a_failing_evaluator_ends_as_a_warning(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan("multi", strategy="multi_worker", workers=1, evaluator=True, caps={"INFRA": 2})
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0, phase="training", step=1))
    run = run_launcher(plan, "os.kill(os.getpid(), 9)", tmp_path / "log")
    assert run() == 87
    assert len(run.scripts.children) == 3
    assert record.outcome() is None
    assert record.generation().number == 1  # all-reduce peers go on as they were
    assert record.state is JobState.PLANNED
    (warning,) = warnings(record.folder)
    assert warning.by == "evaluator-0"
    assert "it was given up: INFRA" in warning.text


def test_its_own_mistake_ends_nothing(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(evaluator=True)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0, phase="training", step=1))
    run = run_launcher(plan, "fail('USER', 'a metric is wrong')", tmp_path / "log")
    assert run() == 81
    assert record.outcome() is None
    assert "a metric is wrong" in warnings(record.folder)[0].text


EVALUATES_LATE = """
from trainers.job.observations import Evaluation, add_evaluation
if attempt == 1:
    beat(None, "waiting")
    record.finish(JobState.SUCCEEDED, step=10)
    time.sleep(0.3)
    os.kill(os.getpid(), 9)          # after the end of the job, before the last evaluation
add_evaluation(record.folder, Evaluation(10, {"loss": 1.0}, 5, 0.1))
"""


def test_the_last_checkpoint_is_evaluated_after_the_end(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(evaluator=True)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0, phase="training", step=1))
    run = run_launcher(plan, EVALUATES_LATE, tmp_path / "log")
    assert run() == 0
    assert len(run.scripts.children) == 2
    assert [evaluation.step for evaluation in evaluations(record.folder)] == [10]
    assert warnings(record.folder) == []
    # A pod that comes when all is done starts nothing.
    again = run_launcher(plan, "raise SystemExit(1)", tmp_path / "log")
    assert again() == 0
    assert again.scripts.children == []


def test_the_budget_after_the_end(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(evaluator=True, budgets={"evaluate": 0.5})
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0, phase="training", step=1))
    run = run_launcher(plan, "beat(None, 'waiting'); done(); time.sleep(60)", tmp_path / "log")
    assert run() == 0
    assert "the checkpoint of step 10 was not evaluated" in warnings(record.folder)[0].text


def test_it_leaves_with_the_class_of_a_job_that_failed(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(evaluator=True)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0, phase="training", step=1))
    script = """
    from trainers.job.failures import Failure
    beat(None, "waiting")
    record.finish(JobState.FAILED, failure=Failure(FailureClass.DATA, "no data", role="chief", index=0))
    time.sleep(60)
    """
    assert run_launcher(plan, script, tmp_path / "log")() == 82


def test_one_that_stands_still_is_started_again(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(
        strategy="parameter_server", workers=1, ps=1, evaluator=True, budgets={"stall": 0.5, "start": 5.0}
    )
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0, phase="training", step=1))
    script = """
    from trainers.job.observations import Evaluation, add_evaluation
    for _ in range(8):
        beat(None, "waiting"); time.sleep(0.1)      # longer than the budget: it is no stall, its loop goes round
    if attempt == 1:
        time.sleep(60)
    add_evaluation(record.folder, Evaluation(10, {"loss": 1.0}, 5, 0.1))
    done()
    """
    run = run_launcher(plan, script, tmp_path / "log")
    assert run() == 0
    assert len(run.scripts.children) == 2
    assert record.attempts("evaluator", 0)[0].failure_class == FailureClass.STALLED.value
    assert record.generation().number == 1


def test_sigterm_after_the_end_of_the_job(jobs: Any, tmp_path: Path) -> None:
    plan = jobs.plan(evaluator=True)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("chief", 0, phase="training", step=1))
    script = "beat(None, 'waiting'); done(); os.kill(os.getppid(), signal.SIGUSR2); time.sleep(60)"
    run = run_launcher(plan, script, tmp_path / "log")
    import signal

    before = signal.signal(signal.SIGUSR2, lambda *_: run.launcher.terminate())
    try:
        assert run() == 88
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert os.getpid() > 0


def test_nobody_waits_for_an_evaluator_and_it_waits_for_the_chief_alone(jobs: Any) -> None:
    from trainers.runtime.replica import Replica

    plan = jobs.plan(strategy="parameter_server", workers=2, ps=1, evaluator=True)
    record = JobRecord.open(plan.job.output)
    names = {role: Replica(record, role, 0, environ={}).missing_peers() for role in RoleKind}
    assert names[RoleKind.EVALUATOR] == ["chief-0"]
    assert all("evaluator-0" not in missing for missing in names.values())
    assert set(names[RoleKind.CHIEF]) == {"worker-0", "worker-1", "ps-0"}


def test_a_line_half_written_is_passed_over(tmp_path: Path) -> None:
    add_evaluation(tmp_path, Evaluation(10, {"loss": 0.5}, 100, 0.1))
    with (tmp_path / "evaluations.jsonl").open("a") as f:
        f.write('{"step": 20, "metr')
    add_evaluation(tmp_path, Evaluation(30, {"loss": 0.25}, 100, 0.1))
    add_evaluation(tmp_path, Evaluation(10, {"loss": 0.4}, 100, 0.1))
    found = evaluations(tmp_path)
    assert [(e.step, e.metrics["loss"]) for e in found] == [(10, 0.4), (30, 0.25)]
    assert all(e.at > 1e9 for e in found)
    assert warnings(tmp_path) == []
    add_warning(tmp_path, "evaluator-0", "oh")
    assert [(w.by, w.text) for w in warnings(tmp_path)] == [("evaluator-0", "oh")]


@pytest.mark.parametrize("wrong", [{"step": -1}, {"examples": 0.5}, {"metrics": {"loss": math.nan}}])
def test_no_nonsense_is_recorded(wrong: dict[str, Any]) -> None:
    values: dict[str, Any] = {"step": 1, "metrics": {}, "examples": 1, "seconds": 0.1}
    with pytest.raises(ValueError, match="must be"):
        Evaluation(**{**values, **wrong})


Unused = Callable  # keeps the import of the annotation's name

"""Asynchronous parameter servers that lose one after the other, or all at once: they arrive all the same."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.conftest import LIMIT, assert_arrived
from trainers.runtime.local_gang import leftovers

pytestmark = pytest.mark.slow


def test_all_workers_at_once_then_both_servers_then_each_launcher(gang: Callable) -> None:
    """Trainers by SIGKILL, then the launchers of worker, server and chief, whose pods come again."""
    run = gang(workers=2, ps=2, steps=4000, checkpoint_every=400, retries=2)
    run.start()
    run.until_step(20)

    run.recover(lambda: [run.kill_trainer("worker", index) for index in (0, 1)], anew=False)
    assert len(run.record.attempts("chief", 0)) == 1  # it waits for the workers, and goes on
    assert [len(run.record.attempts("worker", index)) for index in (0, 1)] == [2, 2]

    run.recover(lambda: [run.kill_trainer("ps", index) for index in (0, 1)])
    for role in ("worker", "ps", "chief"):
        gone = run.trainer_pid(role)
        run.recover(lambda role=role: run.signal(f"{role}-0", signal.SIGKILL), anew=role != "worker")
        run.until(lambda role=role, gone=gone: run.trainer_pid(role) != gone)
        assert gone not in leftovers(run.record.folder)  # it has died with its launcher
    assert_arrived(run, run.wait(LIMIT), 4000, every=400)
    classes = {a.failure_class for a in run.record.attempts()}
    assert classes <= {None, "INFRA", "PEER_LOST"}
    assert run.record.generation().number == 1


def test_a_worker_that_comes_back_makes_steps_again(gang: Callable, user_module: Callable) -> None:
    env = user_module(
        "telling",
        """
        import tensorflow as tf
        from trainers.models.digits import build_model, loss, optimizer
        from trainers.runtime.datasets import default_dataset

        def make_dataset(records, ctx):
            def tell(features, label):
                with tf.control_dependencies([tf.print("a batch")]):
                    return features, tf.identity(label)
            return default_dataset(records, ctx, ["image"]).map(tell)
        """,
    )
    run = gang(workers=2, ps=1, steps=1500, checkpoint_every=400, trainer="telling", env=env)
    run.start()
    run.until(lambda: all("a batch" in run.log(f"worker-{i}") for i in (0, 1)))
    run.recover(lambda: run.kill_trainer("worker", 0), anew=False)
    assert len(run.record.attempts("chief", 0)) == 1
    run.until(lambda: len(run.record.attempts("worker", 0)) == 2)
    told = run.log("worker-0").count("a batch")
    run.until(lambda: run.log("worker-0").count("a batch") > told)
    assert_arrived(run, run.wait(LIMIT), 1500, every=400)
    first, second = run.record.attempts("worker", 0)
    assert (first.signal, first.failure_class, second.failure_class) == (9, "INFRA", None)


def test_a_stopped_parameter_server_is_a_stall_of_the_gang(gang: Callable) -> None:
    run = gang(workers=1, ps=1, steps=800, checkpoint_every=200, budgets={"stall": 8.0})
    run.start()
    run.until_step(210)
    run.kill_trainer("ps", number=signal.SIGSTOP)
    run.until(lambda: run.record.generation().number == 2)
    assert_arrived(run, run.wait(LIMIT), 800, every=200)
    generation = run.record.generation()
    assert generation.reason.startswith("STALLED")
    stacks = {path.name: path.read_text() for path in (run.record.folder / "stacks").glob("*-0001.txt")}
    assert "fetch" in stacks["chief-0-0001.txt"]
    assert "in serve" in stacks["ps-0-0001.txt"]  # it was stopped, and had to go on to tell
    assert "in serve" in stacks["worker-0-0001.txt"]
    first = [a for a in run.record.attempts() if a.number == 1]
    classes = {f"{a.role}-{a.index}": a.failure_class for a in first}
    assert classes == {"chief-0": "STALLED", "ps-0": None, "worker-0": None}


def test_a_preempted_gang_saves_and_goes_on_free_of_charge(gang: Callable) -> None:
    caps = {"INFRA": 0, "STALLED": 0}
    run = gang(workers=2, ps=1, steps=1000, checkpoint_every=100_000, retries=1, caps=caps)
    run.start()
    run.until_step(100)
    for name in list(run.launchers):
        run.signal(name, signal.SIGTERM)
    run.until(lambda: len(run.record.attempts("chief", 0)) == 2)
    saved = run.record.attempts("chief", 0)[0]
    assert (saved.failure_class, saved.exit_code) == ("PREEMPTED", 88)
    assert_arrived(run, run.wait(LIMIT), 1000)
    at = int(saved.reason.rpartition(" ")[2])
    assert saved.reason == f"was asked to leave at step {at}"
    assert at >= 100
    assert run.resumed() == [0, at]

"""Gangs that wait in the triggerer: no slot is held, and nothing is started twice whoever is killed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.deferrable.conftest import HANG, wait_for

# Instead of the suite's own limit: a test waits for several things, on a machine that others use.
pytestmark = pytest.mark.timeout(2 * HANG)


def counting(gate: Any) -> str:
    """A script that counts aloud until the gate is opened, and says then how far it came."""
    loop = f'while [ ! -e {gate.path} ]; do n=$((n + 1)); echo "number $n"; sleep 0.25; done'
    return f'n=0; {loop}; echo "counted to $n"'


def whole(gang: Any, task: Any) -> list[int]:
    """The numbers that a replica that counts has said by its own word."""
    (said,) = (line for line in gang.log(task) if "counted to" in line)
    return list(range(1, int(said.rpartition(" ")[2]) + 1))


def test_a_hundred_waiting_replicas_hold_no_slot(airflow: Any, gate: Any) -> None:
    """With eight slots, all hundred run at once, and another task runs meanwhile."""
    gang = airflow.begin(replicas=100, script=gate.wait)
    uids = gang.deferred(100)
    beside = airflow.begin("waiting_beside")
    beside.ends("success")
    assert gang.pods("Running") == uids
    gate.open()
    tasks = gang.ends("success")
    assert {t.try_number for t in tasks} == {1}
    gang.nothing_left()


@pytest.mark.parametrize("component", ["triggerer", "scheduler"])
def test_pods_are_adopted_and_not_restarted(airflow: Any, gate: Any, component: str) -> None:
    """What the triggerer that was killed had told is not told again by the next one, nor left out."""
    gang = airflow.begin(replicas=4, script=f"echo number 1; {gate.wait}; echo number 2")
    counter = airflow.begin(replicas=1, script=counting(gate))
    uids = gang.deferred(4) | counter.deferred(1)
    wait_for("a line is in the log", lambda: gang.numbers(gang.tasks()[0]) == [1])
    wait_for("lines are there", lambda: len(counter.numbers(counter.tasks()[0])) >= 3)
    airflow.kill(component)
    before = len(counter.numbers(counter.tasks()[0]))
    wait_for("more is told", lambda: len(counter.numbers(counter.tasks()[0])) > before)
    assert gang.pods("Running") | counter.pods("Running") == uids
    gate.open()
    tasks = [*gang.ends("success"), *counter.ends("success")]
    assert {t.try_number for t in tasks} == {1}
    assert [gang.numbers(task) for task in gang.tasks()] == [[1, 2]] * 4
    (task,) = counter.tasks()
    assert counter.numbers(task) == whole(counter, task)
    gang.nothing_left()
    counter.nothing_left()


def test_a_log_is_live_and_whole_while_the_task_is_deferred(airflow: Any, gate: Any) -> None:
    gang = airflow.begin(replicas=1, script=counting(gate))
    gang.deferred(1)
    early = wait_for("lines are there", lambda: gang.numbers(gang.tasks()[0])[:3])
    assert early == list(range(1, len(early) + 1))
    (task,) = gang.tasks()
    assert task.state == "deferred"
    gate.open()
    gang.ends("success")
    (task,) = gang.tasks()
    assert gang.numbers(task) == whole(gang, task)
    ended = [line for line in gang.log(task) if line.endswith("has ended well")]
    assert len(ended) == 1, "the triggerer ends it, without a process of its own"


def test_an_api_that_does_not_answer_costs_no_try(airflow: Any, gate: Any) -> None:
    """A minute of silence while the tasks are deferred: pods go on, and their end is seen afterwards."""
    gang = airflow.begin(replicas=2, script=counting(gate))
    uids = gang.deferred(2)
    with airflow.frozen("kubelet"):
        time.sleep(60)
        gate.open()
        assert [t.state for t in gang.tasks()] == ["deferred"] * 2
    tasks = gang.ends("success")
    assert {t.try_number for t in tasks} == {1}
    for task in gang.tasks():
        assert gang.numbers(task) == whole(gang, task)
    assert len(uids) == 2
    gang.nothing_left()


def mark_task(gang: Any) -> None:
    gang.patch("/taskInstances/train.replica/0", {"new_state": "failed"})


def mark_run(gang: Any) -> None:
    gang.patch("", {"state": "failed"})


def triggers_run(gang: Any) -> None:
    """Wait until the triggerer has all replicas: before that nobody tells it of what is marked."""
    for task in gang.tasks():
        wait_for("its trigger runs", lambda task=task: gang.numbers(task) == [1])


def test_pods_of_what_is_marked_or_cleared_are_deleted(airflow: Any, gate: Any) -> None:
    """A cleared task gets another pod: whoever clears it wants it done again, not the pod that was there."""
    script = f"echo number 1; {gate.wait}"
    one_task, whole_run, cleared = (airflow.begin(replicas=2, script=script) for _ in range(3))
    before = {gang: gang.deferred(2) for gang in (one_task, whole_run, cleared)}[cleared]
    triggers_run(one_task)
    mark_task(one_task)
    mark_run(whole_run)
    cleared.clear("train.replica", 0)
    wait_for("its pod is deleted", lambda: len(one_task.pods("Running")) == 1)
    assert [t.state for t in one_task.tasks()] == ["failed", "deferred"]
    whole_run.ends("failed")
    whole_run.nothing_left()
    wait_for("its pod is another one", lambda: set(cleared.pods("Running").values()) - set(before.values()))
    after = cleared.deferred(2)
    assert len(set(after.values()) & set(before.values())) == 1
    gate.open()
    one_task.ends("failed")
    cleared.ends("success")
    one_task.nothing_left()
    cleared.nothing_left()


def test_what_is_out_of_time_leaves_nothing(airflow: Any, gate: Any) -> None:
    """`dagrun_timeout` skips the cleanup, too; `execution_timeout` is the trigger's."""
    step = airflow.begin("waiting_step_late", script=gate.wait)
    gang = airflow.begin("waiting_late", replicas=3, script=f"echo number 1; {gate.wait}")
    gang.deferred(3)
    triggers_run(gang)
    gang.out_of_time()
    gang.ends("failed")
    gang.nothing_left()
    step.ends("failed")
    (task,) = step.tasks("step")
    wait_for("the card is in the log", lambda: any("airflow.timeout" in line for line in step.log(task)))
    step.nothing_left()


def test_what_is_stopped_while_no_triggerer_runs_leaves_nothing(airflow: Any, gate: Any) -> None:
    """Deferred, and nobody has its trigger: the cleanup or the DAG's callback takes the pods."""
    with airflow.frozen("triggerer"):
        late = airflow.begin("waiting_late", replicas=3, script=gate.wait)
        marked = airflow.begin(replicas=2, script=gate.wait)
        step = airflow.begin("waiting_step", script=gate.wait)
        late.deferred(3)
        marked.deferred(2)
        step.deferred(1, "step")
        late.out_of_time()
        mark_run(marked)
        step.patch("/taskInstances/step", {"new_state": "failed"})
        for run in (late, marked, step):
            run.ends("failed")
            run.nothing_left()

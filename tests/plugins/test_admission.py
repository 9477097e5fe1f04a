"""Admission: whole gangs, never more than the quota, nobody left waiting for ever; on a real API too."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from hypothesis import given, settings
from hypothesis import strategies as st
from trainyard.admission import LEDGER, PATIENCE, Ledger, Quota, demand_of, usage_of
from trainyard.failing import StepFailed
from trainyard.kubelet import FakeCluster
from trainyard.operators.admit import AdmitOperator, ask, leave

from trainers.job import labels
from trainers.job.placement import Placement
from trainers.job.plan import Cluster, Plan, make_plan
from trainers.job.policies import Budgets
from trainers.job.record import JobRecord, JobState
from trainers.job.resources import Resources
from trainers.job.spec import Strategy, TrainingJob, standard_roles

GPU = "requests.nvidia.com/gpu"


def _quota(gpus: int) -> Quota:
    return Quota("team", {GPU: Decimal(gpus)}, {})


def _demand(gpus: int) -> dict[str, Decimal]:
    return {GPU: Decimal(gpus), "pods": Decimal(gpus)}


def _pods(gang: str, gpus: int, phase: str = "Running") -> list[dict[str, Any]]:
    """Pods of one GPU each."""
    container = {"resources": {"requests": {"nvidia.com/gpu": "1"}}}
    meta = {"labels": {labels.LABEL_GANG: gang}}
    return [{"metadata": meta, "spec": {"containers": [container]}, "status": {"phase": phase}}] * gpus


def test_two_gangs_that_fit_one_by_one_are_not_both_let_in() -> None:
    ledger = Ledger()
    assert ledger.ask("a", _demand(5), [_quota(8)], [], now=0).admitted
    waits = ledger.ask("b", _demand(5), [_quota(8)], [], now=1)
    assert not waits.admitted
    assert waits.reason == (
        f"it asks for 5 {GPU} of quota team; 0 of 8 are in use and 5 are promised to gangs that come up"
    )
    some = _pods("a", 3)
    assert (
        "3 of 8 are in use and 2 are promised" in ledger.ask("b", _demand(5), [_quota(8)], some, now=2).reason
    )
    assert ledger.ask("a", _demand(5), [_quota(8)], some, now=3).reason == "it was let in before"
    all_there = _pods("a", 5)
    assert ledger.ask("b", _demand(5), [_quota(8)], all_there, now=4).reason.endswith("5 of 8 are in use")
    assert ledger.ask("b", _demand(5), [_quota(8)], _pods("a", 5, "Succeeded"), now=5).admitted


def test_what_can_never_fit_is_said_at_once_and_forgotten() -> None:
    ledger = Ledger()
    decision = ledger.ask("a", _demand(9), [_quota(8)], [], now=0)
    assert decision.never
    assert decision.reason == f"it asks for 9 {GPU} of quota team, which has 8 in all"
    assert ledger.to_data() == {}


def test_small_ones_may_go_first_but_not_for_ever() -> None:
    ledger = Ledger()
    running = _pods("old", 4)
    assert not ledger.ask("large", _demand(8), [_quota(8)], running, now=0).admitted
    assert ledger.ask("small", _demand(2), [_quota(8)], running, now=60).admitted, "there is room for it"
    for now in range(60, int(PATIENCE) + 60, 60):
        ledger.ask("large", _demand(8), [_quota(8)], running, now=now)
    late = ledger.ask("late", _demand(2), [_quota(8)], running, now=PATIENCE + 30)
    assert late.reason == "large asked before and has waited longer"
    assert ledger.ask("late", _demand(2), [_quota(8)], running, now=PATIENCE + 400).admitted, (
        "large asks no more"
    )


def test_a_reservation_whose_pods_never_come_is_given_up() -> None:
    ledger = Ledger()
    assert ledger.ask("lost", _demand(8), [_quota(8)], [], now=0).admitted
    assert not ledger.ask("b", _demand(8), [_quota(8)], [], now=600).admitted
    assert ledger.ask("b", _demand(8), [_quota(8)], [], now=1300).admitted


def test_a_ledger_comes_back_from_its_config_map_and_bears_strange_entries() -> None:
    ledger = Ledger()
    ledger.ask("a", _demand(5), [_quota(8)], [], now=1)
    data = ledger.to_data() | {"x": "not json", "y": "[]", "z": '{"demand": {"a": "b"}}'}
    assert Ledger.from_data(data).to_data() == ledger.to_data()
    assert Ledger.from_data(None).to_data() == {}


_EVENTS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from(["ask", "pod", "end"]), st.integers(1, 30)),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(_EVENTS, st.fixed_dictionaries({gang: st.integers(1, 8) for gang in "abcdef"}))
def test_whatever_happens_no_more_is_let_in_than_fits_and_all_get_their_turn(
    events: list[tuple[str, str, int]], sizes: dict[str, int]
) -> None:
    ledger, there, admitted, now = Ledger(), dict.fromkeys(sizes, 0), set(), 0

    def pods() -> list[dict[str, Any]]:
        return [pod for gang, count in there.items() for pod in _pods(gang, count)]

    def step(gang: str, what: str) -> None:
        if what == "ask" and gang not in admitted and not there[gang]:
            if ledger.ask(gang, _demand(sizes[gang]), [_quota(8)], pods(), now=now).admitted:
                admitted.add(gang)
        elif what == "pod" and gang in admitted and there[gang] < sizes[gang]:
            there[gang] += 1
        elif what == "end" and there[gang] == sizes[gang]:
            there[gang] = 0
            admitted.discard(gang)
            ledger.leave(gang)  # as the gang's cleanup does
        assert sum(max(sizes[g], there[g]) for g in admitted) <= 8

    for gang, what, seconds in events:
        now += seconds
        step(gang, what)
    # From any state on, each that goes on asking is let in, once those before it come up and end.
    waiting = [gang for gang in sizes if gang not in admitted and not there[gang]]
    for _ in range(len(sizes) + 1):
        for gang in list(admitted):
            there[gang] = sizes[gang]
            step(gang, "end")
        for gang in list(waiting):
            now += 30
            step(gang, "ask")
            if gang in admitted:
                waiting.remove(gang)
    assert not waiting


# ---- on the process kubelet


@pytest.fixture
def team(tmp_path: Path) -> Iterator[FakeCluster]:
    """A cluster of its own whose namespace has a quota of two CPUs."""
    with FakeCluster() as cluster:
        core = cluster.core_v1()
        core.create_namespaced_resource_quota(
            cluster.kubelet.namespace, {"metadata": {"name": "team"}, "spec": {"hard": {"requests.cpu": "2"}}}
        )
        yield cluster


def _plan(cluster: FakeCluster, folder: Path, gang: str, *, cpu: float = 0.4, **options: Any) -> Plan:
    strategy = Strategy("parameter_server")
    resources = {"default": Resources(cpu, "64Mi")}
    job = TrainingJob(
        "digits",
        "trainers.models.digits",
        roles=standard_roles(strategy, workers=2, ps=1, resources=resources),
        strategy=strategy,
        output=str(folder),
        **options,
    )
    return make_plan(job, Cluster.kubernetes(cluster.kubelet.namespace), gang=gang)


def _start(cluster: FakeCluster, plan: Plan) -> None:
    for replica in plan.replicas:
        needs = {"cpu": f"{replica.resources.cpu}", "memory": "64Mi"}
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        container = {"name": "base", "image": "x", "command": command, "resources": {"requests": needs}}
        meta = {"name": replica.name, "labels": dict(replica.labels)}
        cluster.run({"metadata": meta, "spec": {"restartPolicy": "Never", "containers": [container]}})


def test_many_ask_at_once_and_one_is_let_in(team: FakeCluster, tmp_path: Path) -> None:
    core, namespace = team.core_v1(), team.kubelet.namespace
    plans = [_plan(team, tmp_path / name, name) for name in ("a", "b", "c")]
    answers: dict[str, bool] = {}

    def run(plan: Plan) -> None:
        answers[plan.gang] = ask(core, plan)[0].admitted

    threads = [threading.Thread(target=run, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = [plan for plan in plans if answers[plan.gang]]
    _start(team, first)
    second = next(plan for plan in plans if plan is not first)
    decision, _ = ask(core, second)
    assert decision.reason == "it asks for 1.6 requests.cpu of quota team; 1.6 of 2 are in use"
    for replica in first.replicas:
        core.delete_namespaced_pod(replica.name, namespace, grace_period_seconds=0)
        team.wait_gone(replica.name)
    assert ask(core, second)[0].admitted
    leave(core, second.gang, namespace)
    (left,) = [plan for plan in plans if plan not in (first, second)]
    assert ask(core, left)[0].admitted, "a gang that left holds nothing"
    assert set(core.read_namespaced_config_map(LEDGER, namespace).data) == {left.gang}


def test_a_plans_demand_is_what_its_pods_use(team: FakeCluster, tmp_path: Path) -> None:
    plan = _plan(team, tmp_path, "a")
    _start(team, plan)
    core = team.core_v1()
    pods = core.api_client.sanitize_for_serialization(core.list_namespaced_pod(team.kubelet.namespace).items)
    used = usage_of(pods)
    asked = demand_of(plan)
    assert used["requests.cpu"] == asked["requests.cpu"] == asked["cpu"] == Decimal("1.6")
    assert used["requests.memory"] == asked["requests.memory"] == 4 * 64 * 1024**2
    assert used["pods"] == asked["pods"] == 4


@pytest.fixture
def admit(team: FakeCluster, pipelines: Path, context_of: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the admit task of a gang whose record is there; (the operator, its context, the record)."""
    monkeypatch.setenv("AIRFLOW_CONN_TRAINYARD_KUBERNETES", team.airflow_connection)

    def make(**options: Any) -> tuple[AdmitOperator, dict[str, Any], JobRecord]:
        with DAG("pipeline"):
            operator = AdmitOperator(task_id="admit", group="train")
        context = context_of(operator)
        folder = pipelines / "jobs" / "pipeline" / labels.run_slug(context["run_id"])
        return operator, context, JobRecord.create(_plan(team, folder, "gang", **options))

    return make


def test_the_task_waits_lets_in_and_gives_up_with_what_it_waited_for(
    admit: Any, team: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operator, context, record = admit(budgets=Budgets(admit=3600))
    other = _plan(team, tmp_path / "other", "other")
    assert ask(team.core_v1(), other)[0].admitted
    assert not operator.poke(context).is_done
    assert "1.6 are promised to gangs that come up" in capsys.readouterr().out
    leave(team.core_v1(), "other", other.namespace)
    assert operator.poke(context).is_done
    assert operator.poke(context).is_done, "again: it was let in before"
    record.finish(JobState.CANCELLED)
    assert operator.poke(context).is_done, "a job that is over waits for nothing"


def test_too_large_and_too_late_are_two_failures_that_end_the_job(
    admit: Any, team: FakeCluster, tmp_path: Path
) -> None:
    operator, context, record = admit(cpu=0.6)
    with pytest.raises(
        StepFailed, match=r"can never be let in.*2\.4 requests\.cpu.*which has 2 in all"
    ) as caught:
        operator.poke(context)
    assert caught.value.failure.failure_class.value == "CONFIG"
    assert record.outcome().failure.code == "admit.too_large"


def test_who_waited_too_long_fails_with_the_reason(admit: Any, team: FakeCluster, tmp_path: Path) -> None:
    operator, context, record = admit(budgets=Budgets(admit=0.001))
    assert ask(team.core_v1(), _plan(team, tmp_path / "other", "other"))[0].admitted
    operator.poke(context)
    with pytest.raises(
        StepFailed, match=r"not let in within 0\.001 s: it asks for 1\.6 requests\.cpu"
    ) as caught:
        operator.poke(context)
    assert caught.value.failure.failure_class.value == "QUOTA"
    assert caught.value.final
    assert record.outcome().failure.code == "admit.no_room"
    data = team.core_v1().read_namespaced_config_map(LEDGER, team.kubelet.namespace).data
    assert set(data) == {"other"}


def test_kueue_admits_where_a_queue_is_named(admit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    operator, context, _ = admit(placement=Placement(queue="team-a"), cpu=5)
    assert operator.poke(context).is_done
    assert "Kueue admits the gang, by queue team-a" in capsys.readouterr().out

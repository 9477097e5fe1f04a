"""Large role groups as Indexed Jobs: their plans and manifests, and how long their start is waited for."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.client import (
    V1Job,
    V1JobSpec,
    V1JobStatus,
    V1ObjectMeta,
    V1Pod,
    V1PodCondition,
    V1PodSpec,
    V1PodStatus,
    V1PodTemplateSpec,
)
from trainyard.admission import demand_of
from trainyard.cluster import core_api
from trainyard.indexed_jobs import GroupWatch, job_manifest, threshold
from trainyard.operators.gang import JobTemplate, PlanOperator
from trainyard.operators.replica import ReplicaOperator, plan_rows
from trainyard.trigger_form import DEFAULTS

from tests.plugins.pod_security import violations
from trainers.job.failures import FailureClass
from trainers.job.placement import Placement
from trainers.job.plan import Cluster, Plan, make_plan
from trainers.job.policies import RestartPolicy
from trainers.job.resources import Resources
from trainers.job.spec import RoleKind, Strategy, StrategyKind, TrainingJob, standard_roles

GOLDEN = Path(__file__).parent / "golden"
FORM = {**DEFAULTS, "workers": 64, "ps": 1}
SMALL = {"default": Resources(0.05, "64Mi")}


# ---- plans


def _plan(root: Path, *, above: int, form: dict[str, Any] = FORM, **options: Any) -> Plan:
    template = JobTemplate("digits", "trainers.models.digits", **options)
    job = template.job(form, manifest=f"{root}/records/m.json", output=f"{root}/jobs/p/r")
    gang = "digits-retrain-1a2b3c4d"
    return make_plan(job, Cluster.kubernetes("ml"), gang=gang, image="trainer:1", indexed_above=above)


def _manifest(plan: Plan, row: dict[str, Any], context_of: Any, version: tuple[int, int]) -> dict[str, Any]:
    with DAG("pipeline"):
        operator = ReplicaOperator(task_id="replica", **row)
    operator.pod_overlay = operator._mine(plan)[0].pod
    pod = core_api().api_client.sanitize_for_serialization(
        operator.build_pod_request_obj(context_of(operator, map_index=0), dry_run=True)
    )
    for label in ("airflow_version", "airflow_kpo_in_cluster"):
        pod["metadata"]["labels"].pop(label, None)
    restart, queue = plan.job.restart, plan.job.placement.queue
    return job_manifest(
        pod,
        name=row["name"],
        completions=row["completions"],
        restart=restart,
        version=version,
        queue=queue,
    )


@pytest.fixture
def on_a_cluster(pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINYARD_STORAGE_CLAIM", "trainyard-storage")
    monkeypatch.setenv("TRAINYARD_NAMESPACE", "ml")
    return pipelines


@pytest.mark.parametrize("version", [(1, 24), (1, 26), (1, 33)])
def test_sixty_four_workers_are_one_job_as_written_down(
    version: tuple[int, int], on_a_cluster: Path, context_of: Any
) -> None:
    placement = Placement(queue="team-a") if version == (1, 33) else Placement()
    plan = _plan(on_a_cluster, above=32, placement=placement)
    rows = plan_rows(plan)
    assert [(row["hostname"], row.get("completions", 0)) for row in rows] == [
        ("worker", 64),
        ("ps-0", 0),
        ("chief-0", 0),
    ]
    job = _manifest(plan, rows[0], context_of, version)
    text = json.dumps(job, sort_keys=True, indent=1).replace(str(on_a_cluster), "/storage") + "\n"
    path = GOLDEN / f"indexed-job-{'.'.join(map(str, version))}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    template = job["spec"]["template"]
    assert violations(template) == []
    assert "trainyard.io/index" not in template["metadata"]["labels"]
    assert not {"hostname", "activeDeadlineSeconds"} & set(template["spec"])
    assert template["spec"]["subdomain"] == plan.gang
    assert template["metadata"]["labels"].items() >= plan.service()["spec"]["selector"].items()


def test_every_code_of_ours_is_in_the_failure_policy_as_in_the_table(
    on_a_cluster: Path, context_of: Any
) -> None:
    restart = RestartPolicy({FailureClass.INFRA: 9})
    plan = _plan(on_a_cluster, above=32, restart=restart)
    spec = _manifest(plan, plan_rows(plan)[0], context_of, (1, 33))["spec"]
    assert spec["backoffLimitPerIndex"] == 9
    disrupted, never, free = spec["podFailurePolicy"]["rules"]
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (never["action"], free["action"]) == ("FailIndex", "Ignore")
    assert {81, 82, 83, 1, 2, 126, 127} <= set(never["onExitCodes"]["values"])
    assert {88, 89, 143} <= set(free["onExitCodes"]["values"])
    counted = set(range(1, 256)) - {*never["onExitCodes"]["values"], *free["onExitCodes"]["values"]}
    assert {84, 85, 86, 87, 137, 139} <= counted, "OOM, STALLED, PEER_LOST, INFRA and kills use the limit up"


def test_with_a_queue_kueue_admits_the_job_and_the_group_of_the_others(
    on_a_cluster: Path, context_of: Any
) -> None:
    plan = _plan(on_a_cluster, above=32, placement=Placement(queue="team-a", nodes="spread"))
    job = _manifest(plan, plan_rows(plan)[0], context_of, (1, 33))
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "kueue.x-k8s.io" not in json.dumps(job["spec"]["template"])
    assert job["spec"]["template"]["spec"]["topologySpreadConstraints"]
    chief = plan.replica(RoleKind.CHIEF, 0)
    assert chief.pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(1, 90), ps=st.integers(1, 40), above=st.integers(0, 64))
def test_addresses_are_the_names_that_pods_really_have(workers: int, ps: int, above: int) -> None:
    strategy = Strategy(StrategyKind.PARAMETER_SERVER)
    roles = standard_roles(strategy, workers=workers, ps=ps)
    job = TrainingJob("m", "t", roles=roles, strategy=strategy, output="/o")
    plan = make_plan(job, Cluster.kubernetes("ml"), gang="gang-1", indexed_above=above)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    hosts: dict[str, list[str]] = {"ps": [], "worker": [], "chief": []}
    for row in sorted(plan_rows(plan), key=lambda row: row["env_vars"].get("TRAINYARD_INDEX", "0").zfill(3)):
        role, count = row["env_vars"]["TRAINYARD_ROLE"], row.get("completions", 0)
        # What a headless Service calls a pod, and what an Indexed Job calls its pods' hosts.
        named = [f"{row['name']}-{index}" for index in range(count)] if count else [row["hostname"]]
        assert ("TRAINYARD_INDEX" in row["env_vars"]) == (not count)
        assert ("trainyard.io/index" in row["labels"]) == (not count)
        assert all(len(name) <= 63 for name in named)
        hosts[role] += [f"{name}.{row['subdomain']}.ml.svc:2222" for name in named]
    for replica in plan.replicas:
        assert replica.tf_config["cluster"] == hosts
        assert replica.tf_config["task"] == {"type": replica.role.value, "index": replica.index}
        assert replica.address == hosts[replica.role.value][replica.index]
    assert all(len(plan.role(kind)) > above > 0 for kind in plan.indexed)
    assert all(above == 0 or len(plan.role(k)) <= above for k in RoleKind if k not in plan.indexed)


@pytest.mark.parametrize(
    ("asked", "version", "one_machine", "above", "words"),
    [
        (None, (1, 33), False, 32, ""),
        (None, (1, 24), False, 32, ""),
        (None, (1, 20), False, 0, "the cluster is Kubernetes 1.20, Indexed Jobs need 1.24"),
        (None, (1, 31), True, 0, ""),
        (2, (1, 31), True, 2, ""),
        (0, (1, 33), False, 0, ""),
    ],
)
def test_when_a_role_is_a_job(
    asked: int | None, version: tuple[int, int], one_machine: bool, above: int, words: str
) -> None:
    found, why_not = threshold(asked, version, one_machine=one_machine)
    assert found == above
    assert words in why_not
    assert bool(words) == bool(why_not)


@pytest.mark.parametrize(("version", "count"), [("1.20", 66), ("1.33+", 3)])
def test_a_plan_asks_the_server_and_falls_back_to_a_task_a_replica(
    version: str,
    count: int,
    pipelines: Path,
    context_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    monkeypatch.setattr(
        "trainyard.kubelet.api.version_info",
        lambda: {
            **dict.fromkeys(
                ("gitVersion", "gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform"),
                f"v{version}.2",
            ),
            "major": version.split(".")[0],
            "minor": version.split(".")[1],
        },
    )
    with DAG("pipeline", max_active_tasks=8):
        operator = PlanOperator(
            task_id="plan", group="train", template=JobTemplate("digits", "a_trainer"), records="storage://m"
        )
    rows = operator.execute(context_of(operator, params=FORM))
    assert len(rows) == count
    said = capsys.readouterr().out
    fallback = "64 replicas of a role are a task a replica: the cluster is Kubernetes 1.20" in said
    assert fallback == (version == "1.20")
    assert ("are the pods of the Indexed Job" in said) != fallback


def test_admission_counts_all_of_it(tmp_path: Path) -> None:
    one, many = (demand_of(_plan(tmp_path, above=above)) for above in (32, 0))
    assert one.pop("count/jobs.batch") == 1
    assert one == many
    assert one["pods"] == 66


# ---- while it comes up


NOW = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)


def _job(completions: int = 2, *, started: bool = True) -> V1Job:
    template = V1PodTemplateSpec()
    return V1Job(
        metadata=V1ObjectMeta(name="g-worker", namespace="n"),
        spec=V1JobSpec(completions=completions, template=template),
        status=V1JobStatus(start_time=NOW if started else None),
    )


def _waiting(index: int, *, scheduled: bool, made: dt.datetime = NOW, reason: str = "") -> V1Pod:
    condition = V1PodCondition(
        type="PodScheduled",
        status="True" if scheduled else "False",
        reason=None if scheduled else reason or None,
        message="0/3 nodes are available" if reason else None,
    )
    return V1Pod(
        metadata=V1ObjectMeta(
            name=f"g-worker-{index}-abcde",
            uid=f"u{index}",
            creation_timestamp=made,
            annotations={"batch.kubernetes.io/job-completion-index": str(index)},
            labels={"trainyard.io/role": "worker"},
        ),
        spec=V1PodSpec(containers=[], node_name="node-1" if scheduled else None),
        status=V1PodStatus(phase="Pending", conditions=[condition]),
    )


@pytest.mark.parametrize(
    ("pods", "code", "words"),
    [
        ([_waiting(0, scheduled=True)], "kubernetes.no_room", "1 of the 2 pods of job g-worker"),
        (
            [_waiting(0, scheduled=True), _waiting(1, scheduled=False)],
            "kubernetes.no_room",
            "g-worker-1-abcde found no node within 60 s",
        ),
        (
            [_waiting(0, scheduled=True), _waiting(1, scheduled=False, reason="Unschedulable")],
            "",
            "0/3 nodes are available",
        ),
    ],
)
def test_a_group_that_does_not_come_up_is_given_up_after_its_budget(
    pods: list[V1Pod], code: str, words: str
) -> None:
    now = [0.0]
    watch = GroupWatch(schedule=60, start=600, clock=lambda: now[0])
    assert watch.look(_job(), pods) is None
    now[0] = 59
    assert watch.look(_job(), pods) is None
    now[0] = 61
    failure = watch.look(_job(), pods)
    assert failure is not None
    assert (failure.failure_class, failure.code) == (FailureClass.QUOTA, code)
    assert words in failure.reason
    assert GroupWatch(schedule=60, start=600).look(_job(started=False), pods) is None, "Kueue holds it"


def test_a_pod_that_comes_later_is_waited_for_and_a_slow_start_has_its_own_budget() -> None:
    now = [0.0]
    watch = GroupWatch(schedule=60, start=600, clock=lambda: now[0])
    later = _waiting(0, scheduled=False, made=NOW + dt.timedelta(seconds=3600))
    slow = _waiting(1, scheduled=True)
    for second, given_up in ((0, False), (500, False), (700, True)):
        now[0] = second
        failure = watch.look(_job(), [later, slow])
        assert (failure is not None) == given_up
    assert failure is not None
    assert (failure.failure_class, failure.index) == (FailureClass.INFRA, None)
    assert "g-worker-1-abcde did not start within 600 s" in failure.reason

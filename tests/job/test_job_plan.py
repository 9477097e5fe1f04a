"""From a job and a cluster to its replicas: names, addresses, labels, and what people read."""

import json

import pytest

from trainers.job import labels
from trainers.job.errors import InvalidSpec
from trainers.job.plan import PORT, Cluster, Plan, make_plan
from trainers.job.spec import Role, RoleKind, Strategy, TrainingJob, standard_roles

PS = Strategy("parameter_server")
JOB = TrainingJob(
    "digits",
    "trainers.models.digits",
    strategy=PS,
    roles=standard_roles(PS, workers=2, ps=1),
    output="/jobs/1",
)
GANG = "digits-1a2b3c4d"


def on_kubernetes(job=JOB, **options):
    return make_plan(job, Cluster.kubernetes("ml"), gang=GANG, **options)


def on_process(job=JOB, ports=(1, 2, 3, 4), **options):
    return make_plan(job, Cluster.process(ports), gang=GANG, **options)


def test_replicas_in_order_with_stable_names():
    plan = on_kubernetes()
    assert [r.replica for r in plan.replicas] == ["ps-0", "worker-0", "worker-1", "chief-0"]
    assert [r.name for r in plan.role(RoleKind.WORKER)] == [f"{GANG}-worker-0", f"{GANG}-worker-1"]
    worker = plan.replica(RoleKind.WORKER, 1)
    assert (worker.hostname, worker.subdomain) == ("worker-1", GANG)
    assert worker.address == f"worker-1.{GANG}.ml.svc:{PORT}"


def test_on_one_machine_every_replica_has_a_port_of_its_own():
    plan = on_process(ports=(4, 3, 2, 1, 9))
    assert [r.address for r in plan.replicas] == [f"127.0.0.1:{p}" for p in (4, 3, 2, 1)]


@pytest.mark.parametrize("make", [on_kubernetes, on_process])
def test_every_replica_is_told_the_same_cluster(make):
    plan = make()
    clusters = [r.tf_config["cluster"] for r in plan.replicas]
    assert clusters.count(clusters[0]) == 4
    for replica in plan.replicas:
        task = replica.tf_config["task"]
        assert replica.tf_config["cluster"][task["type"]][task["index"]] == replica.address


def test_env_and_labels_say_who_the_replica_is():
    ps = Role("ps", env={"A": "role", "B": "role"})
    roles = (*standard_roles(PS, workers=1, image="own"), ps)
    job = TrainingJob("digits", "m", strategy=PS, roles=roles, output="/jobs/1")
    plan = on_kubernetes(job, env={"A": "all", "C": "all", labels.ENV_ROLE: "forged"}, image="default")
    ps = plan.replica(RoleKind.PS, 0)
    assert ps.env == {
        "A": "role",
        "B": "role",
        "C": "all",
        labels.ENV_JOB: "/jobs/1",
        labels.ENV_ROLE: "ps",
        labels.ENV_INDEX: "0",
    }
    assert ps.image == "default"
    assert plan.replica(RoleKind.WORKER, 0).image == "own"
    extra = on_kubernetes(extra_labels={"team": "vision", labels.LABEL_GANG: "forged"}).replicas[0].labels
    assert extra == {
        "team": "vision",
        labels.LABEL_MANAGED_BY: "trainyard",
        labels.LABEL_GANG: GANG,
        labels.LABEL_ROLE: "ps",
        labels.LABEL_INDEX: "0",
    }


def test_service_is_headless_and_finds_the_gang():
    service = on_kubernetes().service()
    assert service["metadata"]["name"] == GANG
    assert service["metadata"]["namespace"] == "ml"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    selector = service["spec"]["selector"]
    assert all(selector.items() <= r.labels.items() for r in on_kubernetes().replicas)


@pytest.mark.parametrize("make", [on_kubernetes, on_process])
def test_json_changes_nothing(make):
    plan = make()
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert make() == plan


def test_describe_is_a_table():
    lines = on_process().describe().splitlines()
    assert lines[0] == f"job digits: parameter_server, gang {GANG} in namespace trainyard (process)"
    assert lines[1].split() == ["REPLICA", "ADDRESS", "CPU", "MEMORY", "GPU", "COMMAND"]
    assert lines[2].split() == [
        "ps-0",
        "127.0.0.1:1",
        "1",
        "2Gi",
        "0",
        "python",
        "-m",
        "trainers.runtime.launcher",
    ]
    assert len(lines) == 6


REFUSED = [
    (lambda: Cluster("docker"), "cluster.kind"),
    (lambda: on_process(ports=(1, 2, 3)), "cluster.ports"),
    (lambda: make_plan(JOB, Cluster.kubernetes(), gang="Digits"), "gang"),
    (lambda: make_plan(JOB, Cluster.kubernetes(), gang="d" * 41), "gang"),
    (lambda: make_plan(JOB, Cluster.kubernetes(), gang=""), "gang"),
    (lambda: on_kubernetes().replica(RoleKind.WORKER, 2), "replica"),
    (lambda: on_kubernetes().replica(RoleKind.EVALUATOR, 0), "replica"),
]


@pytest.mark.parametrize(("make", "field"), REFUSED)
def test_refused(make, field):
    with pytest.raises(InvalidSpec) as info:
        make()
    assert info.value.field == field

"""A job's values: what they refuse, in which words, and that JSON and copies change nothing."""

import copy
import dataclasses
import json
import math
import pickle

import pytest

from trainers.job.errors import InvalidSpec
from trainers.job.failures import FailureClass
from trainers.job.spec import (
    LAUNCHER_COMMAND,
    Budgets,
    Resources,
    RestartPolicy,
    Role,
    RoleKind,
    Strategy,
    StrategyKind,
    Success,
    TrainingJob,
    standard_roles,
)

PS = Strategy("parameter_server")
CUSTOM = Strategy("custom")
CHIEF = Role(RoleKind.CHIEF)


def job(**changes):
    return TrainingJob(**{"name": "digits", "trainer": "trainers.models.digits", **changes})


def ps_job(workers=2, ps=1, **changes):
    return job(strategy=PS, roles=standard_roles(PS, workers=workers, ps=ps), **changes)


REFUSED = [
    # (what is made, the field that is named, what the message says it must be)
    (lambda: Strategy("p2p"), "strategy", "be one of local, mirrored, parameter_server, multi_worker"),
    (lambda: Strategy(""), "strategy", "be one of"),
    (lambda: Strategy(None), "strategy", "be one of"),
    (lambda: Strategy("local", sync="yes"), "strategy.sync", "be true or false"),
    (lambda: Strategy("multi_worker", sync=True), "strategy.sync", "be false unless"),
    (lambda: Strategy("parameter_server", True, -1), "strategy.backup_workers", "be a whole number"),
    (lambda: Strategy("parameter_server", True, True), "strategy.backup_workers", "be a whole number"),
    (lambda: Strategy("parameter_server", False, 1), "strategy.backup_workers", "be 0 unless"),
    (lambda: Strategy.from_dict({"kinds": "local"}), "strategy", "have no fields but"),
    (lambda: Strategy.from_dict(None), "strategy", "be a JSON object"),
    (lambda: Resources(cpu=0), "resources.cpu", "be a number of cores above 0"),
    (lambda: Resources(cpu=True), "resources.cpu", "be a number"),
    (lambda: Resources(cpu="2"), "resources.cpu", "be a number"),
    (lambda: Resources(cpu=math.nan), "resources.cpu", "be a number"),
    (lambda: Resources(cpu=math.inf), "resources.cpu", "be a number"),
    (lambda: Resources(memory=""), "resources.memory", "be a Kubernetes quantity"),
    (lambda: Resources(memory="2GB"), "resources.memory", "be a Kubernetes quantity"),
    (lambda: Resources(memory="2Gi\n"), "resources.memory", "be a Kubernetes quantity"),
    (lambda: Resources(memory="0Gi"), "resources.memory", "be a Kubernetes quantity"),
    (lambda: Resources(memory="-1Gi"), "resources.memory", "be a Kubernetes quantity"),
    (lambda: Resources(memory=2), "resources.memory", "be a Kubernetes quantity"),
    (lambda: Resources(gpu=-1), "resources.gpu", "be a whole number of 0 or more"),
    (lambda: Resources(gpu=0.5), "resources.gpu", "be a whole number of 0 or more"),
    (lambda: Resources(gpu_type="A100"), "resources.gpu_type", "be empty when gpu is 0"),
    (lambda: Resources(node_selector="zone=a"), "resources.node_selector", "be a mapping"),
    (lambda: Resources(tolerations="all"), "resources.tolerations", "be a list"),
    (lambda: Resources(tolerations=["all"]), "resources.tolerations", "be a mapping"),
    (lambda: Resources.from_dict({"gpus": 1}), "resources", "have no fields but"),
    (lambda: Role("boss"), "role.kind", "be one of chief, worker, ps, evaluator"),
    (lambda: Role("worker", -1), "worker.replicas", "be a whole number of 1 or more"),
    (lambda: Role("worker", 0), "worker.replicas", "be a whole number of 1 or more"),
    (lambda: Role("worker", "2"), "worker.replicas", "be a whole number of 1 or more"),
    (lambda: Role("worker", 1.0), "worker.replicas", "be a whole number of 1 or more"),
    (lambda: Role("chief", 2), "chief.replicas", "be 1"),
    (lambda: Role("evaluator", 2), "evaluator.replicas", "be 1"),
    (lambda: Role("worker", 2, min_replicas=3), "worker.min_replicas", "be from 1 to 2"),
    (lambda: Role("worker", 2, min_replicas=0), "worker.min_replicas", "be from 1 to 2"),
    (lambda: Role("ps", command="python -m x"), "ps.command", "be a list of words"),
    (lambda: Role("ps", command=("",)), "ps.command", "be a list of words"),
    (lambda: Role("ps", command=(1,)), "ps.command", "be a list of words"),
    (lambda: job(roles=(Role("chief", command=["x"]),)), "chief.command", "be left out unless"),
    (lambda: TrainingJob("x", strategy=CUSTOM), "chief.command", "be given with strategy custom"),
    (lambda: TrainingJob("x", "a", strategy=CUSTOM), "trainer", "be empty where roles have commands"),
    (
        lambda: TrainingJob(
            "x", strategy=CUSTOM, roles=(Role("chief", command=["x"]), Role("evaluator", command=["x"]))
        ),
        "roles",
        "with strategy custom",
    ),
    (lambda: standard_roles(CUSTOM, command={"boss": ["x"]}), "command", "name default, chief"),
    (lambda: standard_roles(CUSTOM, image={"boss": "x"}), "image", "name default, chief"),
    (lambda: Role("ps", env={"A-B": "1"}), "ps.env", "have names of letters, digits and _"),
    (lambda: Role("ps", env={"A": 1}), "ps.env.A", "be text"),
    (lambda: Role("ps", env="A=1"), "ps.env", "be a mapping"),
    (lambda: Role.from_dict({"replicas": 1}), "role.kind", "be given"),
    (lambda: Role.from_dict({"kind": "ps", "count": 1}), "role", "have no fields but"),
    (lambda: standard_roles(PS, workers=-1, ps=1), "workers", "be a whole number of 0 or more"),
    (lambda: standard_roles(PS, workers=1, ps="1"), "ps", "be a whole number of 0 or more"),
    (lambda: Success("most"), "success.rule", "be one of chief, all_workers, fraction"),
    (lambda: Success("fraction", 0), "success.fraction", "be above 0 and at most 1"),
    (lambda: Success("fraction", 1.1), "success.fraction", "be above 0 and at most 1"),
    (lambda: Success("fraction", "half"), "success.fraction", "be above 0 and at most 1"),
    (lambda: RestartPolicy({"BAD_LUCK": 1}), "restart.caps", "name classes of"),
    (lambda: RestartPolicy({"USER": 1}), "restart.caps", "not name a class that is never retried"),
    (lambda: RestartPolicy({"INFRA": -1}), "restart.caps.INFRA", "be a whole number of 0 or more"),
    (lambda: RestartPolicy(3), "restart.caps", "be a mapping"),
    (lambda: Budgets(stall=0), "budgets.stall", "be seconds above 0"),
    (lambda: Budgets(total=math.inf), "budgets.total", "be seconds above 0"),
    (lambda: Budgets(start="60"), "budgets.start", "be seconds above 0"),
    (lambda: job(name=" "), "name", "be text"),
    (lambda: job(name=7), "name", "be text"),
    (lambda: job(trainer="digits.py"), "trainer", "be a dotted module name"),
    (lambda: job(trainer="a..b"), "trainer", "be a dotted module name"),
    (lambda: job(trainer="a.b\n"), "trainer", "be a dotted module name"),
    (lambda: job(trainer="os; rm"), "trainer", "be a dotted module name"),
    (lambda: job(output=None), "output", "be text"),
    (lambda: job(warm_start=1), "warm_start", "be text"),
    (lambda: job(args=[1]), "args", "be a mapping"),
    (lambda: job(args={"f": print}), "args", "be JSON values"),
    (lambda: job(args={"x": math.nan}), "args", "be JSON values"),
    (lambda: job(args={"steps": 0}), "steps", "be a whole number of 1 or more"),
    (lambda: job(args={"steps": True}), "steps", "be a whole number of 1 or more"),
    (lambda: job(args={"batch_size": -8}), "batch_size", "be a whole number of 1 or more"),
    (lambda: job(args={"checkpoint_every": 1.5}), "checkpoint_every", "be a whole number of 1 or more"),
    (lambda: job(args={"seed": "x"}), "seed", "be a whole number"),
    (lambda: job(args={"learning_rate": 0}), "learning_rate", "be a number above 0"),
    (lambda: job(args={"learning_rate": "1e-3"}), "learning_rate", "be a number above 0"),
    (lambda: job(inputs={"records": 7}), "inputs.records", "be a URI"),
    (lambda: job(inputs={"records": ""}), "inputs.records", "be a URI"),
    (lambda: job(roles="chief"), "roles", "be a list"),
    (lambda: job(roles=()), "roles", "have a chief"),
    (lambda: job(roles=(CHIEF, CHIEF)), "roles", "name each kind once"),
    (lambda: job(roles=(CHIEF, Role("worker"))), "roles", "with strategy local"),
    (lambda: job(strategy=PS), "workers", "be 1 or more with strategy parameter_server"),
    (lambda: ps_job(ps=0), "ps", "be 1 or more with strategy parameter_server"),
    (
        lambda: dataclasses.replace(ps_job(workers=2), strategy=Strategy("parameter_server", True, 2)),
        "strategy.backup_workers",
        "be below the number of workers",
    ),
    (lambda: TrainingJob.from_dict({"trainer": "x"}), "job.name", "be given"),
    (lambda: TrainingJob.from_dict({"name": "x"}), "trainer", "be a dotted module name"),
    (lambda: TrainingJob.from_dict({"name": "x", "trainer": "a", "gpus": 2}), "job", "have no fields but"),
    (lambda: TrainingJob.from_dict([]), "job", "be a JSON object"),
    (lambda: TrainingJob.from_dict({"name": "x", "trainer": "a", "roles": {}}), "roles", "be a list"),
    (lambda: TrainingJob.from_dict({"name": "x", "trainer": "a", "roles": [1]}), "role", "be a JSON object"),
    (
        lambda: TrainingJob.from_dict({"name": "x", "trainer": "a", "budgets": {"lunch": 1}}),
        "budgets",
        "have no fields but",
    ),
]


@pytest.mark.parametrize(
    ("make", "field", "must"), REFUSED, ids=[f"{r[1]}-{i}" for i, r in enumerate(REFUSED)]
)
def test_refused(make, field, must):
    with pytest.raises(InvalidSpec) as info:
        make()
    assert info.value.field == field
    assert must in info.value.message
    assert f"{field} must " in str(info.value)
    assert "got " in str(info.value)
    assert info.value.failure_class is FailureClass.CONFIG


JOBS = [
    job(),
    ps_job(args={"steps": 500, "learning_rate": 1e-3, "layers": (64, 32), "seed": 3}),
    job(strategy=Strategy("mirrored"), roles=(CHIEF, Role("evaluator"))),
    job(
        strategy=Strategy("multi_worker"),
        roles=(Role("chief", resources=Resources(4, "1.5Gi", 2, "A100", {"zone": "a"}, ({"key": "gpu"},))),),
        success=Success("fraction", 0.9),
        restart=RestartPolicy({"INFRA": 2, FailureClass.OOM: 0}),
        budgets=Budgets(stall=5),
        inputs={"records": "/data/manifest.json"},
        output="/jobs/1",
        warm_start="/jobs/0",
    ),
    TrainingJob(
        "x", strategy=CUSTOM, roles=(Role("chief", image="img", command=["python", "x.py"], env={"A": "b"}),)
    ),
]


@pytest.mark.parametrize("value", JOBS, ids=lambda value: str(value.strategy.kind))
def test_json_and_copies_change_nothing(value):
    assert TrainingJob.from_dict(json.loads(json.dumps(value.to_dict()))) == value
    # Airflow deep-copies operators with what they hold; multiprocessing pickles.
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


def test_a_record_of_before_commands_is_read():
    data = job().to_dict()
    data["roles"][0]["command"] = list(LAUNCHER_COMMAND)
    assert TrainingJob.from_dict(data) == job()


def test_commands_and_images_by_role():
    commands = {"default": ["train"], "ps": ["serve"]}
    roles = standard_roles(CUSTOM, workers=2, ps=1, command=commands, image={"default": "a", "ps": "b"})
    assert [(r.kind.value, r.replicas, r.command, r.image) for r in roles] == [
        ("chief", 1, ("train",), "a"),
        ("worker", 2, ("train",), "a"),
        ("ps", 1, ("serve",), "b"),
    ]
    # The form has one parameter server; a command for all is none for it.
    assert [r.kind.value for r in standard_roles(CUSTOM, workers=1, ps=1, command=["train"])] == [
        "chief",
        "worker",
    ]


def test_a_custom_jobs_arguments_are_its_commands_own():
    args = {"devices": "cuda", "steps": "many"}
    custom = TrainingJob("x", strategy=CUSTOM, roles=(Role("chief", command=["x"]),), args=args)
    assert dict(custom.args) == args


def test_a_strategy_from_its_bare_name():
    assert Strategy.from_dict("multi_worker") == Strategy(StrategyKind.MULTI_WORKER)
    assert str(StrategyKind.MULTI_WORKER) == "multi_worker"


def test_values_are_frozen():
    value = job(args={"steps": 1}, inputs={"records": "m"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.name = "other"
    with pytest.raises(TypeError):
        value.args["steps"] = 2
    with pytest.raises(TypeError):
        value.inputs["records"] = "n"


def test_args_do_not_follow_the_callers_dict():
    layers = [64]
    value = job(args={"layers": layers})
    layers.append(32)
    assert value.args["layers"] == [64]


ROLE_COUNTS = [
    ("local", {"chief": 1}),
    ("mirrored", {"chief": 1}),
    ("multi_worker", {"chief": 1, "worker": 3}),
    ("parameter_server", {"chief": 1, "worker": 3, "ps": 2}),
]


@pytest.mark.parametrize(("strategy", "counts"), ROLE_COUNTS)
def test_standard_roles_leave_out_what_the_strategy_does_not_use(strategy, counts):
    roles = standard_roles(Strategy(strategy), workers=3, ps=2)
    assert {r.kind.value: r.replicas for r in roles} == counts
    job(strategy=Strategy(strategy), roles=roles)


def test_standard_roles_resources_by_role_with_a_default():
    roles = standard_roles(
        PS,
        workers=1,
        ps=1,
        evaluator=True,
        image="img",
        resources={"default": Resources(2), "ps": Resources(memory="8Gi")},
    )
    by_kind = {r.kind: r for r in roles}
    assert by_kind[RoleKind.PS].resources == Resources(memory="8Gi")
    assert by_kind[RoleKind.EVALUATOR].resources == Resources(2)
    assert {r.image for r in roles} == {"img"}


def test_role_and_replicas_of_a_job():
    value = ps_job(workers=3)
    assert value.replicas(RoleKind.WORKER) == 3
    assert value.replicas(RoleKind.EVALUATOR) == 0
    assert value.role(RoleKind.EVALUATOR) is None
    assert value.role(RoleKind.PS).kind is RoleKind.PS


CAPS = [
    ({}, "USER", 0),
    ({}, "DATA", 0),
    ({}, "CONFIG", 0),
    ({}, "OOM", 1),
    ({}, "STALLED", 5),
    ({}, "PEER_LOST", 5),
    ({}, "INFRA", 5),
    ({}, "PREEMPTED", math.inf),
    ({}, "QUOTA", math.inf),
    ({"INFRA": 2}, "INFRA", 2),
    ({"OOM": 0}, "OOM", 0),
    ({"PREEMPTED": 3}, "PREEMPTED", 3),
]


@pytest.mark.parametrize(("caps", "failure_class", "cap"), CAPS)
def test_restart_caps(caps, failure_class, cap):
    assert RestartPolicy(caps).cap(FailureClass(failure_class)) == cap

"""TF_CONFIG, read by TensorFlow's own resolver, and by the rules of TensorFlow 1's RunConfig."""

import json

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.distribute import multi_worker_util

from trainers.job.errors import InvalidSpec
from trainers.job.spec import RoleKind, Strategy, StrategyKind, TrainingJob, standard_roles
from trainers.job.tf_config import cluster_spec, tf_config

CLUSTERED = (StrategyKind.PARAMETER_SERVER, StrategyKind.MULTI_WORKER, StrategyKind.CUSTOM)
HOSTS = ("127.0.0.1", "[::1]", "[2001:db8::17]", "10.0.0.7", "{kind}-{i}.gang.ns.svc", "{kind}-{i}")


@st.composite
def jobs(draw, kinds=tuple(StrategyKind)):
    kind = draw(st.sampled_from(kinds))
    least = 1 if kind is StrategyKind.PARAMETER_SERVER else 0
    counts = {"workers": draw(st.integers(least, 5)), "ps": draw(st.integers(least, 3))}
    sync = kind is StrategyKind.PARAMETER_SERVER and draw(st.booleans())
    strategy = Strategy(kind, sync=sync)
    if kind is StrategyKind.CUSTOM:
        roles = standard_roles(strategy, command={"default": ["a"], "ps": ["b"]}, **counts)
        return TrainingJob("job", strategy=strategy, roles=roles)
    roles = standard_roles(strategy, evaluator=draw(st.booleans()), **counts)
    return TrainingJob("job", "module", strategy=strategy, roles=roles)


@st.composite
def jobs_with_addresses(draw, kinds=tuple(StrategyKind)):
    job = draw(jobs(kinds))
    host = draw(st.sampled_from(HOSTS))
    port = draw(st.integers(1, 60_000))
    addresses = {
        kind: [f"{host.format(kind=kind, i=i)}:{port + 100 * n + i}" for i in range(job.replicas(kind))]
        for n, kind in enumerate(RoleKind)
    }
    return job, addresses


def addresses_of(job):
    return {kind: [f"{kind}-{i}.gang.ns.svc:2222" for i in range(job.replicas(kind))] for kind in RoleKind}


def replicas_of(job):
    return [(kind, index) for kind in RoleKind for index in range(job.replicas(kind))]


@settings(max_examples=60, deadline=None)
@given(jobs_with_addresses())
def test_tensorflow_reads_what_was_meant(given_):
    job, addresses = given_
    in_cluster = [kind for kind in RoleKind if job.replicas(kind) and kind is not RoleKind.EVALUATOR]
    with pytest.MonkeyPatch.context() as patch:
        for kind, index in replicas_of(job):
            patch.setenv("TF_CONFIG", json.dumps(tf_config(job, kind, index, addresses)))
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
            cluster = resolver.cluster_spec().as_dict()
            assert (resolver.task_type, resolver.task_id) == (kind.value, index)
            if job.strategy.kind not in CLUSTERED:
                assert cluster == {}
                continue
            assert cluster == {k.value: addresses[k] for k in in_cluster}
            assert "evaluator" not in cluster  # else the others would wait for it
            if kind is not RoleKind.EVALUATOR:
                assert resolver.cluster_spec().task_address(kind.value, index) == addresses[kind][index]


@settings(max_examples=60, deadline=None)
@given(jobs_with_addresses(CLUSTERED))
def test_by_the_rules_of_tensorflow_1(given_):
    """What `tf.estimator.RunConfig` worked out: one chief, by that name; nodes in one order for all; no evaluator."""
    job, addresses = given_
    chiefs, orders = [], set()
    for kind, index in replicas_of(job):
        config = tf_config(job, kind, index, addresses)
        task, cluster = config["task"], config["cluster"]
        assert set(config) == {"cluster", "task"}
        assert set(task) == {"type", "index"}
        assert isinstance(task["index"], int)  # "0" was refused
        assert "master" not in cluster  # the name of a chief that evaluates too, before TensorFlow 1.5
        assert len(cluster["chief"]) == 1
        # RunConfig numbers all nodes of the cluster: the chief first, then the others by type and index.
        nodes = [("chief", 0)]
        nodes += [(t, i) for t in sorted(cluster) if t != "chief" for i in range(len(cluster[t]))]
        orders.add(tuple(nodes))
        if kind is RoleKind.EVALUATOR:
            assert (task["type"], task["index"]) == ("evaluator", 0)
            assert (task["type"], 0) not in nodes
        else:
            assert (task["type"], task["index"]) in nodes
            spec = multi_worker_util.normalize_cluster_spec(cluster)
            if task["type"] != "ps":
                assert multi_worker_util.id_in_cluster(spec, task["type"], task["index"]) >= 0
            if multi_worker_util.is_chief(spec, task["type"], task["index"]):
                chiefs.append((task["type"], task["index"]))
    assert chiefs == [("chief", 0)]
    assert len(orders) == 1


@settings(max_examples=40, deadline=None)
@given(jobs_with_addresses(CLUSTERED))
def test_addresses_are_never_mixed_up(given_):
    job, addresses = given_
    seen = [
        tf_config(job, kind, index, addresses)["cluster"][kind.value][index]
        for kind, index in replicas_of(job)
        if kind is not RoleKind.EVALUATOR
    ]
    wanted = [a for kind in RoleKind if kind is not RoleKind.EVALUATOR for a in addresses[kind]]
    assert sorted(seen) == sorted(wanted)


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_a_job_through_json_has_the_same_config(job):
    again = TrainingJob.from_dict(json.loads(json.dumps(job.to_dict())))
    for kind, index in replicas_of(job):
        config = tf_config(again, kind, index, addresses_of(job))
        assert config == tf_config(job, kind, index, addresses_of(job))
        assert json.loads(json.dumps(config)) == config


@settings(max_examples=40, deadline=None)
@given(jobs(), st.sampled_from(RoleKind), st.integers(-2, 8))
def test_only_replicas_that_there_are_have_one(job, kind, index):
    if (kind, index) in replicas_of(job):
        assert tf_config(job, kind, index, addresses_of(job))["task"] == {"type": kind.value, "index": index}
        return
    with pytest.raises(InvalidSpec, match=rf"{kind}\.index must be from 0 to"):
        tf_config(job, kind, index, addresses_of(job))


@pytest.mark.parametrize(
    ("strategy", "role", "index", "chief"),
    [
        ("multi_worker", "chief", 0, True),
        ("multi_worker", "worker", 0, False),  # worker 0 leads only where there is no chief
        ("multi_worker", "worker", 1, False),
        ("parameter_server", "chief", 0, True),
        ("parameter_server", "worker", 0, False),
        ("parameter_server", "ps", 0, False),
    ],
)
def test_tensorflow_takes_the_same_replica_for_the_chief(strategy, role, index, chief):
    job = job_of(strategy)
    config = tf_config(job, RoleKind(role), index, addresses_of(job))
    spec = multi_worker_util.normalize_cluster_spec(config["cluster"])
    assert multi_worker_util.is_chief(spec, role, index) is chief


def test_the_whole_of_one():
    """Word for word, as an operator sees it in a pod's environment."""
    job = job_of("parameter_server", workers=2, ps=1)
    addresses = {
        RoleKind.CHIEF: ["[::1]:1"],
        RoleKind.PS: ["[::1]:2"],
        RoleKind.WORKER: ["[::1]:3", "[::1]:4"],
    }
    assert tf_config(job, RoleKind.WORKER, 1, addresses) == {
        "cluster": {"chief": ["[::1]:1"], "ps": ["[::1]:2"], "worker": ["[::1]:3", "[::1]:4"]},
        "task": {"type": "worker", "index": 1},
    }


def job_of(strategy, workers=2, ps=1):
    value = Strategy(strategy)
    return TrainingJob("job", "module", strategy=value, roles=standard_roles(value, workers=workers, ps=ps))


REFUSED = [
    (RoleKind.WORKER, 2, {}, "worker.index"),
    (RoleKind.WORKER, -1, {}, "worker.index"),
    (RoleKind.EVALUATOR, 0, {}, "evaluator.index"),
    (RoleKind.WORKER, 0, {RoleKind.PS: []}, "addresses.ps"),
    (RoleKind.WORKER, 0, {RoleKind.WORKER: ["one:1"]}, "addresses.worker"),
]


@pytest.mark.parametrize(("role", "index", "changes", "field"), REFUSED)
def test_refused(role, index, changes, field):
    job = job_of("parameter_server")
    with pytest.raises(InvalidSpec) as info:
        tf_config(job, role, index, {**addresses_of(job), **changes})
    assert info.value.field == field


def test_a_lonely_chief_of_multi_worker_is_a_cluster_of_one():
    assert cluster_spec(job_of("multi_worker", workers=0), {RoleKind.CHIEF: ["a:1"]}) == {"chief": ["a:1"]}

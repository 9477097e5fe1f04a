"""TF_CONFIG, read by TensorFlow's own resolver."""

import json

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.job.errors import InvalidSpec
from trainers.job.spec import RoleKind, Strategy, StrategyKind, TrainingJob, standard_roles
from trainers.job.tf_config import cluster_spec, tf_config


@st.composite
def jobs(draw):
    strategy = Strategy(draw(st.sampled_from(StrategyKind)))
    least = 1 if strategy.kind is StrategyKind.PARAMETER_SERVER else 0
    counts = {"workers": draw(st.integers(least, 5)), "ps": draw(st.integers(least, 3))}
    roles = standard_roles(strategy, evaluator=draw(st.booleans()), **counts)
    return TrainingJob("job", "module", strategy=strategy, roles=roles)


def addresses_of(job):
    return {kind: [f"{kind}-{i}.gang.ns.svc:2222" for i in range(job.replicas(kind))] for kind in RoleKind}


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_tensorflow_reads_what_was_meant(job):
    addresses = addresses_of(job)
    in_cluster = [kind for kind in RoleKind if job.replicas(kind) and kind is not RoleKind.EVALUATOR]
    with pytest.MonkeyPatch.context() as patch:
        for kind in RoleKind:
            for index in range(job.replicas(kind)):
                patch.setenv("TF_CONFIG", json.dumps(tf_config(job, kind, index, addresses)))
                resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
                cluster = resolver.cluster_spec().as_dict()
                assert (resolver.task_type, resolver.task_id) == (kind.value, index)
                if job.strategy.kind in (StrategyKind.LOCAL, StrategyKind.MIRRORED):
                    assert cluster == {}
                    continue
                assert cluster == {k.value: addresses[k] for k in in_cluster}
                assert "evaluator" not in cluster  # else the others would wait for it
                if kind is not RoleKind.EVALUATOR:
                    assert cluster[kind.value][index] == addresses[kind][index]


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

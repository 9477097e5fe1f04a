"""plan.json: what it gives back is what was planned, and its size grows with the gang and not with its square."""

from __future__ import annotations

import json

import pytest

from trainers.job.plan import Cluster, make_plan
from trainers.job.plan_file import plan_from_file, plan_to_file
from trainers.job.spec import Strategy, StrategyKind, TrainingJob, standard_roles


def _plan(strategy: StrategyKind, workers: int, *, evaluator: bool = False):
    kind = Strategy(strategy)
    roles = standard_roles(kind, workers=workers, ps=1, evaluator=evaluator)
    job = TrainingJob("m", "trainers.models.digits", roles=roles, strategy=kind, output="/jobs/m")
    return make_plan(job, Cluster.kubernetes("n"), gang="m-00000000", image="i")


@pytest.mark.parametrize(
    "plan",
    [
        _plan(StrategyKind.LOCAL, 0),
        _plan(StrategyKind.PARAMETER_SERVER, 3, evaluator=True),
        _plan(StrategyKind.MULTI_WORKER, 2),
    ],
    ids=["local", "ps with an evaluator", "all-reduce"],
)
def test_a_plan_comes_back_from_its_file(plan):
    assert plan_from_file(json.loads(json.dumps(plan_to_file(plan)))) == plan


def test_a_plan_of_an_earlier_version_is_read():
    plan = _plan(StrategyKind.PARAMETER_SERVER, 3)
    assert plan_from_file(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_replica_more_costs_the_same_in_a_large_gang():
    def size(workers):
        return len(json.dumps(plan_to_file(_plan(StrategyKind.PARAMETER_SERVER, workers))))

    assert size(300) - size(200) < 1.1 * (size(200) - size(100))

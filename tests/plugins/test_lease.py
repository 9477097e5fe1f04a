"""The lease of a gang: a Job that makes no pods and ends after all of its job's budgets."""

from __future__ import annotations

from pathlib import Path

from trainyard.lease import MARGIN, TTL, lease_manifest, owner_in

from trainers.job.plan import Cluster, make_plan
from trainers.job.policies import Budgets
from trainers.job.spec import Strategy, TrainingJob, standard_roles


def test_a_lease_makes_no_pods_and_ends_after_all_budgets(tmp_path: Path) -> None:
    budgets = Budgets(schedule=10, start=20, total=300, evaluate=40)
    job = TrainingJob(
        name="m", trainer="a.trainer", roles=standard_roles(Strategy()), budgets=budgets, output=str(tmp_path)
    )
    plan = make_plan(job, Cluster.kubernetes("team"), gang="gang-1")
    manifest = lease_manifest(plan)
    assert (manifest["metadata"]["name"], manifest["metadata"]["namespace"]) == ("gang-1", "team")
    assert manifest["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "trainyard"
    spec = manifest["spec"]
    assert spec["parallelism"] == 0
    assert spec["activeDeadlineSeconds"] == 370 + MARGIN
    assert spec["ttlSecondsAfterFinished"] == TTL
    assert owner_in(str(tmp_path)) is None

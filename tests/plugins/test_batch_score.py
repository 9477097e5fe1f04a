"""batch_score as Airflow sees it: pinned once, sharded over mapped tasks, published last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from trainyard import batch_score
from trainyard.failing import StepFailed

from serving.release.store import ReleaseStore


@pytest.fixture
def dag() -> DAG:
    with DAG("scoring", schedule=None) as made:
        batch_score("storage://raw/*.parquet", name="line", slices=3, columns=["id"])
    return made


def test_the_group_has_a_plan_mapped_pods_and_a_publisher(dag: DAG) -> None:
    assert {t.task_id for t in dag.tasks} == {
        f"batch_score.{t}" for t in ("version", "plan", "score", "publish")
    }
    score, publish = dag.get_task("batch_score.score"), dag.get_task("batch_score.publish")
    assert score.upstream_task_ids == {"batch_score.plan"}
    assert publish.upstream_task_ids == {"batch_score.plan", "batch_score.score"}
    assert score.is_mapped
    assert score.retries > 0
    assert publish.trigger_rule == "none_failed"
    spec = dag.get_task("batch_score.plan").spec
    assert (spec["slices"], spec["shards"], spec["output"]) == (3, 3, "storage://scores/line")


def test_the_version_is_pinned(dag: DAG, pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow.sdk.get_current_context", dict)
    pin = dag.get_task("batch_score.version").python_callable
    with pytest.raises(StepFailed, match="there is no model 'line'"):
        pin("line", None, "champion")
    store = ReleaseStore(pipelines, "line")
    for number in (1, 2, 3):
        store.reserve(f"{number}" * 64)
        store.path(number).mkdir(parents=True)
    for number in (1, 2):
        store.promote(number, by="me", why="good")

    def version(*arguments: Any) -> int:
        return int(pin("line", *arguments)["version"])

    assert version(None, "champion") == 2
    assert version(None, "previous") == 1
    assert version(3, "champion") == 3
    assert version("3", "champion") == 3
    assert pin("line", None, "champion")["path"] == str(pipelines / "models" / "line" / "2")
    for wrong in ((9, ""), (None, "nobody")):
        with pytest.raises(StepFailed, match="has no"):
            pin("line", *wrong)

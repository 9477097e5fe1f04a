"""The pipelines that the docs show load, have the shape they speak of, and their plain tasks do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainyard.failing import StepFailed

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")


@pytest.fixture(scope="module")
def examples() -> Any:
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(dag_folder=str(EXAMPLES))


def test_they_load(examples: Any) -> None:
    assert examples.import_errors == {}
    assert set(examples.dags) == {
        "wine_weekly",
        "wine_checked",
        "wine_approved",
        "flights_on_new_records",
        "digits_on_drift",
        "score_flights",
        "orders_by_spark",
        "line_weekly",
        "ddp_weekly",
        "xgboost_weekly",
    }


def test_plain_tasks_stand_between_stages(examples: Any) -> None:
    dag = examples.dags["wine_checked"]
    assert dag.get_task("enough").upstream_task_ids == {"prepare"}
    assert dag.get_task("train.plan").upstream_task_ids == {"enough"}
    assert dag.get_task("tell").upstream_task_ids == {"gate"}


def test_a_person_stands_between_the_gate_and_the_release(examples: Any) -> None:
    dag = examples.dags["wine_approved"]
    assert dag.get_task("gate").downstream_task_ids == {"approve", "not_released"}
    assert "release.export" in dag.get_task("approve").downstream_task_ids
    slices = dag.get_task("evaluate").spec["slices"]
    assert slices == ["cultivar", "alcohol[12.5,13.5]", "hue[q2]*proline[q2]"]


def test_judging_by_hand() -> None:
    run = [sys.executable, str(EXAMPLES / "judge.py")]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1])}
    said = subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout
    assert [line.split(" -> ")[1].split(":")[0] for line in said.splitlines()] == [
        "fail",
        "pass",
        "pass",
        "pass",
        "unknown",
    ]


def test_the_row_check_hands_on_or_refuses(examples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    enough = examples.dags["wine_checked"].get_task("enough").python_callable
    context: dict[str, Any] = {}
    monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context)
    records = {"counts": {"train": 120}, "manifest": "m"}
    assert enough(records, 100) is records
    with pytest.raises(StepFailed, match="120 rows to train on are too few"):
        enough(records, 121)


def test_telling_names_the_reasons(examples: Any) -> None:
    tell = examples.dags["wine_checked"].get_task("tell").python_callable
    assert tell("wine", {"reasons": ["a", "b"]}) == "wine is good enough: a; b"


def test_the_table_is_the_one_that_the_model_takes(
    examples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    import pandas as pd

    spec = importlib.util.spec_from_file_location("wine_model", EXAMPLES / "wine_model.py")
    assert spec is not None
    assert spec.loader is not None
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    monkeypatch.setenv("TRAINYARD_STORAGE", str(tmp_path))
    for dag_id in ("wine_weekly", "wine_checked"):
        path = examples.dags[dag_id].get_task("fetch").python_callable()
        assert path == str(tmp_path / "raw" / "wine" / "wine.parquet")
        table = pd.read_parquet(path)
        assert set(table.columns) == {*model.TYPICAL, "cultivar"}
        assert len(table) == 178


def test_drift_starts_the_pipeline_that_there_is(examples: Any) -> None:
    from trainyard import drift_asset

    dag = examples.dags["digits_on_drift"]
    assert list(dag.timetable.asset_condition.objects) == [drift_asset("digits")]
    assert dag.get_task("retrain").trigger_dag_id == "digits_retrain"


@pytest.mark.parametrize("name", ["line_weekly", "ddp_weekly", "xgboost_weekly"])
def test_commands_of_ones_own_take_their_counts_from_the_form(examples: Any, name: str) -> None:
    dag = examples.dags[name]
    template = dag.get_task("train.plan").template
    job = template.job({**dag.params.dump(), "workers": 7, "steps": 11}, manifest=None, output="/jobs/1")
    assert [(role.kind.value, role.replicas) for role in job.roles] == [("chief", 1), ("worker", 7)]
    assert job.args["steps"] == 11
    words = job.roles[0].command
    module = words[words.index("-m") + 1]
    compile((EXAMPLES / f"{module}.py").read_text(), module, "exec")

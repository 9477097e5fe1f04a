"""monitor in a real pod: the event of drift, the report's link and page, MLflow's measures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.execution_time.context import OutletEventAccessors
from trainyard import drift_asset, monitor, on_drift
from trainyard.monitor_page import drift_report_path
from trainyard.operators.monitor import MonitorOperator

from serving.server.tfrecord import framed
from serving.stubs import prediction_log_pb2
from serving.tensors import to_proto
from trainers.records.build import prepare


@pytest.fixture
def served(pipelines: Path) -> tuple[Path, Callable[[float, int], None]]:
    """Records of a table and version 1 of a model that was trained on them; writes a log of shifted requests."""
    import numpy as np

    raw = pipelines / "raw.csv"
    raw.write_text("\n".join(["id,x,y", *(f"{i},{i / 7:.3f},{i % 2}" for i in range(1000))]) + "\n")
    manifest = prepare(
        raw, pipelines / "records" / "line", name="line", label="y", progress=lambda line: None
    )
    version = pipelines / "models" / "line" / "1"
    version.mkdir(parents=True)
    (version / "saved_model.pb").write_bytes(b"")
    takes = {"x": {"dtype": "float32", "shape": [None]}, "id": {"dtype": "int64", "shape": [None]}}
    info = {
        "digest": "d",
        "records_digest": manifest.digest,
        "signatures": {"serving_default": {"inputs": takes}},
    }
    (version / "export.json").write_text(json.dumps(info))
    logs = pipelines / "requests" / "line" / "1"
    logs.mkdir(parents=True)

    def write(shift: float, number: int) -> None:
        log = prediction_log_pb2.PredictionLog()
        ids = np.arange(1000, dtype=np.int64)
        to_proto(ids, log.predict_log.request.inputs["id"])
        to_proto((ids / 7 + shift).astype(np.float32), log.predict_log.request.inputs["x"])
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        (logs / f"{stamp}-1-{number}.tfrecord").write_bytes(framed(log.SerializeToString()))

    return pipelines, write


def _run(operator: MonitorOperator, context_of: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    operator.spec = {**operator.spec, "run": "manual"}  # what Airflow renders of {{ run_id }}
    context = context_of(operator)
    context["outlet_events"] = OutletEventAccessors()
    result = operator.execute(context)
    events = [context["outlet_events"][asset].extra for asset in operator.outlets]
    return result, (events[0] if events else None)


def _task(**options: Any) -> MonitorOperator:
    with DAG("monitoring", schedule=None):
        return monitor("line", **options).operator


def test_an_event_when_requests_drift_and_none_when_not(served: Any, context_of: Any) -> None:
    storage, write = served
    write(0.0, 1)
    result, event = _run(_task(), context_of)
    assert (result["verdict"], result["rows"], event) == ("pass", 1000, None)
    write(90.0, 2)
    operator = _task()
    result, event = _run(operator, context_of)
    assert result["verdict"] == "warn"
    assert event is not None
    assert event["drifted"] == result["drifted"] == ["x"]
    assert (event["name"], event["version"]) == ("line", 1)
    path = drift_report_path(storage, "line", "1", result["window"])
    assert path is not None
    assert str(path) == result["report"] == event["report"]
    assert operator.report_url.endswith(f"/trainyard/monitoring/line/1/{result['window']}/report.html")


@pytest.mark.parametrize(
    "parts", [("..", "1", "0" * 16), ("line", "x", "0" * 16), ("line", "1", "../../x"), ("a", "1", "0" * 16)]
)
def test_no_other_file_is_a_report(tmp_path: Path, parts: tuple[str, str, str]) -> None:
    assert drift_report_path(tmp_path, *parts) is None


def test_schedules_on_drift() -> None:
    assert on_drift("line") == [drift_asset("line")]
    both = on_drift("line", or_at="@weekly")
    with DAG("retrain", schedule=both) as dag:
        pass
    assert "or" in type(dag.timetable).__name__.lower()
    assert _task().outlets == [drift_asset("line")]

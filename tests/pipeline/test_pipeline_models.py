"""A model from elsewhere on the whole platform: created by the command line, scored in pods, watched, trained again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trainyard.platform import Platform

from serving.client import PredictClient
from serving.server.request_log_files import LogFiles
from serving.stubs import prediction_log_pb2
from serving.tensors import to_proto
from trainers.records.build import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def line(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`line` version 1, created from a folder by the real command line and linked to its records."""
    import tensorflow as tf

    rows = pa.table(
        {"id": np.arange(1000), "x": np.linspace(0, 100, 1000, dtype=np.float32), "y": np.arange(1000) % 2}
    )
    raw = platform.storage / "raw" / "line"
    raw.mkdir(parents=True)
    pq.write_table(rows, raw / "a.parquet", row_group_size=250)
    manifest = prepare(
        raw, platform.storage / "records" / "line", name="line", label="y", progress=lambda text: None
    )

    class Line(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
        def named(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"predictions": 2.0 * x + 1.0}

    model, folder = Line(), tmp_path_factory.mktemp("plain") / "line"
    tf.saved_model.save(model, str(folder), signatures={"serving_default": model.named})
    command = [str(Path(sys.executable).with_name("trainyard")), "models"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TRAINYARD_", "MLFLOW_"))}

    def trainyard(*argv: str) -> str:
        done = subprocess.run(
            [*command, *argv],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**environ, "TRAINYARD_HOME": str(platform.settings.home)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    trainyard("create", "line", "--from", str(folder), "--records", str(manifest.path), "--why", "by hand")
    described = json.loads(trainyard("describe", "line@champion", "--json"))
    assert list(described["versions"][0]["replicas"].values()) == ["AVAILABLE"]
    assert described["versions"][0]["records_digest"] == manifest.digest
    return {"rows": rows, "trainyard": trainyard}


def _log(platform: Platform, x: np.ndarray) -> None:
    """A closed file of a request log, written by the server's own writer."""
    files = LogFiles(platform.storage / "requests", max_bytes=1 << 20, max_age_s=60, keep_bytes=1 << 30)
    log = prediction_log_pb2.PredictionLog()
    to_proto(x, log.predict_log.request.inputs["x"])
    to_proto(2.0 * x + 1.0, log.predict_log.response.outputs["predictions"])
    files.append("line", 1, log.SerializeToString())
    files.close()


def _runs(platform: Platform, dag_id: str) -> list[dict[str, Any]]:
    user, password = platform.credentials
    with httpx.Client(base_url=platform.urls["airflow"], trust_env=False, timeout=60) as http:
        token = http.post("/auth/token", json={"username": user, "password": password}).json()["access_token"]
        answer = http.get(f"/api/v2/dags/{dag_id}/dagRuns", headers={"Authorization": f"Bearer {token}"})
        return list(answer.raise_for_status().json()["dag_runs"])


def _metrics(platform: Platform) -> set[str]:
    """What MLflow holds of the run `monitoring line 1`."""
    with httpx.Client(
        base_url=f"{platform.urls['mlflow']}/api/2.0/mlflow", trust_env=False, timeout=60
    ) as http:
        found = (
            http.get("/experiments/get-by-name", params={"experiment_name": "line"}).raise_for_status().json()
        )
        wanted = {
            "experiment_ids": [found["experiment"]["experiment_id"]],
            "filter": "attributes.run_name = 'monitoring line 1'",  # other tests' pipelines may log there too
        }
        (run,) = http.post("/runs/search", json=wanted).raise_for_status().json()["runs"]
    assert run["info"]["run_name"] == "monitoring line 1"
    return {metric["key"] for metric in run["data"]["metrics"]}


def test_scored_in_pods_and_drift_starts_a_run(
    line: dict[str, Any], platform: Platform, run_dag: Callable[..., Any]
) -> None:
    x = line["rows"]["x"].to_numpy()
    platform.airflow.wait_for_dag("line_on_drift")
    platform.airflow.set_paused("line_on_drift", False)
    _log(platform, x)
    first = run_dag("score_and_watch")
    print(first.timeline())
    assert first.state == "success", first.explain()
    assert first.xcom("monitor")["verdict"] == "pass"
    scored = first.xcom("batch_score.publish")
    assert (scored["rows"], scored["quarantined"], scored["reused"]) == (1000, 0, False)
    assert len([name for name in first.tasks if name.startswith("batch_score.score[")]) == 2
    parts = sorted(Path(scored["manifest"]).parent.glob("part-*.parquet"))
    table = pa.concat_tables([pq.read_table(part) for part in parts]).sort_by("id")
    assert table["id"].to_pylist() == line["rows"]["id"].to_pylist()
    with PredictClient(platform.urls["model-grpc"], "line") as client:
        served = client.predict({"x": x})["predictions"]
    np.testing.assert_allclose(table["predictions"].to_numpy(), served, rtol=1e-6)
    assert _runs(platform, "line_on_drift") == [], "no drift, no event"

    _log(platform, x + 500)
    second = run_dag("score_and_watch")
    assert second.state == "success", second.explain()
    found = second.xcom("monitor")
    assert found["alarm"], found
    assert second.xcom("batch_score.publish")["reused"]
    assert second.xcom("monitor", "trainyard_drift_report").endswith("/report.html")
    deadline = time.monotonic() + 300
    while not (runs := [r for r in _runs(platform, "line_on_drift") if r["state"] == "success"]):
        assert time.monotonic() < deadline, _runs(platform, "line_on_drift")
        time.sleep(1)
    assert [run["run_type"] for run in runs] == ["asset_triggered"]
    assert (
        platform.airflow.xcom("line_on_drift", runs[0]["dag_run_id"], "what", "return_value", -1)
        == found["drifted"]
    )
    assert (first.tasks["monitor"].try_number, second.tasks["monitor"].try_number) == (1, 1)
    assert {"drift/x/js", "drift/rows", "drift/prediction predictions/js"} <= _metrics(platform)
    assert "no longer served" in line["trainyard"]("delete", "line", "--yes")

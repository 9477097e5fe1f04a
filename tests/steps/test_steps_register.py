"""Registration with a real MLflow server, with a database file, and with MLflow away, hanging or failing midway."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from trainers import evaluate, register
from trainers.exporting import package
from trainers.job import labels, termination
from trainers.job.errors import InvalidSpec
from trainers.job.ports import free_ports
from trainers.records.errors import DatasetMissing
from trainers.registry import tracking
from trainers.runtime.tracking import Spool

pytestmark = [
    # MLflow's own, on Python 3.11 and later; nothing of ours to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*"),
]


def start_server(folder, port, log):
    database = f"sqlite:///{folder / 'mlflow.db'}"
    env = {
        **os.environ,
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_REGISTRY_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [
        "-m",
        "uvicorn",
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",
        "mlflow.server.fastapi_app:app",
    ]
    server = subprocess.Popen([sys.executable, *command], env=env, stdout=log, stderr=log)
    # The database is made at the first request that needs it.
    url = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get?experiment_id=0"
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=60):
                return server
        except OSError as e:
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                server.wait()
                raise AssertionError(f"mlflow did not start: {Path(log.name).read_text()[-2000:]}") from e
            time.sleep(0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real tracking server with a registry, on loopback; its address."""
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_ports(1)[0]
    with (folder / "log").open("w") as log:
        process = start_server(folder, port, log)
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        process.wait(30)


@pytest.fixture
def spec(job, exported, digits):
    """What the pipeline hands over after export, for a model of a name of its own."""
    shutil.copytree(exported, job / "export")
    evaluation = evaluate.main({"job": str(job)})["evaluation"]
    spool = Spool(job)
    spool.params({"steps": 120})
    spool.metrics({"loss": 0.5}, step=60)
    spool.metrics({"loss": 0.25}, step=120)
    return {
        "job": str(job),
        "export": str(job / "export"),
        "name": f"digits-{job.parents[2].name}",
        "evaluation": evaluation,
        "manifest": str(digits.path),
    }


def client(uri):
    import mlflow

    return mlflow.MlflowClient(uri, registry_uri=uri)


def again(spec, text="x"):
    """Another export of the same job: other bytes, another digest."""
    folder = Path(spec["export"])
    manifest = json.loads((folder / "export.json").read_text())
    (folder / "more.txt").write_text(text)
    facts = {k: v for k, v in manifest.items() if k not in ("format", "files", "digest", "bytes")}
    return package.describe(folder, facts)["digest"]


def test_all_of_it_once(server, spec, digits, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    result = register.main(spec)
    version = result["model_version"]
    assert result["registered"] is True
    assert version == 1
    assert result["url"] == f"{server}/#/models/{spec['name']}/versions/1"

    mlflow = client(server)
    export = json.loads((Path(spec["export"]) / "export.json").read_text())
    found = mlflow.get_model_version_by_alias(spec["name"], "challenger")
    assert found.version == str(version)
    assert found.tags["trainyard.export_digest"] == export["digest"]
    assert found.tags["trainyard.records_digest"] == digits.digest
    assert found.tags["trainyard.job"] == export["job"]
    assert found.tags["trainyard.run"] == "run-1"
    assert "accuracy" in found.description

    run = mlflow.get_run(result["run_id"])
    evaluation = json.loads(Path(spec["evaluation"]).read_text())
    assert run.info.status == "FINISHED"
    assert run.data.params == {"steps": "120"}
    assert run.data.metrics["loss"] == 0.25
    assert [m.step for m in mlflow.get_metric_history(result["run_id"], "loss")] == [60, 120]
    assert run.data.metrics["eval_accuracy"] == pytest.approx(evaluation["metrics"]["accuracy"])
    dataset = run.inputs.dataset_inputs[0].dataset
    assert digits.digest.startswith(dataset.digest)
    assert str(digits.path) in dataset.source
    assert {a.path for a in mlflow.list_artifacts(result["run_id"])} >= {
        "evaluation.json",
        "evaluation",
        "manifest.json",
    }
    report = {a.path for a in mlflow.list_artifacts(result["run_id"], "evaluation")}
    assert report == {f"evaluation/{name}" for name in ("calibration.png", "confusion.png", "report.html")}
    assert len(run.outputs.model_outputs) == 1

    from mlflow.artifacts import download_artifacts

    folder = download_artifacts(
        f"models:/{spec['name']}@challenger", dst_path=spec["job"], tracking_uri=server
    )
    assert package.complete(Path(folder))["digest"] == export["digest"]

    # A second call changes nothing.
    assert register.main(spec) == result
    assert len(mlflow.search_model_versions(f"name = '{spec['name']}'")) == 1
    assert len(mlflow.get_metric_history(result["run_id"], "eval_accuracy")) == 1
    assert len(mlflow.get_metric_history(result["run_id"], "loss")) == 2

    # Another export is another version and the challenger; the champion keeps its alias.
    mlflow.set_registered_model_alias(spec["name"], "champion", "1")
    mlflow.delete_registered_model_alias(spec["name"], "challenger")
    assert register.main(spec)["model_version"] == 1
    assert "challenger" not in mlflow.get_registered_model(spec["name"]).aliases
    digest = again(spec)
    other = register.main(spec)
    assert other["model_version"] == 2
    assert other["run_id"] == result["run_id"]
    aliases = mlflow.get_registered_model(spec["name"]).aliases
    assert {k: str(v) for k, v in aliases.items()} == {"champion": "1", "challenger": "2"}
    assert mlflow.get_model_version(spec["name"], "2").tags["trainyard.export_digest"] == digest


CUTS = ["create_logged_model", "log_model_artifacts", "finalize_logged_model", "log_inputs", "log_batch"]
CUTS += ["create_registered_model", "create_model_version", "set_registered_model_alias"]


def test_cut_short_anywhere_it_is_finished_by_the_next_try(server, spec, monkeypatch):
    import mlflow
    import requests

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)

    def gone(self, *args, **kwargs):
        raise requests.ConnectionError("the server went away")

    for method in CUTS:
        with monkeypatch.context() as patch:
            patch.setattr(mlflow.MlflowClient, method, gone)
            result = register.main(spec)
        assert result["registered"] is False, method
        assert "the server went away" in result["warning"]
    result = register.main(spec)
    assert result["registered"] is True
    found = client(server)
    versions = found.search_model_versions(f"name = '{spec['name']}'")
    assert [v.version for v in versions] == [str(result["model_version"])]
    experiment = found.get_run(result["run_id"]).info.experiment_id
    digest = versions[0].tags["trainyard.export_digest"]
    models = found.search_logged_models(
        [experiment], filter_string=f"tags.`trainyard.export_digest` = '{digest}'"
    )
    assert [str(m.status) for m in models if m.source_run_id == result["run_id"]] == ["READY"]


def test_without_evaluation_and_records(server, spec, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    bare = {key: spec[key] for key in ("job", "export")} | {
        "name": spec["name"] + "-bare",
        "evaluation": None,
    }
    result = register.main(bare)
    assert result["registered"] is True
    run = client(server).get_run(result["run_id"])
    assert not [m for m in run.data.metrics if m.startswith("eval_")]


def test_into_a_database_file(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    result = register.main(spec)
    assert result["registered"] is True, result
    assert result["model_version"] == 1
    assert "url" not in result
    assert register.main(spec) == result


# ---- MLflow away


def unregistered(spec, monkeypatch, uri, within=15.0):
    if uri is None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    started = time.monotonic()
    result = register.main(spec)
    assert time.monotonic() - started < within
    assert result["registered"] is False
    assert "model_version" not in result
    return result["warning"]


def test_nobody_says_where_mlflow_is(spec, monkeypatch):
    assert "MLFLOW_TRACKING_URI is not set" in unregistered(spec, monkeypatch, None)


def test_nobody_listens(spec, monkeypatch):
    uri = f"http://user:secret@127.0.0.1:{free_ports(1)[0]}"
    warning = unregistered(spec, monkeypatch, uri)
    assert "does not answer" in warning
    assert "secret" not in warning


def test_somebody_listens_and_never_answers(spec, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        warning = unregistered(spec, monkeypatch, f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert "does not answer" in warning


@pytest.mark.parametrize("uri", ["http://", "http://[", "nonsense://x"])
def test_no_address(spec, monkeypatch, uri):
    assert unregistered(spec, monkeypatch, uri)


def test_something_else_answers(spec, monkeypatch):
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"],
        cwd=spec["job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as other:
        try:
            port = other.stdout.readline().split("port ")[1].split()[0]
            warning = unregistered(spec, monkeypatch, f"http://127.0.0.1:{port}")
            assert "404" in warning
            assert "steps" not in warning
        finally:
            other.kill()


def test_the_limits_do_not_outlive_the_call(spec, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with tracking.connected("sqlite://"):
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"  # what the environment says wins
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_killed_between_two_calls_as_processes(spec, tmp_path):
    """The server is there, is killed with -9, and comes back: the same version, no failed step."""
    port = free_ports(1)[0]
    env = {
        **os.environ,
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
        labels.ENV_TERMINATION_LOG: str(tmp_path / "log"),
    }

    def step():
        started = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-m", "trainers.register", "--spec", json.dumps(spec)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        return dict(termination.parse((tmp_path / "log").read_text()).result), time.monotonic() - started

    (tmp_path / "store").mkdir()
    with (tmp_path / "server.log").open("w") as log:
        server = start_server(tmp_path / "store", port, log)
        first, _ = step()
        server.kill()
        server.wait()
        away, seconds = step()
        server = start_server(tmp_path / "store", port, log)
        try:
            back, _ = step()
        finally:
            server.kill()
            server.wait()
    assert first["registered"] is True
    assert away["registered"] is False
    assert seconds < 30  # it answers within one on a quiet machine
    assert back == first


# ---- what is refused


REFUSED = [
    ({}, "job"),
    ({"job": "j"}, "export"),
    ({"job": "j", "export": "e"}, "name"),
    ({"job": "j", "export": "e", "name": "a' or '1' = '1"}, "name"),
    ({"job": "j", "export": "e", "name": "../x"}, "name"),
    ({"job": "j", "export": "e", "name": 7}, "name"),
    ({"job": "j", "export": "e", "name": "n", "alias": "champion"}, "spec"),
]


@pytest.mark.parametrize(("spec", "field"), REFUSED)
def test_refused(spec, field):
    with pytest.raises(InvalidSpec) as info:
        register.main(spec)
    assert info.value.field == field


def test_no_whole_export(spec):
    (Path(spec["export"]) / "saved_model.pb").write_bytes(b"")
    with pytest.raises(register.ExportMissing, match="not as it says"):
        register.main(spec)


def test_no_such_records(spec, tmp_path):
    with pytest.raises(DatasetMissing):
        register.main({**spec, "manifest": str(tmp_path / "nothing")})

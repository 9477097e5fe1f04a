"""A whole registration, aliases and lineage over every kind of MLflow: a file, a server, PostgreSQL, and S3."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import numpy as np
import pytest

from serving.release import mlflow_aliases
from serving.release.lineage import came_from, lineage_of
from serving.release.store import ReleaseStore
from tests.mlflow_server import MlflowServer
from tests.plugins.postgres_server import serving
from trainers import evaluate, register
from trainers.exporting import package
from trainers.exporting.origin import lineage as origin_of
from trainers.job.files import read_json
from trainers.job.ports import free_ports
from trainers.runtime.tracking import RUN, Spool

pytestmark = [
    # MLflow's own, on Python 3.11 and later; nothing of ours to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning"),
]


@pytest.fixture(scope="module")
def postgres():
    """A real PostgreSQL on loopback; makes a database and gives its URI."""
    with serving() as server:

        def database(name):
            with server.connect() as connection:
                connection.execute(f"CREATE DATABASE {name}")
            user = f"{server.user}:{server.password}"
            return f"postgresql+psycopg2://{user}@{server.host}:{server.port}/{name}"

        yield database


@pytest.fixture
def job_of_run(job, exported, digits):
    """What the pipeline hands over after export: evaluated, with reports, a spool and an origin."""
    shutil.copytree(exported, job / "export")
    evaluation = evaluate.main({"job": str(job)})["evaluation"]
    (job / "evaluation").mkdir(exist_ok=True)
    (job / "evaluation" / "report.html").write_text("<html>")
    (job / "evaluation" / "plots").mkdir()
    (job / "evaluation" / "plots" / "confusion.png").write_bytes(b"png")
    spool = Spool(job)
    spool.params({"steps": 120})
    for step, loss in ((60, 0.5), (120, 0.25)):
        spool.metrics({"loss": loss}, step=step)
    # The fixture's export was made at another place.
    manifest = json.loads((job / "export" / "export.json").read_text())
    facts = {k: v for k, v in manifest.items() if k not in ("format", "files", "digest", "bytes")}
    facts["lineage"] = origin_of(job, digits, step=120, checkpoint=facts["checkpoint"])
    package.describe(job / "export", {**facts, "job": str(job)})
    return {
        "job": str(job),
        "export": str(job / "export"),
        "name": f"digits-{uuid.uuid4().hex[:8]}",
        "evaluation": evaluation,
        "manifest": str(digits.path),
    }


@pytest.fixture(params=["sqlite file", "server", "server on postgresql", "postgresql"])
def uri(request, tmp_path, monkeypatch):
    """MLFLOW_TRACKING_URI, of each kind that we say we work with."""
    monkeypatch.chdir(tmp_path)
    if request.param == "sqlite file":
        yield f"sqlite:///{tmp_path / 'mlflow.db'}"
    elif request.param == "postgresql":
        yield request.getfixturevalue("postgres")("straight")
    else:
        on_postgres = "postgresql" in request.param
        database = request.getfixturevalue("postgres")("behind") if on_postgres else ""
        few = {"MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "2", "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "1"}
        server = MlflowServer(tmp_path / "mlflow", database=database, environ=few).start()
        yield server.url
        server.stop()


def examples_of_the_page():
    """The functions that docs/tracking.md shows."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "tracking.md").read_text()
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names


def test_register_aliases_and_lineage(uri, job_of_run, digits, monkeypatch, tmp_path):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    spec, name = job_of_run, job_of_run["name"]
    result = register.main(spec)
    assert result["registered"] is True, result
    assert register.main(spec) == result
    client = mlflow.MlflowClient(uri, uri)
    run = client.get_run(result["run_id"])
    export = json.loads((Path(spec["export"]) / "export.json").read_text())

    # Params, metrics with steps, how it ended.
    assert run.info.status == "FINISHED"
    assert run.data.params["steps"] == "120"
    assert [m.step for m in client.get_metric_history(result["run_id"], "loss")] == [60, 120]
    assert run.data.metrics["export_bytes"] == export["bytes"]
    assert run.data.metrics["export_load_s"] == export["load_s"] > 0
    assert len(client.get_metric_history(result["run_id"], "eval_accuracy")) == 1

    # Dataset inputs: what it was trained and what it was evaluated on.
    inputs = {i.tags[0].value: i.dataset for i in run.inputs.dataset_inputs}
    assert set(inputs) == {"training", "evaluation"}
    training = inputs["training"]
    assert digits.digest.startswith(training.digest)
    assert training.digest != inputs["evaluation"].digest
    source = json.loads(training.source)
    assert source["uri"] == str(digits.path)
    assert source["raw"]["digest"] == digits.raw["digest"]
    assert json.loads(inputs["evaluation"].profile)["num_rows"] == digits.counts["eval"]
    schema = json.loads(training.schema)["mlflow_tensorspec"]
    features = {f["name"]: f["tensor-spec"] for f in json.loads(schema["features"])}
    assert features["image"] == {"dtype": "uint8", "shape": [-1, 8, 8, 1]}
    assert [f["name"] for f in json.loads(schema["targets"])] == ["label"]
    import mlflow.data

    loaded = mlflow.data.get_source(run.inputs.dataset_inputs[0])
    assert loaded.to_dict()["uri"] == str(digits.path)

    # Reports.
    reports = {a.path for a in client.list_artifacts(result["run_id"], "evaluation")}
    assert reports >= {"evaluation/report.html", "evaluation/plots"}

    # The model: signature, input example, and MLflow's own way to load it gives the golden answers.
    version = client.get_model_version_by_alias(name, "challenger")
    assert version.tags["trainyard.git_commit"] == export["code"]["commit"]
    from mlflow.models import Model

    folder = Path(
        mlflow.artifacts.download_artifacts(f"models:/{name}@challenger", dst_path=str(tmp_path / "down"))
    )
    assert package.complete(folder)["digest"] == export["digest"]
    card = Model.load(str(folder))
    assert card.signature.inputs.input_names() == ["image"]
    (image,) = json.loads(json.dumps(card.signature.inputs.to_dict()))
    assert image["tensor-spec"] == {"dtype": "uint8", "shape": [-1, 8, 8, 1]}
    assert set(card.signature.outputs.input_names()) == {"classes", "logits", "probabilities"}
    example = card.load_input_example(str(folder))
    golden = json.loads((Path(spec["export"]) / "golden.json").read_text())
    assert np.array_equal(example["image"], golden["inputs"]["image"]["values"][:2])
    answers = mlflow.pyfunc.load_model(str(folder)).predict(example)
    np.testing.assert_allclose(answers["logits"], golden["outputs"]["logits"]["values"][:2], atol=1e-4)

    # Release: promoted, with aliases; another one promoted; back.
    store, moved = ReleaseStore(tmp_path, name), mlflow_aliases.set_alias
    one = store.reserve(export["digest"], result["model_version"])
    store.publish(spec["export"], one, mlflow_version=str(result["model_version"]))
    store.promote(one, by="ada", why="good")
    moved(name, "champion", result["model_version"])
    aliases = {k: str(v) for k, v in client.get_registered_model(name).aliases.items()}
    assert aliases == {"champion": "1"}  # it is no challenger any more
    (Path(spec["export"]) / "more.txt").write_text("x")
    facts = {k: v for k, v in export.items() if k not in ("format", "files", "digest", "bytes")}
    package.describe(Path(spec["export"]), facts)
    second = register.main(spec)
    assert second["model_version"] == 2
    aliases = {k: str(v) for k, v in client.get_registered_model(name).aliases.items()}
    assert aliases == {"champion": "1", "challenger": "2"}
    moved(name, "champion", 2)
    moved(name, "previous", 1)
    aliases = {k: str(v) for k, v in client.get_registered_model(name).aliases.items()}
    assert aliases == {"champion": "2", "previous": "1"}
    moved(name, "previous", "")
    assert "previous" not in client.get_registered_model(name).aliases

    # Lineage, from files alone; and the same ids as MLflow's.
    found = lineage_of(tmp_path, f"{name}@champion")
    assert found.registered["version"] == "1"
    assert found.records["raw"][0]["digest"] == digits.raw["digest"]
    assert found.job["present"]
    assert [v.version for v in came_from(tmp_path, records=digits.digest)] == [one]

    # The page's examples do what they say.
    page = examples_of_the_page()
    assert set(page["answers"](name)) == {"classes", "logits", "probabilities"}
    assert page["versions_of"](tmp_path, digits.digest) == [f"{name}/{one} serves"]
    assert read_json(Path(spec["job"]) / RUN)["run_id"] == result["run_id"]


# ---- artifacts in an object store


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """moto's real S3 server with a bucket; its address."""
    port = free_ports(1)[0]
    log = (tmp_path_factory.mktemp("s3") / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/mlflow", method="PUT"), timeout=30).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield url
    process.kill()
    process.wait()
    log.close()


def test_artifacts_go_to_the_object_store_and_not_through_the_server(s3, job_of_run, tmp_path, monkeypatch):
    """Artifacts of a server that proxies none; boto3, which pods don't have, is not used."""
    for key, value in (
        ("MLFLOW_S3_ENDPOINT_URL", s3),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(key, value)
    server = MlflowServer(tmp_path / "mlflow", artifact_root="s3://mlflow/models", proxied=False).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    try:
        with monkeypatch.context() as pod:
            pod.setitem(sys.modules, "boto3", None)
            result = register.main(job_of_run)
        assert result["registered"] is True, result
        import mlflow

        client = mlflow.MlflowClient(server.url, server.url)
        run = client.get_run(result["run_id"])
        assert run.info.artifact_uri.startswith("s3://mlflow/models/")
        paths = {a.path for a in client.list_artifacts(result["run_id"])}  # MLflow's own client, by boto3
        assert paths == {"manifest.json", "evaluation.json", "evaluation"}
        folder = Path(
            mlflow.artifacts.download_artifacts(
                f"models:/{job_of_run['name']}@challenger",
                dst_path=str(tmp_path / "down"),
                tracking_uri=server.url,
            )
        )
        assert package.complete(folder) is not None
        assert (folder / "MLmodel").exists()
        assert not list((tmp_path / "mlflow").glob("artifacts/**/*"))

        # A store that is away is a warning, as MLflow is.
        monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:1")
        again = {**job_of_run, "name": job_of_run["name"] + "-other"}
        (Path(again["export"]) / "more.txt").write_text("y")
        old = json.loads((Path(again["export"]) / "export.json").read_text())
        package.describe(
            Path(again["export"]),
            {k: v for k, v in old.items() if k not in ("format", "files", "digest", "bytes")},
        )
        away = register.main(again)
        assert away["registered"] is False
        assert "does not take artifacts" in away["warning"]
        monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3)
        assert register.main(again)["registered"] is True
    finally:
        server.stop()

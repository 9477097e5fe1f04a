"""`trainyard models` against a real model server's process and a real store; once as a process of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainyard import cli
from trainyard.tracking import note_verdict

from serving.release.promotions import PromotionLog
from serving.release.store import ReleaseStore
from serving.tfserving.config import ConfigFile, ensure_config


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain SavedModels: y = factor * x + b, by names and by Examples; one that is random; one without signatures."""
    import tensorflow as tf

    class Line(tf.Module):
        def __init__(self, factor: float, *, noise: bool = False) -> None:
            super().__init__()
            self.factor = tf.Variable(factor)
            self.noise = noise

        @tf.function(
            input_signature=[
                tf.TensorSpec([None, 2], tf.float32, name="x"),
                tf.TensorSpec([None], tf.int64, name="b"),
            ]
        )
        def named(self, x: tf.Tensor, b: tf.Tensor) -> dict[str, tf.Tensor]:
            y = self.factor * tf.reduce_sum(x, axis=1) + tf.cast(b, tf.float32)
            if self.noise:
                y += tf.random.uniform(tf.shape(y))
            return {"y": y, "large": y > 5.0}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")])
        def examples(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
            spec = {
                "x": tf.io.FixedLenFeature([2], tf.float32, [0.0, 0.0]),
                "b": tf.io.FixedLenFeature([], tf.int64, 0),
            }
            parsed = tf.io.parse_example(examples, spec)
            return self.named(parsed["x"], parsed["b"])

    root = tmp_path_factory.mktemp("plain")
    for name, model in (
        ("one", Line(1.0)),
        ("two", Line(2.0)),
        ("noisy", Line(1.0, noise=True)),
    ):
        signatures = {"serving_default": model.named, "examples": model.examples}
        tf.saved_model.save(model, str(root / name), signatures=signatures)
    tf.saved_model.save(Line(1.0), str(root / "bare"), signatures={})
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A model server in a process of its own, with an empty store beside it."""
    root = tmp_path_factory.mktemp("served")
    config, ready = ensure_config(root / "serving" / "models.config"), root / "ready.json"
    command = [sys.executable, "-m", "serving.server", "--port=0", "--rest_api_port=0"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--ready-file={ready}", f"--model_config_file={config}"],
            stderr=log,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
    deadline = time.monotonic() + 120
    while not ready.exists():
        assert process.poll() is None, (root / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ports = json.loads(ready.read_text())
    environ = {
        "TRAINYARD_STORAGE": str(root),
        "TRAINYARD_MODEL_SERVER": f"127.0.0.1:{ports['grpc']}",
        "TRAINYARD_MODEL_SERVER_REST": f"http://127.0.0.1:{ports['rest']}",
        "TRAINYARD_MODEL_CONFIG": str(config),
    }
    yield SimpleNamespace(
        root=root, environ=environ, address=environ["TRAINYARD_MODEL_SERVER"], config=config
    )
    process.terminate()
    process.wait(60)


@pytest.fixture
def run(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `trainyard models ...` in this process: exit code, output, errors."""
    for name in [name for name in os.environ if name.startswith(("TRAINYARD_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def call(*argv: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["models", *map(str, argv)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture(scope="module")
def released(
    server: SimpleNamespace, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Model `line`: version 1 champion before, 2 champion, made by the real command line in a process of its own."""
    command = [str(Path(sys.executable).with_name("trainyard")), "models"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TRAINYARD_", "MLFLOW_"))}

    def call(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *argv],
            capture_output=True,
            text=True,
            input=stdin,
            env={**environ, **server.environ},
            timeout=300,
            check=False,
        )

    first = call("create", "line", "--from", str(saved["one"]), "--why", "the first")
    assert first.returncode == 0, first.stderr
    assert "golden examples from random" in first.stdout
    assert "line version 1 is the champion" in first.stdout

    archive = tmp_path_factory.mktemp("archive") / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(saved["two"], "models/line/1")
    second = call("create", "line", "--from", f"file://{archive}", "--json")
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["promoted"]["version"] == 2

    asked = call("predict", "line", "-d", "-", "--json", stdin='[{"x": [1, 2.5], "b": 3}]')
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) == {"outputs": {"y": [10.0], "large": [True]}}
    wrong = call("predict", "line", "-d", '{"x": [[1, 2]]}')
    assert wrong.returncode == 1
    assert "missing b" in wrong.stderr
    assert "signature serving_default takes b: int64 [?]; x: float [?, 2]" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    return "line"


def test_listing_and_describing(
    run: Any, released: str, server: SimpleNamespace, saved: dict[str, Path]
) -> None:
    code, out, _ = run("list")
    assert code == 0
    assert out.splitlines()[1].split()[:2] == ["line", "2"]
    assert json.loads(run("list", "--json")[1])[0]["versions"] == [1, 2]
    found = json.loads(run("describe", "line", "--json")[1])
    assert (found["champion"], found["previous"]) == (2, 1)
    assert found["labels"] == {"canary": 2, "stable": 2}
    two, one = found["versions"]
    assert two["replicas"] == {server.address: "AVAILABLE"}
    assert two["labels"] == ["canary", "stable"]
    assert two["signatures"]["serving_default"]["inputs"]["x"] == {"dtype": "float", "shape": [None, 2]}
    assert two["bytes"] > 1000
    assert two["load_s"] >= 0
    assert one["promoted"]["why"] == "the first"
    assert one["source"] == str(saved["one"])
    only = json.loads(run("describe", "line@previous", "--json")[1])
    assert [v["version"] for v in only["versions"]] == [1]
    code, shown, _ = run("describe", "line/2")
    assert code == 0
    for text in ("takes x: float [?, 2]", "AVAILABLE", "stable", "promoted", "champion  2, before it 1"):
        assert text in shown
    assert run("describe", "line@nobody")[0] == cli.EXIT_REFUSED
    assert "it has version" not in run("describe", "line/9")[2]
    assert run("describe", "../x")[0] == cli.EXIT_REFUSED


def test_describing_when_the_servers_are_away(
    run: Any, released: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_MODEL_SERVER", "127.0.0.1:1")
    found = json.loads(run("describe", "line/1", "--json")[1])
    assert "127.0.0.1:1" in found["versions"][0]["replicas"]["127.0.0.1:1"]
    code, _, err = run("delete", "line/1", "--yes")
    assert code == cli.EXIT_REFUSED
    assert "held" in err or "does not answer" in err
    monkeypatch.delenv("TRAINYARD_MODEL_CONFIG")
    assert "TRAINYARD_MODEL_CONFIG must be set" in run("list")[2]


@pytest.mark.parametrize("road", [[], ["--rest"]], ids=["grpc", "rest"])
@pytest.mark.parametrize(
    ("data", "flags"),
    [
        ('[{"x": [1, 2], "b": 3}, {"x": [0, 0], "b": 4}]', []),
        ('{"x": [[1, 2], [0, 0]], "b": [3, 4]}', []),
        ('{"instances": [{"x": [1, 2], "b": 3}, {"x": [0, 0], "b": 4}]}', ["--label", "stable"]),
        ('{"inputs": {"x": [[1, 2], [0, 0]], "b": [3, 4]}}', ["--version", "2"]),
        ('[{"x": [1.0, 2.0], "b": 3}, {"b": 4}]', ["--signature", "examples"]),
        ('{"x": [[1.0, 2.0], [0.0, 0.0]], "b": [3, 4]}', ["--signature", "examples"]),
    ],
)
def test_every_form_of_data_gives_the_same_answers(
    run: Any, released: str, data: str, flags: list[str], road: list[str]
) -> None:
    code, out, err = run("predict", "line", "-d", data, "--json", *flags, *road)
    assert code == 0, err
    assert json.loads(out) == {"outputs": {"y": [9.0, 4.0], "large": [True, False]}}


def test_predictions_for_people_and_from_files(run: Any, released: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"x": [1, 2], "b": 3}, {"x": [0, 0], "b": 4}]')
    assert run("predict", "line", "-d", path)[1] == "large=true\ty=9\nlarge=false\ty=4\n"
    assert run("predict", "line", "-d", path, "--version", "1")[1].startswith("large=true\ty=6\n")


@pytest.mark.parametrize(
    ("data", "flags", "code", "text"),
    [
        ('{"x": [[1, 2]], "c": [1]}', [], 1, "missing b; unknown c"),
        ('{"x": [[1, "a"]], "b": [1]}', [], 1, "input x must be float [?, 2], got 'a'"),
        ('{"x": [[1, 2, 3]], "b": [1]}', [], 1, "got shape [1, 3]"),
        ('{"x": [[1, 2]], "b": [1.5]}', [], 1, "input b must be whole numbers"),
        ('{"x": [[1, 2]], "b": [1, 2]}', [], 1, "as many rows"),
        ('{"x": [[1, 2], [3]], "b": [1, 2]}', [], 1, "lists of equal lengths"),
        ('[{"x": [1, 2], "b": 1}, {"x": [1, 2]}]', [], 1, "row 1 must have b, x"),
        ("{no}", [], 2, "-d must be JSON"),
        ("/does/not/exist.json", [], 2, "can't be read"),
        ("[]", [], 1, "must be rows or columns"),
        ('{"x": [[1, 2]], "b": [1]}', ["--signature", "other"], 2, "examples"),
        ('{"x": [[1, 2]], "b": [1]}', ["--version", "77"], 2, "77"),
        ('{"x": [[1, 2]], "b": [1]}', ["--label", "nobody"], 2, "nobody"),
    ],
)
def test_wrong_data_is_told_in_a_sentence(
    run: Any, released: str, data: str, flags: list[str], code: int, text: str
) -> None:
    got, out, err = run("predict", "line", "-d", data, *flags)
    assert text in err
    assert got == code
    assert out == ""
    assert "Traceback" not in err


def test_promoting_rolling_back_and_what_holds_a_version(
    run: Any, released: str, server: SimpleNamespace, saved: dict[str, Path]
) -> None:
    store = ReleaseStore(server.root, "steps")
    for name in ("one", "two"):
        assert run("create", "steps", "--from", saved[name])[0] == 0
    code, out, _ = run("create", "steps", "--from", saved["two"], "--no-promote", "--json")
    assert code == 0
    assert json.loads(out)["published"]["version"] == 2, "the same model gets the same number"
    for version, holder in ((2, "being the champion"), (1, "being the champion before")):
        code, _, err = run("delete", f"steps/{version}", "--yes")
        assert code == cli.EXIT_REFUSED
        assert holder in err
    assert run("rollback", "steps", "--why", "worse")[1].strip() == (
        "steps version 1 is served instead of version 2"
    )
    code, _, err = run("delete", "steps/2", "--yes")
    assert code == cli.EXIT_REFUSED, "the replica has it loaded still"
    assert "config" in err or "replica" in err
    # A version whose gate said no is promoted by an override only, which is recorded with its author.
    record, job = server.root / "releases" / "steps" / "versions" / "2.json", server.root / "jobs" / "steps"
    record.write_text(json.dumps({**json.loads(record.read_text()), "export": {"job": str(job)}}))
    note_verdict(job, {"outcome": "fail", "reasons": ["accuracy is below"]})
    code, _, err = run("promote", "steps", 2, "--why", "I know better")
    assert code == cli.EXIT_REFUSED
    assert "accuracy is below" in err
    assert "--override" in err
    assert store.champion()["version"] == 1
    assert run("promote", "steps", 2, "--why", "I know better", "--override")[0] == 0
    last = store.log.entries()[-1]
    assert (last.version, last.gate["override"]["outcome_before"]) == (2, "fail")
    assert last.gate["override"]["reason"] == "I know better"
    assert last.by == last.gate["override"]["author"]
    assert "I know better" in run("log", "steps")[1]
    assert len(json.loads(run("log", "steps", "--json")[1])) == 4
    assert run("promote", "steps", 9, "--why", "x")[0] == cli.EXIT_REFUSED


def test_deleting_a_version_and_a_whole_model(
    run: Any, released: str, server: SimpleNamespace, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ReleaseStore(server.root, "gone")
    for name in ("one", "two"):
        assert run("create", "gone", "--from", saved[name])[0] == 0
    data = server.root / "data.json"
    data.write_text('[{"x": [5, 5], "b": 5}]')
    code, out, err = run("create", "gone", "--from", saved["one"], "--examples", data)
    assert code == 0, err
    assert "golden examples from examples" in out, "other golden examples make it another version"
    assert store.published() == [1, 2, 3]
    entry = ConfigFile(server.config).entry("gone")
    assert entry is not None
    assert entry.versions == (1, 2, 3)
    code, _, err = run("delete", "gone/1", "--yes")
    assert code == cli.EXIT_REFUSED
    assert f"replica {server.address} (AVAILABLE)" in err
    assert "--unload" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    code, _, err = run("delete", "gone/1", "--unload")
    assert code == cli.EXIT_REFUSED, "nobody at a terminal said yes"
    assert "--yes" in err
    code, _, err = run("delete", "gone/1", "--unload", "--yes")
    assert code == 0, err
    assert ConfigFile(server.config).entry("gone").versions == (2, 3)
    assert run("delete", "gone/2", "--unload", "--yes")[0] == cli.EXIT_REFUSED, "the champion before"
    assert store.published() == [2, 3]
    assert store.record(1)["removed"]
    before = ConfigFile(server.config).entry("line")
    assert run("delete", "gone@champion", "--yes")[0] == cli.EXIT_REFUSED
    code, out, err = run("delete", "gone", "--yes", "--why", "not needed")
    assert code == 0, err
    assert store.published() == []
    assert store.champion() is None
    assert ConfigFile(server.config).entry("gone") is None
    assert ConfigFile(server.config).entry("line") == before, "never another model's"
    assert [e.what for e in PromotionLog(store.releases / "promotion.jsonl").entries()][-1] == "delete"
    assert run("predict", "gone", "-d", data)[0] == cli.EXIT_REFUSED
    assert run("predict", "line", "-d", data)[0] == 0
    # Numbers are never used again, and the model can come back.
    assert run("create", "gone", "--from", saved["one"])[0] == 0
    assert store.champion()["version"] == 4
    assert store.champion()["previous"] is None


def test_models_that_are_not_served(run: Any, saved: dict[str, Path], tmp_path: Path) -> None:
    cases = {
        "noisy": "gives different",
        "bare": "no signature to serve",
    }
    for name, text in cases.items():
        code, _, err = run("create", "bad", "--from", saved[name])
        assert code == 1, name
        assert text in err
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "saved_model.pb").write_bytes(b"no graph")
    assert "can't be loaded" in run("create", "bad", "--from", broken)[2]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no saved_model.pb" in run("create", "bad", "--from", empty)[2]
    code, _, err = run("create", "bad", "--from", saved["one"], "--max-seconds", "0.2")
    assert "took more than 0.2 s" in err
    code, _, err = run("create", "bad", "--from", saved["one"], "--max-memory", str(20 << 20))
    assert "MB, more than 20 MB" in err
    assert run("create", "../bad", "--from", saved["one"])[0] == cli.EXIT_REFUSED
    assert run("create", "bad", "--from", tmp_path / "nowhere")[0] == cli.EXIT_REFUSED
    assert "bad" not in run("list")[1]


def test_scoring_a_file(run: Any, released: str, server: SimpleNamespace, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"id": i, "x": [i, 1], "b": i}) + "\n" for i in range(20)))
    argv = ("score", "line", "--from", source, "--columns", "id", "--json")
    code, out, err = run(*argv)
    assert code == 0, err
    found = json.loads(out)
    assert (found["version"], found["rows"], found["reused"]) == (2, 20, False)
    (part,) = Path(found["manifest"]).parent.glob("*.parquet")
    table = pq.read_table(part)
    assert table["y"].to_pylist() == [2.0 * (i + 1) + i for i in range(20)]
    assert json.loads(run(*argv)[1])["reused"]
    assert "20 rows scored by line version 1" in run("score", "line/1", "--from", source)[1]
    assert run("score", "line/9", "--from", source)[0] == cli.EXIT_REFUSED


def test_a_zip_from_a_store(run: Any, released: str, saved: dict[str, Path]) -> None:
    import fsspec

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in saved["one"].rglob("*"):
            archive.write(path, path.relative_to(saved["one"].parent))
    with fsspec.open("memory://bucket/one.zip", "wb") as file:
        file.write(packed.getvalue())
    code, out, err = run("create", "zipped", "--from", "memory://bucket/one.zip", "--no-promote")
    assert code == 0, err
    assert "zipped version 1 has the label canary" in out
    for path in saved["one"].rglob("*"):
        if path.is_file():
            with fsspec.open(f"memory://bucket/folder/{path.relative_to(saved['one'])}", "wb") as file:
                file.write(path.read_bytes())
    code, out, err = run("create", "zipped", "--from", "memory://bucket/folder", "--no-promote", "--json")
    assert code == 0, err
    assert json.loads(out)["published"]["version"] == 1, "the same model from another place"
    assert run("predict", "zipped", "-d", '[{"x": [1, 2], "b": 3}]')[1] == "large=true\ty=6\n"


def test_an_object_store_gets_what_is_created_promoted_and_rolled_back(
    run: Any, saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "store"
    monkeypatch.setenv("TRAINYARD_MODEL_STORE", f"file://{shared}")
    stable = []
    for source in ("one", "two"):
        code, _, error = run("create", "shared", "--from", saved[source])
        assert (code, error) == (0, "")
        stable.append(ConfigFile(shared / "models.config").entry("shared").labels["stable"])
    assert sorted(path.name for path in (shared / "models" / "shared").iterdir()) == ["1", "2"]
    assert run("rollback", "shared")[0] == 0
    stable.append(ConfigFile(shared / "models.config").entry("shared").labels["stable"])
    assert run("promote", "shared", "2", "--why", "better after all")[0] == 0
    stable.append(ConfigFile(shared / "models.config").entry("shared").labels["stable"])
    assert stable == [1, 2, 1, 2]

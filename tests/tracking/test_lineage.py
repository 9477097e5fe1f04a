"""Lineage both ways over real records, a real release store and the command; and what is gone, moved or unknown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainyard import cli

from serving.errors import ReleaseNotFound
from serving.release.lineage import came_from, lineage_of
from serving.release.store import ReleaseStore
from trainers.exporting import package
from trainers.exporting.origin import lineage as origin_of
from trainers.job.files import write_json
from trainers.job.record import JobRecord, JobState
from trainers.records.build import prepare
from trainers.records.manifest import Manifest
from trainers.records.spans import window


def quiet(line: str) -> None:
    """No progress in tests."""


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The storage root that commands see."""
    root = tmp_path / "storage"
    root.mkdir()
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRAINYARD_STORAGE", str(root))
    for name in ("TRAINYARD_MODEL_SERVER", "TRAINYARD_MODEL_CONFIG", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return root


@pytest.fixture
def records(storage: Path) -> Callable[..., Manifest]:
    """Makes records of a table; `seed` changes what is in it."""

    def make(seed: int = 0, **options: Any) -> Manifest:
        raw = storage / "raw" / "houses" / f"{seed}.csv"
        raw.parent.mkdir(parents=True, exist_ok=True)
        rows = [f"{i + 1000 * seed},{i % 5 + seed},{i % 3}" for i in range(60)]
        raw.write_text("\n".join(["id,rooms,price", *rows]) + "\n")
        return prepare(
            raw,
            storage / "records" / "houses",
            name="houses",
            label="price",
            key="id",
            progress=quiet,
            **options,
        )

    return make


@pytest.fixture
def release(storage: Path) -> Callable[..., int]:
    """Trains nothing, but records, exports and publishes as the steps do; the version's number."""

    def make(manifest: Manifest, run: str, *, name: str = "houses", mlflow: int | None = None) -> int:
        from trainers.job.plan import Cluster, make_plan
        from trainers.job.spec import TrainingJob

        folder = storage / "jobs" / "houses_retrain" / run
        job = TrainingJob(
            name, "trainers.models.flights", inputs={"records": str(manifest.path)}, output=str(folder)
        )
        record = JobRecord.create(make_plan(job, Cluster.process([1]), gang="houses"))
        record.finish(JobState.SUCCEEDED, step=70)
        if mlflow is not None:
            write_json(folder / "tracking.json", {})
            (folder / "tracking").mkdir()
            known = {"run_id": "f" * 32, "experiment_id": "1", "url": "http://mlflow/#/run"}
            write_json(folder / "tracking" / "run.json", known)
        with package.staged(folder / "export") as staged:
            (staged / "saved_model.pb").write_text(run)
            facts = {
                "job": str(folder),
                "run_id": run,
                "trainer": job.trainer,
                "step": 70,
                "records_digest": manifest.digest,
                "code": {"version": "c" * 40 + "-dirty", "commit": "c" * 40, "dirty": True, "source": "git"},
                "lineage": origin_of(folder, manifest, step=70, checkpoint="k"),
            }
            digest = package.describe(staged, facts)["digest"]
        store = ReleaseStore(storage, name)
        version = store.reserve(digest, mlflow)
        store.publish(folder / "export", version, mlflow_version=None if mlflow is None else str(mlflow))
        return version

    return make


def promote(storage: Path, version: int, name: str = "houses", why: str = "better") -> None:
    """Into the promotion log."""
    ReleaseStore(storage, name).promote(version, by="ada", why=why, gate={"outcome": "pass"})


def test_forward_and_back(
    storage: Path, records: Any, release: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = records(0), records(1)
    first, second, third = release(one, "a", mlflow=1), release(two, "b"), release(one, "c")
    promote(storage, first)
    promote(storage, second)

    found = lineage_of(storage, "houses@previous")
    assert (found.version, found.state, found.serves) == (first, "published", False)
    assert found.registered == {
        "run_id": "f" * 32,
        "experiment_id": "1",
        "url": "http://mlflow/#/run",
        "version": "1",
    }
    assert found.code["commit"] == "c" * 40
    assert found.job["name"] == "houses_retrain/a"
    assert found.job["present"]
    assert found.records["digest"] == one.digest
    assert found.records["counts"] == dict(one.counts)
    (source,) = found.records["raw"]
    assert source == {**one.raw, "present": True}
    assert source["files"] == 1
    assert len(source["digest"]) == 64
    assert [(e["what"], e["version"], e["previous"]) for e in found.releases] == [
        ("promote", first, None),
        ("promote", second, first),
    ]
    assert lineage_of(storage, "houses").version == second  # the champion
    assert lineage_of(storage, "houses").serves
    assert lineage_of(storage, "houses@challenger").version == third

    for asked in (one.digest, one.digest[:8], str(one.path), str(one.folder), one.folder.as_uri()):
        assert [v.version for v in came_from(storage, records=asked)] == [third, first], asked
    raw = storage / "raw" / "houses"
    for uri in (str(raw / "0.csv"), (raw / "0.csv").as_uri(), source["digest"][:12]):
        assert [v.version for v in came_from(storage, raw=uri)] == [third, first], uri
    assert [v.version for v in came_from(storage, raw=str(raw))] == [third, second, first]
    assert came_from(storage, raw="s3://elsewhere/houses") == []
    assert came_from(storage, raw="/") == []

    # The command, for people and for programs.
    assert cli.main(["models", "lineage", "houses@champion"]) == 0
    said = capsys.readouterr().out
    assert f"houses/{second}  champion, serves now" in said
    assert "commit cccccccccccc, with changes that are in no commit" in said
    assert "job houses_retrain/b: trainers.models.flights at step 70" in said
    assert f"records houses {two.digest[:12]}: " in said
    assert f"raw {raw / '1.csv'} {two.raw['digest'][:12]}: 1 file, 0.00 MB" in said
    assert f"promote instead of {first}, by ada, gate pass: better" in said
    assert said.index("job houses") < said.index("records houses") < said.index("raw ")
    assert cli.main(["models", "lineage", f"houses/{first}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_json()))
    assert cli.main(["models", "lineage", "--records", str(two.path)]) == 0
    assert f"houses/{second}  champion, serves now" in capsys.readouterr().out
    assert cli.main(["models", "lineage", "--raw", str(raw / "0.csv"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["version"], row["serves"]) for row in rows] == [(third, False), (first, False)]
    assert cli.main(["models", "lineage", "--raw", "/nowhere/at/all"]) == 0
    assert "no version of any model came from" in capsys.readouterr().out


def test_it_outlives_pruning_and_lost_folders(
    storage: Path, records: Any, release: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one = records(0)
    versions = [release(one, run) for run in ("a", "b", "c")]
    for version in versions:
        promote(storage, version)
    before = lineage_of(storage, f"houses/{versions[0]}").to_json()
    assert ReleaseStore(storage, "houses").prune(1) == [versions[0]]
    shutil.rmtree(storage / "jobs")
    moved = storage / "records" / "archive" / "of-2026"
    moved.parent.mkdir()
    shutil.move(one.folder, moved)
    (storage / "raw" / "houses" / "0.csv").unlink()

    found = lineage_of(storage, f"houses/{versions[0]}")
    assert found.state == "removed"
    assert found.records["digest"] == before["records"]["digest"]
    assert found.records["present"]  # by its digest, at another place
    assert found.records["found"] == str(moved / "manifest.json")
    assert found.records["raw"][0] == {**before["records"]["raw"][0], "present": False}
    assert (found.job["present"], found.job["name"]) == (False, "houses_retrain/a")
    assert [v.version for v in came_from(storage, records=str(moved))] == versions[::-1]
    shutil.rmtree(moved)
    assert cli.main(["models", "lineage", f"houses/{versions[0]}"]) == 0
    said = capsys.readouterr().out
    assert f"houses/{versions[0]}  removed 20" in said
    assert "its folder is gone" in said
    assert "gone: known by its digest only" in said
    assert "0.csv" in said
    assert [v.version for v in came_from(storage, records=one.digest[:6])] == versions[::-1]


def test_the_whole_root_moves(storage: Path, records: Any, release: Any) -> None:
    version = release(records(0), "a")
    other = storage.with_name("elsewhere")
    storage.rename(other)
    found = lineage_of(other, f"houses/{version}")
    assert found.job["found"] == str(other / "jobs" / "houses_retrain" / "a")
    assert Path(found.records["found"]).is_relative_to(other)


def test_files_that_vanished_unpruned_are_said(storage: Path, records: Any, release: Any) -> None:
    version = release(records(0), "a")
    shutil.rmtree(storage / "models" / "houses" / str(version))
    found = lineage_of(storage, "houses")
    assert found.state == "removed"
    assert "though nothing has pruned them" in found.remarks[0]


def test_an_export_that_says_little(storage: Path, records: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an earlier version, or of a SavedModel from elsewhere: what is known is shown, and no more."""
    one = records(0)
    for name, facts in (
        ("old", {"job": "/gone/old_retrain/r", "records_digest": one.digest, "code_version": "0.1.0"}),
        ("alien", {}),
    ):
        with package.staged(storage / name) as staged:
            (staged / "saved_model.pb").write_text(name)
            digest = package.describe(staged, facts)["digest"]
        store = ReleaseStore(storage, name)
        store.publish(storage / name, store.reserve(digest))
    old = lineage_of(storage, "old")
    assert old.records["raw"][0]["digest"] == one.raw["digest"]  # the dataset itself still knows
    assert old.job["name"] == "old_retrain/r"
    assert old.code == {"version": "0.1.0"}
    alien = lineage_of(storage, "alien")
    assert (alien.records, alien.job, alien.code) == ({}, {}, {})
    assert cli.main(["models", "lineage", "alien"]) == 0
    said = capsys.readouterr().out
    assert "records: unknown" in said
    assert "says nothing of its origin" in said
    assert [v.name for v in came_from(storage, records=one.digest)] == ["old"]


def test_a_window_came_from_each_of_its_spans(storage: Path, records: Any, release: Any) -> None:
    from trainers.records.spans import record_span

    months = [records(seed, span=f"2013-0{seed + 1}") for seed in range(3)]
    for month in months:
        record_span(month)
    output = storage / "records" / "houses"
    names = ["2013-01", "2013-02", "2013-03"]
    whole = window(output, names, held_out="all", progress=quiet).manifest
    version = release(whole, "w")
    for month in months:
        assert [v.version for v in came_from(storage, records=month.digest)] == [version]
    middle = str(storage / "raw" / "houses" / "1.csv")
    assert [v.version for v in came_from(storage, raw=middle)] == [version]
    spans = lineage_of(storage, "houses").records["spans"]
    assert [span["span"] for span in spans] == ["2013-01", "2013-02", "2013-03"]
    assert [span["raw"][0]["digest"] for span in spans] == [month.raw["digest"] for month in months]


def test_no_such_thing(storage: Path, records: Any, release: Any, capsys: pytest.CaptureFixture[str]) -> None:
    release(records(0), "a")
    for target, words in (
        ("towers", "no model 'towers'"),
        ("houses/9", "no version 9"),
        ("houses@champion", "no champion"),
        ("houses@", "names no version"),
    ):
        with pytest.raises(ReleaseNotFound, match=words):
            lineage_of(storage, target)
    with pytest.raises(ReleaseNotFound, match="neither a digest"):
        came_from(storage, records="/nowhere")
    for arguments in ([], ["houses", "--raw", "x"], ["--records", "zz"], ["towers"]):
        assert cli.main(["models", "lineage", *arguments]) != 0
    assert "Traceback" not in capsys.readouterr().err

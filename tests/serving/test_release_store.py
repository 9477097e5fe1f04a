"""Numbers, publishing, the champion, rollbacks, pruning; killed at every point."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from serving.errors import ConfigInvalid, ExportInvalid, ReleaseConflict, ReleaseNotFound, StoreBusy
from serving.files import create_exclusive, locked, write_atomic
from serving.release.exported import Export, Golden
from serving.release.promotions import Promotion, PromotionLog
from serving.release.store import ReleaseStore

NOON = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def store(tmp_path):
    return ReleaseStore(tmp_path / "storage", "digits", now=lambda: NOON)


@pytest.fixture
def release(store, fake_export):
    """Publishes an export of the given content and promotes it; returns its number."""

    def release(content, *, promote=True, **options):
        export = fake_export(content, content)
        version = store.reserve(Export.load(export).digest)
        store.publish(export, version, **options)
        if promote:
            store.promote(version, by="test", why="because")
        return version

    return release


def test_numbers_belong_to_digests(store):
    assert store.reserve("a" * 64) == 1
    assert store.reserve("b" * 64) == 2
    assert store.reserve("a" * 64) == 1
    assert store.reserve("c" * 64, hint=7) == 7
    assert store.reserve("d" * 64, hint=5) == 8, "a hint below a number in use is not taken"
    assert store.reserve("c" * 64, hint=99) == 7
    assert store.versions() == [1, 2, 7, 8]
    assert store.record(7)["digest"] == "c" * 64


def test_numbers_of_folders_without_a_record_are_taken_too(store, tmp_path):
    (tmp_path / "storage" / "models" / "digits" / "41").mkdir(parents=True)
    assert store.reserve("a" * 64) == 42


def test_publish_shows_a_whole_version_once(store, fake_export):
    export = fake_export("graph")
    (export / "left-over.tmp").write_text("not in the manifest")
    version = store.reserve(Export.load(export).digest)
    path = store.publish(export, version, mlflow_version="12")
    assert path == store.path(1)
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == [
        "export.json",
        "golden.json",
        "saved_model.pb",
        "variables/variables.index",
    ]
    Export.load(path).verify()
    before = path.stat().st_ino
    assert store.publish(export, version) == path
    assert path.stat().st_ino == before, "published again, nothing may change"
    record = store.record(1)
    assert record["mlflow_version"] == "12"
    assert record["published"] == "2026-05-01T12:00:00+00:00"
    assert record["export"]["job"] == "digits"


def test_publish_refuses_what_is_not_what_was_exported(store, fake_export):
    export = fake_export("graph")
    version = store.reserve(Export.load(export).digest)
    for damage in (
        lambda p: p.write_text("grbph"),
        lambda p: p.write_text("longer than before"),
        Path.unlink,
    ):
        damage(export / "saved_model.pb")
        with pytest.raises(ExportInvalid, match=r"saved_model.pb.*run the export again"):
            store.publish(export, version)
        assert store.published() == []
    other = fake_export("other", "other")
    with pytest.raises(ReleaseConflict, match="reserved for another export"):
        store.publish(other, version)
    with pytest.raises(ReleaseNotFound, match="no version 5; known versions: \\[1\\]"):
        store.publish(other, 5)


def test_a_number_taken_by_hand_is_not_overwritten(store, fake_export, release):
    export = fake_export("graph")
    version = store.reserve(Export.load(export).digest)
    other = fake_export("other", "by-hand")
    other.rename(store.models / str(version))
    with pytest.raises(ReleaseConflict, match="holds another export"):
        store.publish(export, version)


def test_the_champion_is_the_log_s_word(store, release):
    assert store.champion() is None
    release("one", mlflow_version="5")
    two = release("two")
    champion = store.champion()
    assert (champion["version"], champion["previous"], champion["by"]) == (two, 1, "test")
    assert champion["path"] == str(store.path(2))
    again = store.promote(two, by="test", why="twice")
    assert again.why == "because"
    assert len(store.log.entries()) == 2
    assert store.log.entries()[0].mlflow_version == "5"
    with pytest.raises(ReleaseNotFound, match="version 9 of digits is not published"):
        store.promote(9, by="test", why="x")


def test_two_rollbacks_go_two_releases_back(store, release):
    for content in ("one", "two", "three"):
        release(content)
    assert store.rollback(by="ann", why="slow").version == 2
    assert store.champion()["previous"] == 1
    assert store.rollback(by="ann", why="slow").version == 1
    with pytest.raises(ReleaseNotFound, match="no earlier champion"):
        store.rollback(by="ann", why="slow")
    assert store.rollback(by="ann", why="fixed", to=3).version == 3
    assert store.rollback(by="ann", why="again", to=3).version == 3
    assert store.rollback(by="ann", why="slow").version == 1
    assert [e.what for e in store.log.entries()] == ["promote"] * 3 + ["rollback"] * 4


def test_prune_keeps_what_anybody_holds(store, release):
    for content in "abcdefg":
        release(content)
    store.rollback(by="x", why="y", to=2)
    assert store.prune(2, protected=[4]) == [3, 5]
    assert store.published() == [1, 2, 4, 6, 7]
    assert store.record(3)["removed"]
    assert store.prune(2, protected=[4]) == []
    assert store.reserve("z" * 64) == 8, "numbers are never used again"
    with pytest.raises(ReleaseConflict, match="keep must be 1 or more"):
        store.prune(0)


def test_a_pruned_export_gets_a_new_number(store, release, fake_export):
    release("a", promote=False)
    for content in "bcd":
        release(content)
    assert store.prune(1) == [1, 2]
    with pytest.raises(ReleaseConflict, match="was pruned"):
        store.publish(fake_export("a", "again"), 1)
    assert store.reserve(Export.load(fake_export("a", "once-more")).digest) == 5


def test_the_log_survives_a_line_cut_short(tmp_path, caplog):
    log = PromotionLog(tmp_path / "releases" / "promotion.jsonl")
    assert log.entries() == []
    log.append(Promotion(1, "now", "me", "promote", "why"))
    with log.path.open("ab") as file:
        file.write(b'{"version": 2, "wh')
    log.append(Promotion(3, "now", "me", "promote", "why", previous=1))
    assert [e.version for e in log.entries()] == [1, 3]
    assert "was cut short and is removed" in caplog.text
    assert all(json.loads(line) for line in log.path.read_text().splitlines()), "whole lines only"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"version": 0}, "version must be"),
        ({"version": True}, "version must be"),
        ({"what": "try"}, "what must be"),
        ({"by": " "}, "by must name"),
    ],
)
def test_bad_promotions_are_refused(given, message):
    with pytest.raises(ConfigInvalid, match=message):
        Promotion(**{"version": 1, "when": "now", "by": "me", "what": "promote", "why": "", **given})


@pytest.mark.parametrize("name", ["", "../etc", "a/b", ".hidden", "a b", "x" * 129, None, "a:b"])
def test_names_that_could_leave_their_folder_are_refused(tmp_path, name):
    with pytest.raises(ConfigInvalid, match="a model's name must be"):
        ReleaseStore(tmp_path, name)


def _publish_many(storage, folders, queue):
    store = ReleaseStore(storage, "digits")
    for folder in folders:
        version = store.reserve(Export.load(folder).digest)
        store.publish(folder, version)
        queue.put((Path(folder).name, version))


def test_publishers_at_once_get_numbers_of_their_own(tmp_path, fake_export):
    folders = [fake_export(f"content {i}", f"export-{i}") for i in range(6)]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=_publish_many, args=(tmp_path / "storage", folders[i::2] + folders[:1], queue))
        for i in range(2)
    ]
    for worker in workers:
        worker.start()
    given = [queue.get(timeout=60) for _ in range(8)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    by_name: dict[str, set[int]] = {}
    for name, version in given:
        by_name.setdefault(name, set()).add(version)
    assert all(len(versions) == 1 for versions in by_name.values())
    store = ReleaseStore(tmp_path / "storage", "digits")
    assert store.published() == [1, 2, 3, 4, 5, 6]
    for version in store.published():
        Export.load(store.path(version)).verify()
    assert not list(store.models.glob(".*"))


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
calls = 0
def counted(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
for name in ("fsync", "rename", "replace", "link", "unlink", "mkdir", "write"):
    setattr(os, name, counted(getattr(os, name)))
from serving.release import steps
from serving.release.store import ReleaseStore
result = steps.publish_step({storage!r}, "digits", {export!r}, mlflow_version=3)
ReleaseStore({storage!r}, "digits").promote(result["version"], by="test", why="x")
print("calls", calls)
"""


@pytest.mark.slow
def test_killed_between_any_two_steps_the_next_run_finishes(tmp_path, fake_export):
    export = fake_export("graph")
    root = str(Path(__file__).parents[2])

    def run(at, storage):
        script = KILLED.format(root=root, at=at, storage=str(storage), export=str(export))
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
        )

    whole = run(-1, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    steps = int(whole.stdout.split()[-1])
    assert steps > 15
    # Killed before each call that changes the disk, each at a storage of its own; then a run nobody kills.
    for at in range(1, steps + 1):
        storage = tmp_path / f"killed-{at}"
        assert run(at, storage).returncode == -signal.SIGKILL
        store = ReleaseStore(storage, "digits")
        for version in store.published():
            Export.load(store.path(version)).verify()  # visible means whole
        folder = store.publish(export, store.reserve(Export.load(export).digest, 3))
        store.promote(int(folder.name), by="test", why="x")
        assert store.published() == [3]
        assert store.champion()["version"] == 3
        assert len(store.log.entries()) == 1
        assert not list(store.models.glob(".*"))
        assert not list((store.releases / "versions").glob(".*"))


def test_a_lock_names_its_holder(tmp_path):
    path = tmp_path / "locks" / ".lock"
    with locked(path, 1.0):
        held = json.loads(path.read_text())
        assert held["pid"] == os.getpid()
        with pytest.raises(StoreBusy, match=f"is held by process {os.getpid()} on"), locked(path, 0.05):
            pass
    with locked(path, 0.05):
        path.write_text("?")
        with pytest.raises(StoreBusy, match="another process"), locked(path, 0.0):
            pass


def test_files_are_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"one", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not create_exclusive(path, b"two")
    assert path.read_bytes() == b"one"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomic(tmp_path / "folder", b"x")

    def no_links(*args):
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    assert create_exclusive(tmp_path / "other", b"x")
    assert not create_exclusive(tmp_path / "other", b"y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "other"]

    def broken(*args):
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(OSError, match="input/output"):
        create_exclusive(tmp_path / "third", b"x")


def test_a_record_that_is_not_whole_keeps_its_number(store):
    store.reserve("a" * 64)
    (store.releases / "versions" / "1.json").write_text("{")
    assert store.record(1) == {"version": 1}
    assert store.reserve("a" * 64) == 2


# ---- what the exporter wrote


def _change(folder, **changes):
    manifest = json.loads((folder / "export.json").read_text())
    manifest.update(changes)
    (folder / "export.json").write_text(json.dumps(manifest))
    return folder


FILE = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format of .* must be 1, got 2"),
        ({"files": []}, "files of .* must be an object"),
        ({"files": {}}, "lists no saved_model.pb"),
        ({"files": {"saved_model.pb": FILE, "../x": FILE}}, "must lie within the export folder"),
        ({"files": {"saved_model.pb": FILE, "/etc/x": FILE}}, "must lie within"),
        ({"files": {"saved_model.pb": {"bytes": -1, "sha256": "0" * 64}}}, "0 or more"),
        ({"files": {"saved_model.pb": {"bytes": 1, "sha256": "x"}}}, "64 hex digits"),
        ({"digest": None}, "digest of .* must be 64 hex"),
        ({"digest": "0" * 64}, "digest of .* is not that of the files it lists"),
    ],
)
def test_bad_manifests_are_refused(fake_export, changes, message):
    with pytest.raises(ExportInvalid, match=message):
        Export.load(_change(fake_export(), **changes))


def test_missing_and_broken_files_are_told(fake_export, tmp_path):
    with pytest.raises(ExportInvalid, match="does not exist; the export step writes it last"):
        Export.load(tmp_path / "none")
    folder = fake_export()
    (folder / "export.json").write_text("[]")
    with pytest.raises(ExportInvalid, match="must hold a JSON object"):
        Export.load(folder)
    (folder / "export.json").write_text("{")
    with pytest.raises(ExportInvalid, match="can't be read"):
        Export.load(folder)
    whole = fake_export("x", "whole")
    export = Export.load(whole)
    export.verify()
    assert export.bytes == 4 + len("{}")
    (whole / "saved_model.pb").write_text("y")
    with pytest.raises(ExportInvalid, match="not what its exporter wrote"):
        export.verify()
    (whole / "saved_model.pb").unlink()
    with pytest.raises(ExportInvalid, match="can't be read"):
        export.verify()


TENSOR = {"dtype": "float32", "shape": [1], "values": [0.5]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "inputs of .* must be an object"),
        ({"inputs": {}, "outputs": {}}, "must have inputs and outputs"),
        ({"inputs": {"x": {}}, "outputs": {}}, "must have dtype, shape and values"),
        ({"inputs": {"x": {**TENSOR, "values": {"b64": "!"}}}, "outputs": {}}, "golden tensor x"),
        ({"inputs": {"x": TENSOR}, "outputs": {"y": TENSOR}, "tolerance": -1}, "0 or more"),
        ({"inputs": {"x": TENSOR}, "outputs": {"y": TENSOR}, "tolerance": "low"}, "must be a number"),
    ],
)
def test_bad_golden_examples_are_refused(tmp_path, document, message):
    file = tmp_path / "golden.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ExportInvalid, match=message):
        Golden.load(file)

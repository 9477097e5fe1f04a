"""Datasets prepared again, at once, and after an interruption."""

import re
import threading

import numpy as np
import pytest
from PIL import Image

from tests.records.published import content, names


def test_a_second_run_does_nothing(pictures, run, said):
    source = pictures(20)
    first = run(source)
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    said.clear()
    assert run(source) == first
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    assert any(line.startswith("nothing to do") for line in said)


def test_a_damaged_dataset_is_written_anew(pictures, run, said):
    source = pictures(20)
    first = run(source)
    shard = first.folder / first.shards[0].file
    shard.write_bytes(shard.read_bytes()[:-1])
    again = run(source)
    assert again.digest == first.digest
    assert content(again) == content(first)
    again.verify()
    assert any("writing the dataset anew" in line for line in said)


def test_other_bytes_are_another_dataset(pictures, run):
    source = pictures(20)
    first = run(source)
    Image.fromarray(np.zeros((4, 6), np.uint8)).save(source / "0" / "0000.png")
    second = run(source)
    assert second.folder != first.folder
    assert second.digest != first.digest


class Interrupted(Exception):
    """Stands for the end of a process in the middle of things."""


def test_an_interrupted_run_goes_on_where_it_was(pictures, run, said, tmp_path):
    source = pictures(40)

    def progress(line):
        said.append(line)
        if line.startswith("unit 2/3"):
            raise Interrupted

    with pytest.raises(Interrupted):
        run(source, shards=3, progress=progress)
    (folder,) = (tmp_path / "out").iterdir()
    # Two units are whole and recorded, the third is not begun, and nothing is half written.
    assert [name for name in names(folder) if name.startswith(".unit")] == [
        ".unit-00000-of-00003.json",
        ".unit-00001-of-00003.json",
    ]
    assert not [name for name in names(folder) if name.endswith(".tmp")]
    shard = folder / "train-00000-of-00003.tfrecord"
    before = shard.stat()
    (folder / ".train-00009-of-00009.tfrecord.1.ab.tmp").write_text("left by a killed run")
    # A record that isn't what the disk holds is not believed.
    (folder / "train-00001-of-00003.tfrecord").write_bytes(b"x")
    manifest = run(source, shards=3)
    assert shard.stat().st_mtime_ns == before.st_mtime_ns
    assert not [name for name in names(folder) if name.startswith(".")]
    assert len([line for line in said if "finished by an earlier run" in line]) == 1
    elsewhere = run(source, shards=3, name="test", progress=said.append)
    assert content(elsewhere) == content(manifest)
    manifest.verify()


def test_a_broken_unit_record_is_not_believed(pictures, run, tmp_path):
    source = pictures(20)

    def progress(line):
        if line.startswith("unit 1/2"):
            raise Interrupted

    with pytest.raises(Interrupted):
        run(source, progress=progress)
    (folder,) = (tmp_path / "out").iterdir()
    (folder / ".unit-00000-of-00002.json").write_text("{")
    run(source).verify()


def test_two_runs_at_once(pictures, run, said, tmp_path):
    source = pictures(30)
    holding, go_on = threading.Event(), threading.Event()
    results = []

    def first(line):
        if line.startswith("unit 1/2"):
            holding.set()
            assert go_on.wait(60)

    def second(line):
        said.append(line)
        if line.startswith("another run"):
            go_on.set()

    one = threading.Thread(target=lambda: results.append(run(source, progress=first)))
    one.start()
    assert holding.wait(60)
    results.append(run(source, progress=second))
    one.join()
    assert results[0] == results[1]
    assert any("waiting for it" in line for line in said)
    assert any(line.startswith("nothing to do") for line in said)
    assert names(tmp_path / "out") == [results[0].fingerprint[:16]]


def test_long_runs_speak_in_between(pictures, run, said, monkeypatch):
    monkeypatch.setattr("trainers.records.listing.SPEAK_EVERY", 0)
    monkeypatch.setattr("trainers.records.build.SPEAK_EVERY", 0)
    run(pictures(10), batch_rows=2)
    assert any(line.startswith("looked at 10 of 10 files") for line in said)
    assert any(re.fullmatch(r"unit 1/2: 2 rows, [\d,]+ rows/s", line) for line in said)


def test_without_locks_files_are_whole_all_the_same(pictures, run, monkeypatch):
    def flock(fd, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("trainers.records.locks.fcntl.flock", flock)
    run(pictures(10)).verify()

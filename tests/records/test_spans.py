"""Spans and rolling windows of them: datasets like any other, without copying a record."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.job.errors import ConfigError
from trainers.records.__main__ import main
from trainers.records.build import prepare
from trainers.records.errors import ColumnError, DatasetCorrupt, DatasetMissing, InvalidOption
from trainers.records.frames import frames
from trainers.records.manifest import Manifest, Shard
from trainers.records.spans import spans, window


def month(tmp_path, number, rows=200, **columns):
    index = np.arange(rows) + number * 1000
    table = {
        "id": index,
        "x": pa.array([None if number == 2 and i % 50 == 0 else i / 3 for i in index], pa.float64()),
        "color": [("red", "green", f"only in {number}")[i % 3] for i in index],
        "y": index % 4,
        **columns,
    }
    path = tmp_path / f"2013-{number:02d}.parquet"
    pq.write_table(pa.table(table), path)
    return path


def spec_of(tmp_path, number, **more):
    source = more.pop("source", None) or month(tmp_path, number)
    return {
        "source": str(source),
        "output": str(tmp_path / "records"),
        "name": "m",
        "label": "y",
        "key": "id",
        "span": f"2013-{number:02d}",
        **more,
    }


def rows_of(manifest, split):
    """Serialised records of a split, sorted."""
    folder = manifest.folder
    return sorted(bytes(record) for s in manifest.split(split) for record in frames(folder / s.file))


def test_a_window_rolls_over_spans_and_copies_nothing(tmp_path):
    results = [main(spec_of(tmp_path, number, window=3)) for number in range(1, 5)]
    assert [result["spans"] for result in results] == [
        ["2013-01"],
        ["2013-01", "2013-02"],
        ["2013-01", "2013-02", "2013-03"],
        ["2013-02", "2013-03", "2013-04"],
    ]
    last = Manifest.load(results[3]["manifest"])
    alone = [Manifest.load(result["newest"]["manifest"]) for result in results]
    assert (
        last.counts
        == {split: sum(m.counts[split] for m in alone[1:]) for split in ("train", "eval")}
        == results[3]["counts"]
    )
    last.verify()
    assert [path.name for path in sorted(last.folder.iterdir())] == [
        "manifest.json",
        "report.html",
        "schema.json",
        "statistics.json",
    ]
    for split in ("train", "eval"):
        assert rows_of(last, split) == sorted(row for m in alone[1:] for row in rows_of(m, split))
    assert [(s.span, s.digest) for s in last.spans] == [(m.span, m.digest) for m in alone[1:]]
    assert [span.span for span in spans(tmp_path / "records")] == [f"2013-{n:02d}" for n in range(1, 5)]


def test_a_window_of_named_spans_does_not_depend_on_what_else_is_there(tmp_path):
    rolled = [main(spec_of(tmp_path, number, window=2)) for number in (1, 3, 2)][-1]
    spec = {"step": "window", "output": str(tmp_path / "records"), "spans": ["2013-02", "2013-01"]}
    named = main(spec)
    assert named["spans"] == ["2013-01", "2013-02"] == rolled["spans"]
    assert (named["manifest"], named["digest"]) == (rolled["manifest"], rolled["digest"])
    for wrong in ([], ["2013-01", "2013-01"]):
        with pytest.raises(ConfigError):
            main({**spec, "spans": wrong})


def test_a_windows_statistics_are_those_of_its_rows(tmp_path):
    files = [month(tmp_path, number) for number in (1, 2, 3)]
    results = [main(spec_of(tmp_path, n, source=f, window=3)) for n, f in enumerate(files, 1)]
    (tmp_path / "all").mkdir()
    for file in files:
        shutil.copy(file, tmp_path / "all")
    together = prepare(tmp_path / "all", tmp_path / "together", name="m", label="y", key="id", progress=print)
    found = Manifest.load(results[-1]["manifest"])
    assert found.schema().to_dict() == together.schema().to_dict()
    for split in ("train", "eval"):
        for name, expected in together.statistics[split].items():
            got = found.statistics[split][name]
            assert set(got) == set(expected), name
            for key, value in expected.items():
                if isinstance(value, float):
                    assert math.isclose(got[key], value, rel_tol=1e-9), (name, key)
                elif isinstance(value, int):
                    assert got[key] == value, (name, key)


def test_again_is_nothing_to_do_and_new_data_of_a_span_makes_a_new_window(tmp_path):
    for number in (1, 2):
        first = main(spec_of(tmp_path, number, window=3, held_out="newest"))
    again = main(spec_of(tmp_path, 2, window=3, held_out="newest"))
    assert again == {**first, "reused": True, "newest": {**first["newest"], "reused": True}}
    folders = sorted(path.name for path in (tmp_path / "records").iterdir())

    main(spec_of(tmp_path, 1, source=month(tmp_path, 1, rows=300), window=3))
    corrected = main(spec_of(tmp_path, 2, window=3, held_out="newest"))
    assert corrected["digest"] != first["digest"]
    assert corrected["newest"]["digest"] == first["newest"]["digest"]
    assert corrected["counts"]["train"] > first["counts"]["train"]
    Manifest.load(first["manifest"]).verify()  # what was trained on stays as it was
    assert set(folders) < {path.name for path in (tmp_path / "records").iterdir()}


def test_evaluation_on_the_newest_span_trains_on_what_older_ones_held_out(tmp_path):
    for number in (1, 2):
        result = main(spec_of(tmp_path, number, window=2, held_out="newest"))
    found = Manifest.load(result["manifest"])
    first, second = (Manifest.load(tmp_path / "records" / span.folder) for span in found.spans)
    assert rows_of(found, "eval") == rows_of(second, "eval")
    assert rows_of(found, "train") == sorted(
        rows_of(second, "train") + rows_of(first, "train") + rows_of(first, "eval")
    )
    assert found.statistics["train"]["id"]["count"] == found.counts["train"]


def test_training_reads_a_window_like_any_dataset(tmp_path):
    from trainers.records.read import RecordsDataset

    for number in (1, 2, 3):
        result = main(spec_of(tmp_path, number, window=3))
    records = RecordsDataset.open(result["manifest"])
    seen = np.concatenate([b["id"].numpy() for b in records.dataset("train", 64, shuffle=True, seed=1)])
    assert len(set(seen.tolist())) == len(seen) == records.count("train")
    assert {value // 1000 for value in seen.tolist()} == {1, 2, 3}
    shares = [
        {v for b in records.dataset("train", 64, shard=(i, 5)) for v in b["id"].numpy().tolist()}
        for i in range(5)
    ]
    assert set.union(*shares) == set(seen.tolist())
    assert sum(map(len, shares)) == len(seen)


def test_spans_that_do_not_go_together_are_refused(tmp_path):
    main(spec_of(tmp_path, 1))
    source = month(tmp_path, 2, extra=np.arange(200))
    with pytest.raises(ColumnError, match="'extra' is in span 2013-02, not in 2013-01"):
        main(spec_of(tmp_path, 2, source=source, window=2))
    source = month(tmp_path, 3, color=np.arange(200))
    with pytest.raises(ColumnError, match="'color'"):
        main(spec_of(tmp_path, 3, source=source, window=3))
    assert not [m for m in (tmp_path / "records").glob("*/manifest.json") if Manifest.load(m).spans]


def test_a_span_that_is_gone_or_changed_is_said(tmp_path):
    main(spec_of(tmp_path, 1))
    result = main(spec_of(tmp_path, 2, window=2))
    folder = Path(result["newest"]["manifest"]).parent
    shutil.rmtree(folder)
    with pytest.raises(DatasetCorrupt, match="its manifest names it"):
        Manifest.load(result["manifest"]).verify()
    with pytest.raises(DatasetMissing):
        window(tmp_path / "records", ["2013-01", "2013-02"], held_out="all", progress=print)
    with pytest.raises(DatasetMissing, match="no span 2013-09"):
        window(tmp_path / "records", ["2013-09"], held_out="all", progress=print)
    (tmp_path / "records" / "spans" / "2013-01.json").write_text("{}")
    with pytest.raises(DatasetCorrupt, match="names no span"):
        spans(tmp_path / "records")


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"span": "../x"}, InvalidOption, "span must be"),
        ({"span": "", "window": 2}, ConfigError, "window needs a span"),
        ({"held_out": "newest"}, ConfigError, "held_out needs a window"),
        ({"window": 0}, InvalidOption, "window must be"),
        ({"window": 2, "held_out": "some"}, InvalidOption, "held_out must be"),
    ],
)
def test_options_that_can_not_be(tmp_path, more, error, words):
    with pytest.raises(error, match=words):
        main(spec_of(tmp_path, 1, **more))


@pytest.mark.parametrize(
    "file", ["", ".", "..", "a/b", "../a", "../../a/b", "../.a/b", "../a/../b", "/a", "../a/.b", "..\\a"]
)
def test_a_shard_is_in_its_folder_or_one_beside_it(file):
    with pytest.raises(ValueError, match="file must be"):
        Shard("train", file, 1, 1, "0")
    assert Shard("train", "../3a627be8d7c9066a/train-00000-of-00001.tfrecord", 1, 1, "0")


def test_slices_of_a_span_end_in_the_same_window(tmp_path):
    main(spec_of(tmp_path, 1))
    whole = main(spec_of(tmp_path, 2, window=2))
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "records" / "spans", tmp_path / "b" / "records" / "spans")
    (tmp_path / "b" / "records" / "spans" / "2013-02.json").unlink()
    folder = json.loads((tmp_path / "records" / "spans" / "2013-01.json").read_text())["folder"]
    shutil.copytree(tmp_path / "records" / folder, tmp_path / "b" / "records" / folder)
    spec = spec_of(tmp_path, 2, output=str(tmp_path / "b" / "records"))
    plan = main({"step": "plan", "slices": 2, **spec})
    for index in range(plan["slices"]):
        main({"step": "encode", "plan": plan["plan"], "slice": index})
    sliced = main({"step": "publish", "plan": plan["plan"], "window": 2})
    assert sliced["digest"] == whole["digest"]
    assert sliced["spans"] == whole["spans"]


def test_a_manifest_of_before_spans_still_loads(tmp_path):
    manifest = Manifest.load(main(spec_of(tmp_path, 1))["manifest"])
    old = {key: value for key, value in manifest.to_dict().items() if key not in ("span", "spans")}
    loaded = Manifest.from_dict(old)
    assert (loaded.span, loaded.spans) == ("", ())
    assert dataclasses.replace(manifest, span="") == loaded

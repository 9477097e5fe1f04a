"""The pod step, and the errors' family."""

import pytest

from trainers.records.__main__ import main
from trainers.records.errors import (
    DatasetCorrupt,
    InvalidOption,
    RecordsError,
    SourceChanged,
    SourceEmpty,
    SourceMissing,
    TooManyBadRows,
)
from trainers.records.manifest import Manifest


def test_the_step(pictures, tmp_path, capsys):
    spec = {"source": str(pictures(20)), "output": f"file://{tmp_path}/out", "name": "d", "label": "y"}
    result = main(spec)
    manifest = Manifest.load(result["manifest"])
    assert result == {
        "manifest": str(manifest.path),
        "digest": manifest.digest,
        "counts": dict(manifest.counts),
        "reused": False,
        "quarantined": 0,
    }
    assert main(spec)["reused"] is True
    assert "published" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"source": None}, "the spec lacks source"),
        ({"shard": 2}, "unknown keys shard; it takes source, output"),
        ({"shards": "2"}, "shards must be a whole number"),
        ({"schema": "/nowhere/schema.json"}, "no schema at /nowhere/schema.json"),
    ],
)
def test_a_wrong_spec(changes, problem, tmp_path):
    spec = {"source": "raw", "output": str(tmp_path), "name": "d", "label": "y", **changes}
    from trainers.job.errors import TrainyardError

    with pytest.raises(TrainyardError, match=problem):
        main(spec)


def test_errors_are_one_family():
    for error in (SourceEmpty, SourceMissing, SourceChanged, TooManyBadRows, DatasetCorrupt):
        assert issubclass(error, RecordsError)
        assert error.code.startswith("records.")
    assert issubclass(InvalidOption, ValueError)

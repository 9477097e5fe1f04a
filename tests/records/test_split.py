import numpy as np
import pyarrow as pa
import pytest

from trainers.records.errors import ColumnError
from trainers.records.split import hash_keys, hash_rows, hash_text, is_eval, shard_of

MASK = (1 << 64) - 1


def mix(x):
    """The step as the docstring writes it, in plain integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_bytes(data):
    h = mix(len(data))
    for at in range(0, len(data), 8):
        h = mix(h ^ int.from_bytes(data[at : at + 8], "little"))
    return h


# Never to be changed: rows would move between train and eval.
FOR_EVER = {
    "": 0xE220A8397B1DCDAF,
    "a": 0x5E025F9ADE9EAF3E,
    "abcdefgh": 0x804D4BCF99E046D6,
    "abcdefghi": 0xCBE0B0512E86AB3B,
    "0/0001.png": 0xC35185E87E8DB81E,
    "x" * 1000: 0x648CA5106502C766,
}


def test_hashes_of_text_are_what_they_always_were():
    assert hash_text(list(FOR_EVER)).tolist() == list(FOR_EVER.values())


def test_hashes_follow_the_written_definition():
    texts = ["", "é", "x" * 7, "x" * 8, "x" * 9, "漢字" * 50]
    assert hash_text(texts).tolist() == [hash_bytes(t.encode()) for t in texts]
    ints = pa.array([0, -1, 2**63 - 1, None])
    want = [mix(mix(1) ^ (v & MASK)) for v in (0, -1, 2**63 - 1)] + [0]
    assert hash_keys("k", ints).tolist() == want


def test_a_key_hashes_the_same_whatever_its_width():
    for kind in (pa.int8(), pa.int32(), pa.uint16(), pa.int64()):
        assert (
            hash_keys("k", pa.array([1, 100], kind)).tolist() == hash_keys("k", pa.array([1, 100])).tolist()
        )
    text = ["a", None, "bcd"]
    for kind in (pa.string(), pa.large_string()):
        array = pa.array(["skipped", *text], kind)
        assert hash_keys("k", array.slice(1)).tolist() == hash_keys("k", pa.array(text)).tolist()
    assert hash_keys("k", pa.array([], pa.string())).tolist() == []


@pytest.mark.parametrize("kind", [pa.float32(), pa.list_(pa.int64())], ids=str)
def test_types_that_make_no_key(kind):
    with pytest.raises(ColumnError, match="column 'k' has type"):
        hash_keys("k", pa.nulls(1, kind))


def test_shares_are_what_was_asked_for():
    hashes = hash_text([f"row {i}" for i in range(50_000)])
    assert is_eval(hashes, 0.2).mean() == pytest.approx(0.2, abs=0.01)
    assert not is_eval(hashes, 0.0).any()
    assert is_eval(hashes, 1.0).all()
    for split in (is_eval(hashes, 0.2), ~is_eval(hashes, 0.2)):
        counts = np.bincount(shard_of(hashes[split], 4)) / split.sum()
        assert counts == pytest.approx([0.25] * 4, abs=0.02)


def test_a_greater_fraction_only_moves_rows_to_eval():
    hashes = hash_text([str(i) for i in range(1000)])
    assert (is_eval(hashes, 0.3) >= is_eval(hashes, 0.2)).all()


def test_whole_rows():
    def batch(**changes):
        columns = {
            "a": pa.array([1, 1, 2, None]),
            "f": pa.array([0.0, -0.0, float("nan"), 1.0], pa.float32()),
            "s": pa.array(["x", "x", None, "y"]),
            "l": pa.array([[1, 2], [1, 2], [], None], pa.large_list(pa.int64())),
        }
        return pa.RecordBatch.from_pydict({**columns, **changes})

    hashes = hash_rows(batch()).tolist()
    assert hashes[0] == hashes[1]  # the same row, and -0.0 is 0.0
    assert len(set(hashes)) == 3
    reordered = batch().select(["s", "l", "f", "a"])
    assert hash_rows(reordered).tolist() == hashes
    other = hash_rows(batch(l=pa.array([[1], [1, 2, 0], [0], []], pa.large_list(pa.int64())))).tolist()
    assert not set(other) & set(hashes)
    assert hash_rows(batch().slice(2)).tolist() == hashes[2:]

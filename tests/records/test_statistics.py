"""Statistics against plain numpy and TFDV, and that they add up in any cut and order."""

import itertools
import json
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.records import tfdv_oracle
from trainers.records.schema import Feature, Schema
from trainers.records.sketch import MAX_BUCKETS, DistinctSketch, NumberSketch
from trainers.records.statistics import Statistics, domain_of
from trainers.records.values import HEAVY

SCHEMA = Schema(
    [
        Feature("x", "float32", presence="optional"),
        Feature("n", "int64", presence="optional"),
        Feature("s", "string", presence="optional"),
        Feature("l", "int64", shape=(None,)),
    ]
)


def batch(x, n, s, lists):
    columns = [
        pa.array(x, pa.float32()),
        pa.array(n, pa.int64()),
        pa.array(s, pa.string()),
        pa.array(lists, pa.large_list(pa.int64())),
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(SCHEMA.names))


def gathered(*batches, schema=SCHEMA):
    found = Statistics(schema)
    for data in batches:
        found.add(data)
    return found


def without_rounding(state):
    """A state but for mean and std, whose rounding within a batch depends on the batch."""
    return {name: {k: v for k, v in f.items() if k != "moments"} for name, f in state.items()}


floats = st.one_of(st.none(), st.floats(width=32), st.sampled_from([0.0, -0.0, 1.5, 1e30, -1e-40]))
ints = st.one_of(st.none(), st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1), st.integers(2013, 2026))
rows = st.lists(
    st.tuples(
        floats, ints, st.one_of(st.none(), st.text(max_size=3)), st.lists(st.integers(0, 9), max_size=3)
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@example([(0.0, None, None, []), (-0.0, None, None, [])], [1], random.Random(1))
@example([(-0.0, None, None, []), (0.0, None, None, [])], [1], random.Random(1))
@given(rows, st.lists(st.integers(0, 60), max_size=4), st.randoms(use_true_random=False))
def test_any_cut_in_any_order_is_the_whole(data, cuts, shuffle):
    whole = batch(*zip(*data, strict=True))
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [whole.slice(a, b - a) for a, b in itertools.pairwise(edges)]
    shuffle.shuffle(parts)
    states = [json.loads(json.dumps(gathered(part).state())) for part in parts]
    merged = Statistics(SCHEMA)
    for state in states:
        merged.merge(state)
    want = gathered(whole)
    assert without_rounding(merged.state()) == without_rounding(want.state())
    # However they were grouped, parts give the same to the last bit.
    shuffle.shuffle(states)
    left, right = Statistics(SCHEMA), Statistics(SCHEMA)
    for i, state in enumerate(states):
        (left if i % 2 else right).merge(state)
    right.merge(left.state())
    assert json.dumps(right.state(), sort_keys=True) == json.dumps(merged.state(), sort_keys=True)
    for name in ("x", "n"):
        mine, theirs = merged.features[name].moments, want.features[name].moments
        assert mine.n == theirs.n
        if mine.n:
            scale = max(
                abs(v) for v in (merged.features[name].ranges["min"], merged.features[name].ranges["max"])
            )
            assert abs(mine.mean - theirs.mean) <= 1e-12 * scale
            assert abs(mine.std - theirs.std) <= 1e-7 * scale


DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "few values": lambda rng, n: rng.integers(0, 7, n) / 4,
    "heavy tail": lambda rng, n: np.exp(5 * rng.standard_normal(n)),
    "years with an outlier": lambda rng, n: np.append(rng.integers(1990, 2026, n - 1), 2.0**60),
    "times": lambda rng, n: 1.7e15 + rng.integers(0, 30 * 86_400_000_000, n),
    "small spread on a large number": lambda rng, n: 1e6 + rng.standard_normal(n),
    "both signs of all sizes": lambda rng, n: rng.choice([-1, 1], n) * 10.0 ** rng.integers(-30, 30, n),
}


@pytest.mark.parametrize("kind", ["float32", "int64"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_numbers_against_numpy(name, kind):
    rng = np.random.default_rng(3)
    values = DISTRIBUTIONS[name](rng, 100_000)
    values = (
        values.astype(np.float32)
        if kind == "float32"
        else np.clip(values, -(2.0**62), 2.0**62).astype(np.int64)
    )
    schema = Schema([Feature("v", kind)])
    found = Statistics(schema)
    cuts = [0, 11, 40_000, 40_001, 90_000, len(values)]
    for a, b in itertools.pairwise(cuts):
        part = Statistics(schema)
        part.add(pa.RecordBatch.from_pydict({"v": pa.array(values[a:b])}))
        found.merge(part.state())
    feature = found.features["v"]
    wide = values.astype(np.float64)
    assert feature.moments.mean == pytest.approx(wide.mean(), rel=1e-9, abs=1e-12 * np.abs(wide).max())
    assert feature.moments.std == pytest.approx(wide.std(), rel=1e-7)
    assert feature.summary()["zeros"] == (values == 0).sum()
    distinct = len(np.unique(values))
    if distinct <= 1000:
        assert feature.distinct_values() == distinct
    else:
        assert feature.distinct_values() == pytest.approx(distinct, rel=0.13)  # four standard errors
    low, high, counts = feature.numbers.buckets()
    assert len(low) <= MAX_BUCKETS
    assert counts.sum() == len(values)
    ordered = np.sort(wide)
    for share in (0, 0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999, 1):
        exact = float(np.quantile(ordered, share, method="inverted_cdf"))
        a, b = feature.numbers.quantile_bounds(share)
        assert a <= exact <= b, share
    # Every bucket's count is exact: so many values lie between its bounds.
    inside = np.searchsorted(ordered, high, "right") - np.searchsorted(ordered, low, "left")
    assert inside.tolist() == counts.tolist()
    # Where the data is, buckets are narrow: the middle half of the data by rank in at least 100 of them.
    if distinct > 1000 and name != "both signs of all sizes":
        middle = (low >= np.quantile(wide, 0.05)) & (high <= np.quantile(wide, 0.95))
        assert middle.sum() >= 100
    histogram = feature.summary()["histogram"]
    assert sum(histogram["counts"]) == len(values)
    if feature.numbers.exact:
        edges = [-np.inf, *histogram["edges"][1:-1], np.inf]
        assert histogram["counts"] == np.histogram(wide, edges)[0].tolist()


def test_a_sketch_ends_the_same_whatever_came_first():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.integers(0, 50, 40_000), rng.integers(-(2**62), 2**62, 5_000)])
    states = set()
    for seed in range(4):
        random.Random(seed).shuffle(order := list(range(0, len(values), 1_000)))
        sketch = NumberSketch(64)
        for first in order:
            sketch.add(values[first : first + 1_000])
        states.add(json.dumps(sketch.state()))
    assert len(states) == 1


def test_text_up_to_and_beyond_what_is_counted():
    schema = Schema([Feature("s", "string")])

    def text(first, last):
        return pa.RecordBatch.from_pydict({"s": pa.array([f"user-{i}" for i in range(first, last)])})

    few = gathered(text(0, 10_000), text(0, 10), schema=schema)
    assert few.features["s"].distinct_values() == 10_000
    assert few.summary()["s"]["top"][0] == ["user-0", 2]
    whole = gathered(text(0, 30_000), schema=schema)
    parts = [gathered(text(a, a + 6_000), schema=schema).state() for a in (0, 6_000, 12_000, 18_000, 24_000)]
    for order in (parts, parts[::-1]):
        merged = Statistics(schema)
        for state in order:
            merged.merge(state)
        assert merged.state() == whole.state()
    assert "top" not in whole.summary()["s"]  # none is frequent
    assert whole.features["s"].distinct_values() == pytest.approx(30_000, rel=0.13)
    assert whole.summary()["s"]["mean_length"] == pytest.approx(
        np.mean([len(f"user-{i}") for i in range(30_000)])
    )


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_frequent_texts_among_very_many_are_known_within_the_stated_error(cut):
    rng = np.random.default_rng(cut)
    values = np.concatenate([rng.zipf(1.3, 150_000) % 10**6, rng.integers(10**6, 2 * 10**6, 50_000)])
    rng.shuffle(values)
    schema = Schema([Feature("s", "string")])
    states = []
    for part in np.array_split(values, cut):
        found = Statistics(schema)
        for some in np.array_split(part, 5):
            found.add(pa.RecordBatch.from_pydict({"s": pa.array([f"v{v}" for v in some])}))
        states.append(json.loads(json.dumps(found.state())))
    merged = Statistics(schema)
    for i in rng.permutation(cut):
        merged.merge(states[i])
    feature = merged.features["s"]
    counts, error = feature.frequent()
    true = dict(zip(*np.unique(values, return_counts=True), strict=True))
    assert 0 < error <= len(values) / (HEAVY + 1)
    assert len(counts) <= HEAVY
    for value, count in counts.items():
        assert count <= true[int(value[1:])] <= count + error
    assert all(f"v{value}" in counts for value, count in true.items() if count > error)
    summary = merged.summary()["s"]
    assert summary["top_error"] == error
    assert [value for value, _ in summary["top"][:5]] == [f"v{v}" for v in (1, 2, 3, 4, 5)]
    assert feature.counts() == {}
    assert summary["distinct"] == pytest.approx(len(true), rel=0.13)


def test_statistics_of_an_older_version_are_read():
    schema = Schema([Feature("s", "string"), Feature("n", "int64")])
    data = {"s": pa.array(["a", "b", "a"]), "n": pa.array([1, 2, 2])}
    state = gathered(pa.RecordBatch.from_pydict(data), schema=schema).state()
    state["s"]["values"] = [["a", "b"], [2, 1]]
    state["n"]["distinct"] = [3, 5]  # the hashes of all values; a list, as it was once
    older = Statistics.from_state(schema, state)
    assert older.features["s"].counts() == {"a": 2, "b": 1}
    assert older.features["n"].distinct_values() == 2
    state["s"]["values"] = None  # too many
    older = Statistics.from_state(schema, state)
    assert (older.features["s"].counts(), older.features["s"].frequent()) == ({}, ({}, 3))


def test_great_integers_are_told_apart_as_long_as_a_float_can():
    schema = Schema([Feature("n", "int64")])
    for first in (0, 2**53 - 50, 2**62):
        values = np.arange(first, first + 100)
        parts = [values[:30], values[30:], np.arange(10)]
        found = gathered(*(pa.RecordBatch.from_pydict({"n": p}) for p in parts), schema=schema)
        merged = Statistics(schema)
        for part in parts[::-1]:
            merged.merge(gathered(pa.RecordBatch.from_pydict({"n": part}), schema=schema).state())
        assert without_rounding(found.state()) == without_rounding(merged.state())
        assert found.features["n"].distinct_values() == len(np.unique(np.concatenate(parts)))


def test_distinct_values_are_estimated_within_the_stated_error():
    errors = []
    for seed in range(20):
        sketch = DistinctSketch()
        values = np.random.default_rng(seed).integers(0, 2**60, 50_000)
        for part in np.array_split(np.concatenate([values, values]), 7):
            sketch.add_numbers(part)
        errors.append(sketch.estimate() / len(np.unique(values)) - 1)
    assert np.std(errors) < 2 * 0.031
    assert abs(np.mean(errors)) < 3 * 0.031 / np.sqrt(20)


def test_without_detail_rows_are_counted_only():
    found = Statistics(SCHEMA, detail=False)
    found.add(batch([1.0, None], [1, 2], ["a", "b"], [[1], []]))
    again = Statistics.from_state(SCHEMA, found.state())
    assert again.summary()["x"] == {"count": 2, "missing": 1}
    assert domain_of([again.features["s"]]) is None


@pytest.fixture(scope="module")
def oracle():
    return json.loads(tfdv_oracle.ORACLE.read_text())


def of_oracle(shifted=False):
    kinds = {"count": ("int64", pa.int64()), "color": ("string", pa.string())}
    data = tfdv_oracle.columns(shifted)
    features = [Feature(name, kinds.get(name, ("float32",))[0], presence="optional") for name in data]
    arrays = [pa.array(v, kinds.get(name, (0, pa.float32()))[1]) for name, v in data.items()]
    found = Statistics(Schema(features))
    found.add(pa.RecordBatch.from_arrays(arrays, names=list(data)))
    return found


def test_the_same_as_tensorflow_data_validation(oracle):
    found = of_oracle()
    assert set(found.features) == set(oracle["statistics"])
    for name, theirs in oracle["statistics"].items():
        mine = found.summary()[name]
        assert mine["count"] - mine["missing"] == theirs["present"]
        assert mine["missing"] == theirs["missing"]
        if "top" in theirs:
            assert mine["top"] == theirs["top"]
            assert (mine["distinct"], mine["mean_length"]) == (
                theirs["distinct"],
                pytest.approx(theirs["mean_length"]),
            )
            continue
        assert (mine["min"], mine["max"], mine["zeros"]) == (theirs["min"], theirs["max"], theirs["zeros"])
        assert mine["mean"] == pytest.approx(theirs["mean"], rel=1e-6)
        assert mine["std"] == pytest.approx(theirs["std"], rel=1e-6)
        # TFDV's quantiles are a sketch's too: it promises ranks within 1 %.
        values = np.array([v for v in tfdv_oracle.columns()[name] if v is not None])
        for share, quantile in zip(np.linspace(0, 1, 11), theirs["deciles"], strict=True):
            low, high = found.features[name].numbers.quantile_bounds(float(share))
            near = np.quantile(values, [max(0, share - 0.01), min(1, share + 0.01)])
            assert near[0] * (1 - 1e-6) <= high
            assert low <= near[1] * (1 + 1e-6) or low <= near[1]
            assert near[0] - abs(near[0]) * 1e-6 <= quantile <= near[1] + abs(near[1]) * 1e-6

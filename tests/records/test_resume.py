"""Reading goes on exactly where it stopped."""

import pytest
import tensorflow as tf

from trainers.records.errors import InvalidOption
from trainers.records.read import Dataset


@pytest.fixture
def dataset(pictures, run):
    return Dataset.open(run(pictures(60), shards=3, compression="GZIP").path)


def batches(data, count):
    return [tuple(batch["key"].numpy().tolist()) for batch in data.take(count)]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "seed": 3, "repeat": True},
        {"shuffle": True, "seed": 3, "repeat": True, "shard": (1, 5), "drop_remainder": True},
        {"repeat": True, "shard": (1, 2)},
    ],
)
def test_the_tail_is_the_same(dataset, options, cache):
    size = 4
    share = options.get("shard", (0, 1))
    epoch = dataset.batches("train", size, shard=share, drop_remainder=options.get("drop_remainder", False))
    count = 3 * epoch if options.get("repeat") else epoch
    whole = batches(dataset.dataset("train", size, cache=cache, **options), count)
    assert len(whole) == count
    for start in (1, epoch, count - 1):
        tail = dataset.dataset("train", size, cache=cache, start=start, **options)
        assert batches(tail, count - start) == whole[start:]
    if options.get("shuffle") and options.get("repeat"):
        assert whole[:epoch] != whole[epoch : 2 * epoch]


def test_the_order_does_not_depend_on_the_programs_seed(dataset):
    orders = []
    for seed in (0, 1):
        tf.random.set_seed(seed)
        orders.append(batches(dataset.dataset("train", 4, shuffle=True, seed=5), 99))
    assert orders[0] == orders[1]


def test_positions_that_are_none(dataset):
    end = dataset.batches("train", 4)
    assert batches(dataset.dataset("train", 4, start=end), 1) == []
    assert int(dataset.dataset("train", 4, start=1).cardinality()) == end - 1
    for wrong in ({"start": end + 1}, {"start": -1}, {"start": 1.5}, {"start": 1, "shuffle": True}):
        with pytest.raises(InvalidOption):
            dataset.dataset("train", 4, **wrong)

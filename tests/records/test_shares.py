"""Which worker reads which records."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.records.errors import InvalidOption
from trainers.records.manifest import Shard
from trainers.records.shares import share_of


def shards_of(counts):
    return [Shard("train", f"train-{i}", records, records, "") for i, records in enumerate(counts)]


def read_by(share):
    """What a worker reads, as (file, record) pairs."""
    everything = [(shard.file, i) for shard in share.shards for i in range(shard.records)]
    return everything[share.first :: share.step]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 15))
def test_shares_leave_nothing_out_and_nothing_twice(counts, workers):
    shards = shards_of(counts)
    shares = [share_of(shards, (index, workers)) for index in range(workers)]
    parts = [read_by(share) for share in shares]
    assert [len(part) for part in parts] == [share.records for share in shares]
    read = list(itertools.chain(*parts))
    assert len(read) == len(set(read)) == sum(counts)
    assert set(read) == {(shard.file, i) for shard in shards for i in range(shard.records)}


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_no_such_share(shard):
    with pytest.raises(InvalidOption, match="0 <= index < workers"):
        share_of(shards_of([3]), shard)

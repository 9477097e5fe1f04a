# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""One unit of work: read its rows, write its shards, and leave a record that says so.

A unit has some shards of each split to itself. When all of them are in place, its record is written; a later
run that finds the record and the shards whole takes them as they are. So a run that was killed costs the units
that were not finished, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainers.job.files import read_json, sha256_of_file, write_bytes
from trainers.records.blocks import BlockWriter
from trainers.records.encode import Encoder
from trainers.records.manifest import Shard
from trainers.records.native import make_encoder
from trainers.records.options import Options
from trainers.records.rules import Rules, load_checks
from trainers.records.schema import Schema
from trainers.records.source import Source
from trainers.records.split import Dealer, hash_keys, hash_rows, shard_of
from trainers.records.statistics import Statistics
from trainers.records.validate import Quarantine, clean
from trainers.records.write import ShardWriter, shard_name, temp_path

__all__ = ["Unit", "UnitResult"]


@dataclasses.dataclass(frozen=True)
class UnitResult:
    """What a unit wrote: its shards, refused rows, and statistics a split as `Statistics.state` gives them."""

    shards: tuple[Shard, ...]
    bad: int
    statistics: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """Rows written."""
        return sum(shard.records for shard in self.shards)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        shards = [dataclasses.asdict(shard) for shard in self.shards]
        return {"shards": shards, "bad": self.bad, "statistics": self.statistics}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> UnitResult:
        """The result of JSON values."""
        return cls(tuple(Shard(**shard) for shard in data["shards"]), data["bad"], data["statistics"])


class Unit:
    """Unit `index` of `count`, in the folder of its dataset."""

    def __init__(self, index: int, count: int, folder: Path, options: Options) -> None:
        self.index = index
        self.count = count
        self.folder = folder
        self.options = options
        self.shards = range(index, options.shards, count)
        self.splits = options.rule.splits
        self.record = folder / f".unit-{index:05d}-of-{count:05d}.json"
        self.quarantine = folder / f".quarantine-{index:05d}-of-{count:05d}.parquet"

    def finished(self) -> UnitResult | None:
        """What an earlier run left of this unit, if it is whole."""
        try:
            data = read_json(self.record)
            if data is None:
                return None
            result = UnitResult.from_dict(data)
            whole = all(sha256_of_file(self.folder / shard.file) == shard.sha256 for shard in result.shards)
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            return None
        return result if whole and (self.quarantine.exists() or not result.bad) else None

    def run(
        self, source: Source, schema: Schema, required: Collection[str], progress: Callable[[int], None]
    ) -> UnitResult:
        """Read and write all rows of the unit; `progress` is called with the rows done, now and then.

        Raises SourceChanged when a file of the unit is no longer the one that was listed. Whatever is raised,
        no shard of the unit is left half written.
        """
        encoder = make_encoder()
        rule = self.options.rule
        rules = Rules(schema, load_checks(self.options.checks), rule)
        deal = Dealer(rule, schema)
        statistics = {split: Statistics(schema, detail=self.options.statistics) for split in self.splits}
        with contextlib.ExitStack() as stack:
            writers = []
            for split in self.splits:
                for shard in self.shards:
                    name = shard_name(split, shard, self.options.shards)
                    writer = ShardWriter(self.folder, split, name, self.options.compression)
                    stack.callback(writer.abort)
                    writers.append(writer)
            blocks = self._blocks(schema, writers, encoder)
            temp = temp_path(self.quarantine)
            stack.callback(temp.unlink, missing_ok=True)
            quarantine = Quarantine(temp)
            stack.callback(quarantine.close)
            written = 0
            for batch in source.read(self.index, self.count, schema, self.options.batch_rows):
                data, rejects = clean(batch, schema, required, rules)
                quarantine.add(rejects)
                written += data.num_rows + len(rejects)
                if data.num_rows:
                    self._write(data, encoder, writers, blocks, statistics, deal)
                progress(written)
            for file in source.unit_files(self.index, self.count):
                file.check_unchanged()
            quarantine.close()
            for block in blocks:
                block.finish()
            if quarantine.count:
                temp.replace(self.quarantine)
            shards = tuple(writer.commit() for writer in writers)
        result = UnitResult(shards, quarantine.count, {s: statistics[s].state() for s in self.splits})
        write_bytes(self.record, json.dumps(result.to_dict()).encode())
        return result

    def _blocks(self, schema: Schema, writers: list[ShardWriter], encoder: Encoder) -> list[BlockWriter]:
        if self.options.layout != "blocks":
            return []
        return [BlockWriter(schema, writer, encoder, self.options.block_rows) for writer in writers]

    def _write(
        self,
        data: pa.RecordBatch,
        encoder: Encoder,
        writers: list[ShardWriter],
        blocks: list[BlockWriter],
        statistics: Mapping[str, Statistics],
        deal: Dealer,
    ) -> None:
        """Sort rows by where they go, encode them all at once, and hand each writer its piece.

        Rows of blocks are handed over as they are: their writers encode them by the window.
        """
        key = self.options.key
        hashes = hash_rows(data) if key is None else hash_keys(key, data.column(key))
        to = shard_of(hashes, len(self.shards))
        if len(self.splits) > 1:
            to += len(self.shards) * deal(data, hashes)
        order = np.argsort(to, kind="stable")
        data = data.take(pa.array(order))
        bounds = np.searchsorted(to[order], np.arange(len(writers) + 1)).tolist()
        if blocks:
            for block, first, end in zip(blocks, bounds, bounds[1:], strict=False):
                block.add(data.slice(first, end - first))
        else:
            _write_rows(encoder, data, writers, bounds)
        for i, split in enumerate(self.splits):
            first, end = bounds[i * len(self.shards)], bounds[(i + 1) * len(self.shards)]
            if end > first:
                statistics[split].add(data.slice(first, end - first))


def _write_rows(
    encoder: Encoder, data: pa.RecordBatch, writers: Sequence[ShardWriter], bounds: Sequence[int]
) -> None:
    """Encode rows and hand writer i those from bounds[i] to bounds[i + 1], each piece as soon as it is there."""
    first = to = 0
    for piece in encoder.pieces(data):
        view, offsets = memoryview(piece.data), piece.offsets
        at = 0
        while at < len(piece):
            while bounds[to + 1] <= first + at:
                to += 1
            end = min(len(piece), bounds[to + 1] - first)
            writers[to].write(view[offsets[at] : offsets[end]], end - at)
            at = end
        first += len(piece)

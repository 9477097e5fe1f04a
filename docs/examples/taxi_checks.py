# ruff: noqa: TID253 - imported by data pods only, never by a DAG file
"""Checks of taxi rides that no rule about one column can say: each gives a bool, or a reason, a row."""

import pyarrow as pa
import pyarrow.compute as pc


def ends_after_it_starts(batch: pa.RecordBatch) -> pa.Array:
    """True for a good row; where a time is missing the answer is null, which counts as good."""
    return pc.greater(batch["ended"], batch["started"])


def plausible_fare(batch: pa.RecordBatch) -> pa.Array:
    """The reason why a row is refused, null for a good one."""
    dear = pc.greater(batch["fare"], pc.add(pc.multiply(batch["km"], 10.0), 20.0))
    return pc.if_else(pc.fill_null(dear, False), "costs far more than its way", pa.scalar(None, pa.string()))

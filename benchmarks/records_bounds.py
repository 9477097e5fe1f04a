"""What bounds the figures of benchmarks/records.py, in words: those of a run beside what was tried and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Found by runs of two ways by turns on one machine, CPU time a row, the least of 7 to 15 rounds.
TRIED = """\
What was tried for the encoder in C, by turns with what it was compared to (CPU time of that stage):

- Kept: writing records in pieces of 512 KB, which the CPU's own cache still holds, instead of a batch of 6 MB at once:
  encoding and writing 0.61 times as much (64 KB: 0.87, 128 KB: 0.72, 1 MB: 0.59). Asking for the columns' values two
  cache lines ahead: encoding 0.92 times. Short headers copied by whole words and varints without a loop: about three
  quarters, from two runs.
  Mapping the Parquet file to memory instead of reading it ahead: 0.95 times the whole road.
- Not kept, no gain: gathering the numbers of 16 rows before they are put in (1.1 times), a prefetch of one line ahead
  (1.0), `-march=native` (1.1). Dictionaries of text left as they are in the file: reading text 0.8 times, not built, as
  text is a third of reading. Writing to a mapped file costs 1.5 to 2.3 times as much as `write`; preallocating the file
  saves up to a quarter of writing, and O_DIRECT up to half of its CPU time at three times the clock's: neither is used.
- numpy: keeping the template matrices and copying values without an index: encoding 0.9 times. Its checksums, one call
  a record, cost a fifth of encoding; neither `map` nor a list made the calls cheaper.
- Blocks: a quarter of reading is TFRecordDataset, a third parsing, a quarter taking packed columns apart. No gain:
  transposing before `unstack` (1.1 times), `dynamic_partition` (1.2), a slice a feature (1.2), read buffers
  of 0 to 4 MB (1.0), taking columns apart before batches are cut (1.25).
""".splitlines()

Runs = Sequence[Mapping[str, Any]]


def bounds(
    found: Mapping[str, Any], median: Callable[[Runs, Callable[[Mapping[str, Any]], float]], float]
) -> list[str]:
    """Lines of Markdown; what wasn't measured in this run is left out."""

    def cost(road: str) -> float | None:
        """CPU microseconds a row of the table."""
        runs = found.get(road)
        if not isinstance(runs, list) or not runs:
            return None
        return median(runs, lambda run: run["cpu"] / run["rows"] * 1e6)

    lines = ["", "## What bounds it", ""]
    reading, peer = cost("Parquet: read only"), cost("Parquet: tfx-bsl")
    native, plain = cost("Parquet: encoder, native"), cost("Parquet: encoder, numpy")
    written = found.get("disk: write only")
    if reading and native and plain and isinstance(written, list) and written:
        size = found["Parquet: encoder, native"][0]
        each = size["bytes"] / size["rows"]
        writing = median(written, lambda run: run["cpu"] / run["bytes"]) * each * 1e6
        rest = native - reading
        lines.append(
            f"- Of the {native:.2f} CPU microseconds of the encoder in C, reading Parquet is {reading:.2f}; encoding "
            f"and writing {each:,.0f} bytes is {rest:.2f}. Written from one large buffer, the bytes alone cost "
            f"{writing:.2f} in this run: small pieces that are still in the CPU's cache cost less."
        )
        if peer:
            lines[-1] += (
                f" At ten times tfx-bsl's {peer:.2f} there would be {peer / 10 - reading:.2f} for encoding and writing."
            )
        lines.append(f"- The encoder in numpy takes {plain - reading:.2f} for encoding and writing.")
    rows, blocks = cost("read: rows, batch then parse"), cost("read: blocks")
    if rows and blocks:
        lines.append(
            f"- Rows in batches are read at {rows:.2f} CPU microseconds each, most of it `parse_example`; blocks at "
            f"{blocks:.2f}."
        )
    if "JPEG: prepare, encoded" in found:
        lines.append(
            "- JPEG files are decoded, checked and hashed by `prepare`; the peer copies their bytes unseen."
        )
    return [*lines, "", *TRIED]

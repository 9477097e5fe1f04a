"""What a campaign found, as a page of Markdown."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.chaos.blows import Blow
    from tests.faults.chaos.campaign import Campaign

__all__ = ["replace_between_marks", "report"]


def report(campaign: Campaign, *, command: Sequence[str]) -> str:
    """The tables: blows by kind, then jobs."""
    kinds: dict[tuple[str, str], list[Blow]] = {}
    for blow in campaign.blows:
        kinds.setdefault((blow.strategy, str(blow.kind)), []).append(blow)
    lines = [
        f"`{shlex.join(command)}` on {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}.",
        "",
        "| strategy | blow | kills | recoveries | stall median | stall max |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (strategy, kind), blows in sorted(kinds.items()):
        stalls = [blow.stall for blow in blows if blow.stall is not None]
        median, most = (f"{f(stalls):.1f} s" if stalls else "-" for f in (statistics.median, max))
        recovered = sum(blow.recovered for blow in blows)
        lines.append(f"| {strategy} | {kind} | {len(blows)} | {recovered} | {median} | {most} |")
    repeated = [steps for job in campaign.jobs for steps in job.repeated]
    lines += [
        "",
        "| jobs | arrived | lost | kills | recoveries | restarts of the chief | steps repeated, median | most "
        "| processes left over |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        f"| {len(campaign.jobs)} | {len(campaign.jobs) - campaign.lost} | {campaign.lost} "
        f"| {len(campaign.blows)} | {sum(blow.recovered for blow in campaign.blows)} | {len(repeated)} "
        f"| {statistics.median(repeated) if repeated else 0:g} | {max(repeated, default=0)} "
        f"| {campaign.left_over} |",
    ]
    for job in campaign.jobs:
        if not job.arrived:
            lines += ["", f"Lost: {job.name}", "", *(f"    {line}" for line in job.why.splitlines())]
    return "\n".join(lines)


def replace_between_marks(path: Path, name: str, text: str) -> None:
    """Put a text between `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page; the marks stay."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = path.read_text()
    head, found, rest = page.partition(begin)
    _, also_found, tail = rest.partition(end)
    if not found or not also_found:
        raise SystemExit(f"{path} must have the marks {begin} and {end}")
    path.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}")

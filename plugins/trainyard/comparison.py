"""An evaluation beside the champion's as Markdown, for the page on which somebody approves a release."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["comparison"]

_MOST_SLICES = 8
_MOST_METRICS = 12


def comparison(verdict: Mapping[str, Any], document: Mapping[str, Any], report_url: str = "") -> str:
    """The verdict, the metrics of candidate and champion with intervals, the worst slices, and the report's link."""
    lines = [f"**The gate says {_plain(verdict['outcome'])}**", ""]
    lines += [f"- {_plain(reason)}" for reason in verdict["reasons"]]
    metrics = document.get("metrics") or {}
    champion = document.get("champion") or {}
    if metrics:
        version = f" (version {champion['version']})" if "version" in champion else ""
        head = f"| metric | candidate | champion{_plain(version)} | difference |"
        lines += [
            "",
            f"#### On {document.get('examples', 0):,} held-out examples",
            "",
            head,
            "|---|---|---|---|",
        ]
        lines += [_metric_row(name, document, champion) for name in list(metrics)[:_MOST_METRICS]]
    if champion.get("error"):
        lines += ["", f"The champion can't be compared with: {_plain(champion['error'])}"]
    worst = _worst(verdict, document.get("slices") or ())
    if worst:
        metric = verdict["numbers"]["metric"]
        lines += [
            "",
            "#### Worst slices",
            "",
            f"| slice | examples | {_plain(metric)} | champion | difference |",
        ]
        lines += ["|---|---|---|---|---|", *(_slice_row(row, metric) for row in worst)]
    if report_url:
        lines += ["", f"[The whole report, with plots]({report_url})"]
    return "\n".join(lines) + "\n"


def _metric_row(name: str, document: Mapping[str, Any], champion: Mapping[str, Any]) -> str:
    ours = _value(name, document)
    return f"| {_plain(name)} | {ours} | {_value(name, champion)} | {_difference(name, champion)} |"


def _worst(verdict: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of the gate's metric that fell most behind the champion, or have the worst value without one."""
    numbers = verdict.get("numbers") or {}
    metric, sign = numbers.get("metric"), 1 if numbers.get("better") == "smaller" else -1
    known = [row for row in rows if row.get("enough_examples") and row["metrics"].get(metric) is not None]

    def badness(row: Mapping[str, Any]) -> float:
        other = ((row.get("champion") or {}).get("metrics") or {}).get(metric)
        return float(sign * (row["metrics"][metric] - (other or 0.0)))

    return sorted(known, key=badness, reverse=True)[:_MOST_SLICES]


def _slice_row(row: Mapping[str, Any], metric: str) -> str:
    champion = row.get("champion") or {}
    cells = (_plain(row["slice"]), f"{row['examples']:,}", _value(metric, row), _value(metric, champion))
    return f"| {' | '.join(cells)} | {_difference(metric, champion)} |"


def _value(name: str, model: Mapping[str, Any]) -> str:
    value = (model.get("metrics") or {}).get(name)
    if value is None:
        return "\N{EN DASH}"
    bounds = (model.get("intervals") or {}).get(name)
    return f"{value:.4g}" + (f" ({bounds['low']:.4g} to {bounds['high']:.4g})" if bounds else "")


def _difference(name: str, champion: Mapping[str, Any]) -> str:
    found = (champion.get("difference") or {}).get(name)
    if not found:
        return "\N{EN DASH}"
    return f"{found['value']:+.4g} ({found['low']:+.4g} to {found['high']:+.4g})"


def _plain(value: object) -> str:
    """Text that Markdown leaves as it is: names come from the data."""
    text = " ".join(str(value).split())[:300]
    return re.sub(r"([\\`*_{}\[\]()#+!|<>~&])", r"\\\1", text)

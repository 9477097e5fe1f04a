"""A dataset as one HTML page: its features with histograms side by side, drift, schema and refused rows.

The page needs nothing but itself: no script, no request, one style sheet that its own Content-Security-Policy
names by its hash. Everything that comes from the data is escaped and cut, and there is a bound on how much of it is
shown: `MOST_FEATURES` features, `MOST_VALUES` values of each.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainers.records.drift import FAIL, PASS, UNKNOWN, WARN, Drift, Measure
from trainers.records.report_style import STYLE
from trainers.records.schema import Feature, Schema
from trainers.records.statistics import FeatureStatistics, Statistics, top

__all__ = ["MOST_FEATURES", "MOST_VALUES", "Side", "render"]

MOST_FEATURES = 300
MOST_VALUES = 10
_BARS = 24
_TEXT = 60  # characters of a value
_WIDTH, _HEIGHT = 320, 96  # of a histogram, in its own units
_RANK = {FAIL: 0, WARN: 1, UNKNOWN: 2, PASS: 3}


class Side(NamedTuple):
    """Statistics that are drawn beside others, under a name."""

    name: str
    statistics: Statistics


def render(
    name: str,
    schema: Schema,
    counts: Mapping[str, int],
    sides: Sequence[Side],
    previous: Side | None,
    drift: Drift | None,
    quarantined: int,
    refused: Sequence[tuple[str, int, str]],
) -> str:
    """The page; `refused` are column, rows and an example of those in quarantine."""
    policy = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    all_sides = [*sides, *([previous] if previous else [])]
    for side in all_sides:
        side.statistics.settle()
    classes = [side.name if side.name in ("train", "eval", "test") else "before" for side in all_sides]
    order = sorted(schema, key=lambda f: _RANK[_verdict(drift, f.name)])
    cards = [_card(f, all_sides, classes, drift) for f in order[:MOST_FEATURES]]
    if len(order) > MOST_FEATURES:
        cards.append(
            f"<p class=note>{len(order) - MOST_FEATURES} more features are in the manifest only.</p>"
        )
    legend = "".join(
        f"<li><i class={cls}></i>{_text(side.name)}</li>"
        for side, cls in zip(all_sides, classes, strict=True)
    )
    return f"""<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'sha256-{policy}'">
<meta name=viewport content="width=device-width, initial-scale=1">
<meta name=color-scheme content="light dark">
<title>{_text(name)}</title>
<style>{STYLE}</style>
<header>
<h1>{_text(name)}</h1>
<ul class=facts>{_facts(schema, counts, quarantined, drift)}</ul>
</header>
<main>
{_drift(drift)}
{_refused(quarantined, refused)}
<section><h2>Features</h2><ul class=legend>{legend}</ul>
<div class=cards>
{"".join(cards)}
</div></section>
{_schema(schema)}
</main>
</html>
"""


def _facts(schema: Schema, counts: Mapping[str, int], quarantined: int, drift: Drift | None) -> str:
    facts = [(f"{count:,}", split) for split, count in counts.items()]
    facts += [(f"{len(schema):,}", "features"), (f"{quarantined:,}", "quarantined")]
    out = "".join(f"<li><b>{value}</b> {_text(what)}</li>" for value, what in facts)
    return out + (f"<li>{_badge(drift.verdict)} drift</li>" if drift else "")


def _badge(verdict: str) -> str:
    return f"<span class='badge {verdict}'>{verdict}</span>"


def _drift(drift: Drift | None) -> str:
    if drift is None:
        return ""
    told = [m for m in drift.measures if m.verdict != PASS]
    told.sort(key=lambda m: _RANK[m.verdict])
    rows = "".join(
        f"<tr><td>{_badge(m.verdict)}<td><code>{_text(m.feature)}</code><td>{m.measure}"
        f"<td class=n>{_number(m.value)}<td class=n>{_number(m.warn)}<td class=n>{_number(m.fail)}"
        f"<td>{_text(m.words, 200)}"
        for m in told[:MOST_FEATURES]
    )
    passed = sum(m.verdict == PASS for m in drift.measures)
    table = (
        "<div class=wide><table><thead><tr><th><th>feature<th>measure<th class=n>value<th class=n>warn"
        f"<th class=n>fail<th>in words<tbody>{rows}</table></div>"
        if rows
        else ""
    )
    return (
        f"<section><h2>Drift {_badge(drift.verdict)}</h2><p>{_text(drift.current)} ({drift.rows[1]:,} rows) against "
        f"{_text(drift.baseline)} ({drift.rows[0]:,} rows): {passed} of {len(drift.measures)} measures pass.</p>"
        f"{table}</section>"
    )


def _refused(quarantined: int, refused: Sequence[tuple[str, int, str]]) -> str:
    if not quarantined:
        return ""
    if not refused:
        return f"<section><h2>Quarantine</h2><p>{quarantined:,} rows of its spans were refused.</p></section>"
    rows = "".join(
        f"<tr><td><code>{_text(column)}</code><td class=n>{count:,}<td>{_text(example, 200)}"
        for column, count, example in refused
    )
    return (
        f"<section><h2>Quarantine</h2><p>{quarantined:,} rows were refused; all are in quarantine.parquet.</p>"
        f"<div class=wide><table><thead><tr><th>column<th class=n>rows<th>the first of them<tbody>{rows}"
        "</table></div></section>"
    )


def _schema(schema: Schema) -> str:
    rows = []
    for f in list(schema)[:MOST_FEATURES]:
        shape = " by ".join("any" if d is None else str(d) for d in f.shape) or "one"
        rules = ", ".join(f"{k} {v}" for k, v in (f.rules or {}).items())
        rows.append(
            f"<tr><td><code>{_text(f.name)}</code><td>{f.type}<td>{shape}<td>{f.encoding}<td>{f.presence}"
            f"<td>{_text(_domain(f), 120)}<td>{_text(rules, 120)}<td>{_text(f.source)}"
        )
    return (
        "<section><h2>Schema</h2><div class=wide><table><thead><tr><th>feature<th>type<th>values<th>encoding"
        f"<th>presence<th>domain<th>rules<th>raw type<tbody>{''.join(rows)}</table></div></section>"
    )


def _domain(feature: Feature) -> str:
    domain: Mapping[str, Any] = feature.domain or {}
    if "names" in domain:
        return ", ".join(map(str, domain["names"]))
    if "min" in domain:
        return f"{domain['min']:g} to {domain['max']:g}"
    return ", ".join(map(str, domain.get("values", ())))


def _verdict(drift: Drift | None, feature: str) -> str:
    found = [m.verdict for m in drift.of(feature)] if drift else []
    return min(found, key=lambda v: _RANK[v]) if found else PASS


def _card(feature: Feature, sides: Sequence[Side], classes: Sequence[str], drift: Drift | None) -> str:
    there = [
        (side.name, cls, side.statistics.features[feature.name])
        for side, cls in zip(sides, classes, strict=True)
        if feature.name in side.statistics.features and side.statistics.features[feature.name].count
    ]
    verdict = _verdict(drift, feature.name)
    marks = "".join(_mark(m) for m in (drift.of(feature.name) if drift else ()) if m.verdict in (WARN, FAIL))
    chart = _histogram(there) or _bars(there)
    columns = "".join(f"<th class=n>{_text(name, 24)}" for name, _, _ in there)
    lines = "".join(
        f"<tr><th>{what}" + "".join(f"<td class=n>{value}" for value in values)
        for what, values in _lines([found for _, _, found in there])
    )
    return (
        f"<article class='{verdict}'><h3><code>{_text(feature.name)}</code> <small>{feature.type}"
        f"{'' if not feature.shape else ' list'}</small>{marks}</h3>{chart}"
        f"<table><thead><tr><th>{columns}<tbody>{lines}</table></article>\n"
    )


def _mark(measure: Measure) -> str:
    title = _text(measure.words, 200)
    return f"<span class='badge {measure.verdict}' title='{title}'>{measure.measure.replace('_', ' ')}</span>"


def _lines(found: Sequence[FeatureStatistics]) -> list[tuple[str, list[str]]]:
    """The rows of a feature's table, those that any side has."""
    summaries = [f.summary() for f in found]
    lines = [("missing", [f"{s['missing'] / s['count']:.1%}" for s in summaries])]
    for key, what in (
        *(("mean", "mean"), ("std", "std"), ("min", "min"), ("max", "max"), ("distinct", "distinct")),
        *(("zeros", "zeros"), ("nan", "NaN"), ("infinite", "infinite")),
        *(("mean_values", "values a row"), ("mean_length", "mean bytes"), ("max_length", "most bytes")),
    ):
        if any(key in s for s in summaries):
            lines.append((what, [_number(s.get(key)) for s in summaries]))
    medians = [dict(map(tuple, s.get("quantiles", ()))).get(0.5) for s in summaries]
    if any(m is not None for m in medians):
        lines.insert(3, ("median", [_number(m) for m in medians]))
    return lines


def _histogram(there: Sequence[tuple[str, str, FeatureStatistics]]) -> str:
    """Bars of the sides' shares beside each other; what lies outside is in the first and the last."""
    numbers = [(name, cls, f) for name, cls, f in there if f.moments.n]
    if not numbers:
        return ""
    middles = [_middle(f) for _, _, f in numbers]
    low, high = min(low for low, _ in middles), max(high for _, high in middles)
    shares, edges = [], []
    for name, cls, f in numbers:
        found = f.histogram(_BARS, low, high)
        edges = found["edges"]
        shares.append((name, cls, [count / f.moments.n for count in found["counts"]]))
    most = max(max(values) for _, _, values in shares) or 1.0
    ends = (edges[0], edges[-1])
    if numbers[0][2].feature.type != "float32" and edges[1] - edges[0] == 1:
        ends = (int(edges[0] + 0.5), int(edges[-1] - 0.5))  # a bar a whole number
    slot = _WIDTH / (len(edges) - 1)
    bar = slot * 0.86 / len(shares)
    paths = []
    tall = (_HEIGHT - 4) / most
    for i, (_, cls, values) in enumerate(shares):
        left = i * bar + slot * 0.07
        steps = [
            f"M{k * slot + left:.1f} {_HEIGHT}v{-share * tall:.1f}h{bar:.1f}V{_HEIGHT}z"
            for k, share in enumerate(values)
            if share > 0
        ]
        paths.append(f"<path class={cls} d='{''.join(steps)}'/>")
    tips = [
        f"<rect x={k * slot:.1f} width={slot:.1f} height={_HEIGHT} class=tip><title>"
        f"{_number(edges[k])} to {_number(edges[k + 1])}"
        + "".join(f"&#10;{_text(name, 24)} {values[k]:.1%}" for name, _, values in shares)
        + "</title></rect>"
        for k in range(len(edges) - 1)
    ]
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT + 14}' role=img aria-label='histogram'>{''.join(paths)}{''.join(tips)}"
        f"<path class=axis d='M0 {_HEIGHT}H{_WIDTH}'/><text y={_HEIGHT + 12}>{_number(ends[0])}</text>"
        f"<text x={_WIDTH} y={_HEIGHT + 12} class=end>{_number(ends[1])}</text></svg>"
    )


def _middle(f: FeatureStatistics) -> tuple[float, float]:
    """The middle 99 %, or three interquartile ranges about the middle half: a long tail leaves it readable."""
    low, first, third, high = (f.quantile(share) for share in (0.005, 0.25, 0.75, 0.995))
    if third > first:
        low, high = max(low, first - 3 * (third - first)), min(high, third + 3 * (third - first))
    return low, high


def _bars(there: Sequence[tuple[str, str, FeatureStatistics]]) -> str:
    """The most frequent values of any side, and their shares."""
    counted = [(cls, f.counts()) for _, cls, f in there]
    counted = [(cls, counts) for cls, counts in counted if counts]
    if not counted:
        return "<p class=note>no values to draw</p>"
    totals = [sum(counts.values()) for _, counts in counted]
    weight: dict[str, float] = {}
    for (_, counts), total in zip(counted, totals, strict=True):
        for value, count in top(counts, MOST_VALUES):
            weight[value] = max(weight.get(value, 0.0), count / total)
    chosen = sorted(weight, key=lambda v: (-weight[v], v))[:MOST_VALUES]
    most = max(weight.values())
    lines, y = [], 0.0
    thick = 4 if len(counted) > 1 else 8
    for value in chosen:
        lines.append(f"<text y={y + 9:.0f} class=value>{_text(value, 26)}</text>")
        for i, ((cls, counts), total) in enumerate(zip(counted, totals, strict=True)):
            share = counts.get(value, 0) / total
            width = share / most * 120
            title = f"<title>{_text(value)}: {share:.1%}</title>"
            lines.append(
                f"<rect class={cls} x=150 y={y + 1 + i * thick} width={width:.1f} height={thick - 1}>{title}</rect>"
            )
        lines.append(f"<text x={_WIDTH} y={y + 9:.0f} class=end>{weight[value]:.1%}</text>")
        y += max(12, thick * len(counted) + 3)
    label = "<title>most frequent values</title>"
    return f"<svg viewBox='0 0 {_WIDTH} {math.ceil(y)}' role=img>{label}{''.join(lines)}</svg>"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**9 else f"{value:.4g}"


def _text(value: str, most: int = _TEXT) -> str:
    """Text of the data for HTML: cut, without control characters, escaped."""
    shown = value if len(value) <= most else value[: most - 1] + "…"
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return html.escape(shown, quote=True)

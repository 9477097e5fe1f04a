"""An evaluation as one HTML page with its plots, and the same plots as PNG files.

The page needs nothing but itself: no script, no request, one style sheet that its Content-Security-Policy names by
its hash. Names of slices and classes come from the data: they are escaped and cut.
"""

from __future__ import annotations

import base64
import hashlib
import html
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.evaluation.canvas import Canvas
from trainers.evaluation.plots import Plots, draw
from trainers.job.files import write_bytes
from trainers.records.report_style import STYLE

__all__ = ["FOLDER", "REPORT", "Plots", "artifacts", "render", "write_report"]

FOLDER, REPORT = "evaluation", "report.html"
"""Where a job's folder holds the report and its plots."""

_MOST_ROWS = 400
_TEXT = 80  # characters of a name
_OWN = """
td, th { white-space: nowrap; } tr.few td { color: var(--soft); }
.plots { display: flex; flex-wrap: wrap; gap: 14px; }
.plots img { width: 520px; max-width: 100%; border: 1px solid var(--line); border-radius: 10px; background: #fff; }
"""

log = logging.getLogger(__name__)


def write_report(job: Path, document: Mapping[str, Any], plots: Plots) -> Path | None:
    """Write the report and plots below the job's folder; the page's path, None when it can't be made.

    The evaluation holds without a picture of it, so that nothing here is an error of the step.
    """
    folder = job / FOLDER
    try:
        drawn = draw(document, plots)
        folder.mkdir(exist_ok=True)
        for stale in folder.glob("*.png"):  # of an evaluation before this one
            if stale.stem not in drawn:
                stale.unlink()
        for name, canvas in drawn.items():
            write_bytes(folder / f"{name}.png", canvas.png())
        write_bytes(folder / REPORT, render(document, drawn).encode())
    except Exception:
        log.exception("there is no report of the evaluation; its numbers are in evaluation.json")
        return None
    return folder / REPORT


def artifacts(job: Path | str) -> list[Path]:
    """The files of an evaluation that a tracking server should hold, beside evaluation.json."""
    folder = Path(job) / FOLDER
    return sorted(path for path in folder.glob("*") if path.suffix in (".png", ".html"))


def render(document: Mapping[str, Any], drawn: Mapping[str, Canvas]) -> str:
    """The page."""
    style = STYLE + _OWN
    policy = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    champion = document["champion"]
    title = f"Evaluation of {document['trainer']}"
    plots = "".join(map(_image, drawn.values()))
    return f"""<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'sha256-{policy}'; img-src data:">
<meta name=viewport content="width=device-width, initial-scale=1">
<meta name=color-scheme content="light dark">
<title>{_text(title)}</title>
<style>{style}</style>
<header>
<h1>{_text(title)}</h1>
<ul class=facts>
<li><b>{document["examples"]:,}</b> examples of split {_text(document["split"])}</li>
<li>step <b>{_text(document["step"])}</b></li>
<li>records <b>{_text(str(document["records"]["digest"])[:12])}</b></li>
<li>{_champion(champion)}</li>
</ul>
</header>
<main>
{_metrics(document, champion)}
<section><h2>Plots</h2><div class=plots>{plots or "<p>There are no examples to draw.</p>"}</div></section>
{_slices(document)}
{_classes(document, champion)}
</main>
</html>
"""


def _image(canvas: Canvas) -> str:
    """A plot as an image of its own, which the page's style does not reach."""
    data = base64.b64encode(canvas.svg().encode()).decode()
    return f'<img alt="{_text(canvas.title)}" src="data:image/svg+xml;base64,{data}">'


def _champion(champion: Mapping[str, Any] | None) -> str:
    if champion is None:
        return "no champion yet"
    if "error" in champion:
        why = _text(champion["error"], 300)
        return f"champion version <b>{_text(champion['version'])}</b> can't be compared with: {why}"
    return f"beside champion version <b>{_text(champion['version'])}</b>"


def _metrics(document: Mapping[str, Any], champion: Mapping[str, Any] | None) -> str:
    rows = []
    other = champion or {}
    for name, value in document["metrics"].items():
        ours = _with_interval(value, document["intervals"].get(name))
        theirs = _with_interval(other.get("metrics", {}).get(name), other.get("intervals", {}).get(name))
        difference = _difference(other.get("difference", {}).get(name))
        rows.append(f"<tr><td>{_text(name)}<td class=n>{ours}<td class=n>{theirs}<td class=n>{difference}")
    head = "<tr><th>metric<th class=n>candidate<th class=n>champion<th class=n>difference"
    note = "Brackets hold 95 % bootstrap intervals; of differences they are paired, on the same examples."
    table = f"<div class=wide><table>{head}{''.join(rows)}</table></div>"
    return f"<section><h2>Metrics</h2><p class=note>{note}</p>{table}</section>"


def _slices(document: Mapping[str, Any]) -> str:
    rows = document["slices"]
    if not rows:
        return ""
    names = [name for name in document["metrics"] if any(name in row["metrics"] for row in rows)][:6]
    head = "<tr><th>slice<th class=n>examples" + "".join(
        f"<th class=n>{_text(name)}<th class=n>less the champion's" for name in names
    )
    body = []
    for row in rows[:_MOST_ROWS]:
        cells = [f"<td>{_text(row['slice'])}<td class=n>{row['examples']:,}"]
        for name in names:
            difference = ((row["champion"] or {}).get("difference") or {}).get(name)
            cells.append(
                f"<td class=n>{_with_interval(row['metrics'].get(name), row['intervals'].get(name))}"
            )
            cells.append(f"<td class=n>{_difference(difference)}")
        body.append(f"<tr{'' if row['enough_examples'] else ' class=few'}>{''.join(cells)}")
    notes = [f"Slices of fewer than {document['slice_min_examples']} examples are pale: they say little."]
    hidden = dict(document["slices_not_shown"])
    if len(rows) > _MOST_ROWS:
        hidden["rows of this table"] = len(rows) - _MOST_ROWS
    notes += [f"{count} more of {_text(spec)} are not shown." for spec, count in hidden.items()]
    note = f"<p class=note>{' '.join(notes)}</p>"
    return (
        f"<section><h2>Slices</h2>{note}<div class=wide><table>{head}{''.join(body)}</table></div></section>"
    )


def _classes(document: Mapping[str, Any], champion: Mapping[str, Any] | None) -> str:
    ours: Sequence[Mapping[str, Any]] = document.get("per_class") or ()
    if not ours:
        return ""
    theirs = {row["class"]: row for row in (champion or {}).get("per_class", ())}
    head = "<tr><th>class<th class=n>examples<th class=n>recall<th class=n>precision<th class=n>champion's recall"
    body = "".join(
        f"<tr><td>{_text(row['class'])}<td class=n>{row['examples']:,}<td class=n>{_number(row['accuracy'])}"
        f"<td class=n>{_number(row['precision'])}<td class=n>{_number(theirs.get(row['class'], {}).get('accuracy'))}"
        for row in ours[:_MOST_ROWS]
    )
    return f"<section><h2>Classes</h2><div class=wide><table>{head}{body}</table></div></section>"


def _with_interval(value: float | None, bounds: Mapping[str, Any] | None) -> str:
    if value is None or not bounds:
        return _number(value)
    return f"{_number(value)} <small>[{_number(bounds['low'])}, {_number(bounds['high'])}]</small>"


def _difference(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "\N{EN DASH}"
    sure = found["low"] > 0 or found["high"] < 0
    value = f"{found['value']:+.4g}"
    bounds = f"<small>[{found['low']:+.3g}, {found['high']:+.3g}]</small>"
    return f"{f'<b>{value}</b>' if sure else value} {bounds}"


def _number(value: float | None) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.4g}"


def _text(value: object, most: int = _TEXT) -> str:
    text = str(value)
    text = text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
    return html.escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))

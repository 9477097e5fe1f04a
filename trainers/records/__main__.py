"""Turn raw data into a dataset of TFRecords.

    python -m trainers.records --spec '{"source": ..., "output": ..., "name": ..., "label": ..., ...}'

The keys are the arguments of `trainers.records.build.prepare`. The result is
{"manifest": path, "digest": ..., "counts": {"train": n, "eval": m}, "reused": bool, "quarantined": n, ...}.

On several machines the same is done in three steps (see `trainers.records.slices`), each told by "step":

    {"step": "plan", "slices": 4, ... as above}    -> {"plan": path, "slices": 4, "reused": false}
    {"step": "encode", "plan": path, "slice": 0}   -> {"slice": 0, "units": n, "rows": n, "bad": n}
    {"step": "publish", "plan": path}              -> the result above

A step "window" makes the dataset of some spans: {"step": "window", "output": ..., "spans": ["2013-01", "2013-02"]}.
With "span": "2013-01" the dataset is part of a longer one; with "window": 3 besides, the result is the dataset of
that span and the two before it, with "spans", and that of the span alone under "newest" (see records.spans).
Without "slice", JOB_COMPLETION_INDEX says it: the pods of an Indexed Job all run the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainers.job.errors import ConfigError
from trainers.job.termination import run_step
from trainers.records.options import Options

if TYPE_CHECKING:
    from pathlib import Path

    from trainers.records.manifest import Manifest

__all__ = ["main"]

_REQUIRED = ("source", "output", "name", "label")
_OPTIONAL = (
    *("key", "eval_fraction", "shards", "image", "quarantine_threshold", "batch_rows", "schema"),
    *("compression", "format", "partitions", "span", "split", "checks", "statistics", "baseline"),
    *("layout", "block_rows", "processes"),
)
_WINDOW = ("window", "held_out")


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the dataset that a spec asks for, or do one step of it."""
    step = spec.get("step")
    if step is None:
        return _prepare(spec)
    steps = {"plan": _plan, "encode": _encode, "publish": _publish, "window": _window}
    if step not in steps:
        raise ConfigError(f"step must be one of {', '.join(steps)}, got {step!r}")
    return steps[step]({name: value for name, value in spec.items() if name != "step"})


def _prepare(spec: Mapping[str, Any]) -> dict[str, Any]:
    _check(spec, _REQUIRED, (*_OPTIONAL, *_WINDOW))
    _check_window(spec, spec.get("span"))
    # Arrow is imported only now, so that a wrong spec is told at once.
    from trainers.records.build import build

    options = {name: value for name, value in spec.items() if name not in _WINDOW}
    return _result(*build(Options.parse(**options), _say), spec)


def _plan(spec: Mapping[str, Any]) -> dict[str, Any]:
    _check(spec, (*_REQUIRED, "slices"), _OPTIONAL)
    from trainers.records.slices import plan

    options = {name: value for name, value in spec.items() if name != "slices"}
    made, manifest = plan(options, spec["slices"], _say)
    return {"plan": str(made.path), "slices": made.slices, "reused": manifest is not None}


def _encode(spec: Mapping[str, Any]) -> dict[str, Any]:
    _check(spec, ("plan",), ("slice",))
    from trainers.records.slices import encode

    return encode(spec["plan"], spec.get("slice"), _say)


def _publish(spec: Mapping[str, Any]) -> dict[str, Any]:
    _check(spec, ("plan",), _WINDOW)
    from trainers.records.slices import publish

    return _result(*publish(spec["plan"], _say), spec)


def _check(spec: Mapping[str, Any], required: Sequence[str], optional: Sequence[str]) -> None:
    unknown = sorted(set(spec) - {*required, *optional})
    missing = [name for name in required if not spec.get(name)]
    if unknown or missing:
        problem = f"has unknown keys {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"
        may = f", and may have {', '.join(optional)}" if optional else ""
        raise ConfigError(f"the spec {problem}", hint=f"it takes {', '.join(required)}{may}")


def _check_window(spec: Mapping[str, Any], span: str | None) -> None:
    if spec.get("window") is not None and not span:
        raise ConfigError("window needs a span", hint='say which part of the data this is, "span": "2013-01"')
    if spec.get("held_out") is not None and spec.get("window") is None:
        raise ConfigError("held_out needs a window", hint='say of how many spans, "window": 3')


def _result(manifest: Manifest, reused: bool, spec: Mapping[str, Any]) -> dict[str, Any]:
    """What the next step is told: the dataset, or the window that ends with it, which then names it."""
    from trainers.records.publishing import Prepared

    _check_window(spec, manifest.span)
    result = Prepared(manifest, reused).answer()
    if not manifest.span:
        return result
    from trainers.records.spans import newest, record_span

    record_span(manifest)
    result["span"] = manifest.span
    if spec.get("window") is None:
        return result
    output = manifest.folder.parent
    names = newest(output, until=manifest.span, size=spec["window"])
    return {**_windowed(output, names, spec.get("held_out")), "newest": result}


def _window(spec: Mapping[str, Any]) -> dict[str, Any]:
    _check(spec, ("output", "spans"), ("held_out",))
    from trainers.records.options import local_path

    return _windowed(local_path("output", spec["output"]), spec["spans"], spec.get("held_out"))


def _windowed(output: Path, names: Sequence[str], held_out: str | None) -> dict[str, Any]:
    from trainers.records.spans import window

    made = window(output, names, held_out=held_out or "all", progress=_say)
    spans = [span.span for span in made.manifest.spans]
    return {**made.answer(), "span": spans[-1], "spans": spans}


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run_step(main))

"""The fields of the trigger form that the gate and the release read."""

from __future__ import annotations

from typing import Any

from serving.release.gate import ERRORS
from serving.release.limits import NON_INFERIOR, SIGNIFICANTLY_WORSE, VALUE
from trainers.evaluation.slices import MOST_SLICES

__all__ = ["judge_by", "release_fields"]

_TESTS = {
    VALUE: "By its value",
    SIGNIFICANTLY_WORSE: "Fails only when surely worse: its whole interval lies beyond what is allowed",
    NON_INFERIOR: "Passes only when surely not worse: its whole interval lies within",
}
_GATE, _RELEASE, _OVERRIDE = "Release gate", "Release", "Override the gate"


def release_fields() -> dict[str, dict[str, Any]]:
    """Field -> its schema, for a metric that is better when larger."""
    return {
        "min_accuracy": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "title": "Least accuracy",
            "section": _GATE,
            "description_md": "On held-out data, from 0 to 1. Below it nothing is released.",
        },
        "max_drop": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "title": "Largest drop",
            "section": _GATE,
            "description_md": "How far accuracy may fall below the champion's, from 0 to 1.",
        },
        "min_examples": {
            "type": "integer",
            "minimum": 1,
            "maximum": 10**9,
            "title": "Least examples",
            "section": _GATE,
            "description_md": "With fewer held-out examples the verdict is *unknown*, and nothing is released.",
        },
        "max_drop_relative": {
            "type": ["number", "null"],
            "minimum": 0,
            "title": "Largest relative drop",
            "section": _GATE,
            "description_md": "As a share of the champion's value, as 0.02 for 2 %. Empty: not judged.",
        },
        "drop_test": {
            "type": "string",
            "enum": list(_TESTS),
            "values_display": _TESTS,
            "title": "How a drop is judged",
            "section": _GATE,
            "description_md": "Intervals are of 95 %, by the bootstrap, on the same examples.",
        },
        "slices": {
            "type": "array",
            "items": {"type": "string", "maxLength": 300},
            "maxItems": MOST_SLICES,
            "title": "Slices",
            "section": _GATE,
            "description_md": "One a line, like `carrier`, `dest(5)`, `distance[500,1000]`, `dep_delay[q4]` or "
            "`carrier*origin`.",
        },
        "slice_min": {
            "type": ["number", "null"],
            "title": "Least accuracy of a slice",
            "section": _GATE,
            "description_md": "In each slice. Empty: slices are shown and not judged.",
        },
        "slice_max_drop": {
            "type": ["number", "null"],
            "minimum": 0,
            "title": "Largest drop of a slice",
            "section": _GATE,
            "description_md": "Below the champion's in the same slice. Empty: not judged.",
        },
        "slice_min_examples": {
            "type": "integer",
            "minimum": 1,
            "maximum": 10**9,
            "title": "Least examples of a slice",
            "section": _GATE,
            "description_md": "Slices with fewer are shown and not judged.",
        },
        "approval": {
            "type": "boolean",
            "title": "Approval",
            "section": _GATE,
            "description_md": "A person approves the release of a model that passes, on a page that compares it "
            "with the champion.",
        },
        "keep_versions": {
            "type": "integer",
            "minimum": 1,
            "maximum": 1000,
            "title": "Versions kept",
            "section": _RELEASE,
            "description_md": "Older ones are removed unless a label, an alias or a server holds them.",
        },
        "canary_share": {
            "type": "number",
            "minimum": 0,
            "exclusiveMaximum": 1,
            "title": "Canary's share",
            "section": _RELEASE,
            "description_md": "Of the requests, before the version gets all of them. 0: no canary.",
        },
        "canary_minutes": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": 10080,
            "title": "Canary's minutes",
            "section": _RELEASE,
            "description_md": "How long it is compared with what serves now.",
        },
        "canary_min_requests": {
            "type": "integer",
            "minimum": 1,
            "maximum": 10**9,
            "title": "Canary's requests",
            "section": _RELEASE,
            "description_md": "With fewer, of it or of what serves now, nothing is promoted.",
        },
        "override_reason": {
            "type": "string",
            "maxLength": 500,
            "title": "Release anyway, because",
            "section": _OVERRIDE,
            "description_md": "Releases a model that the gate would hold back. The reason goes to the promotion log.",
        },
        "override_author": {
            "type": "string",
            "maxLength": 100,
            "title": "Who says so",
            "section": _OVERRIDE,
            "description_md": "Recorded beside the user who triggers the run, and never instead.",
        },
    }


def judge_by(fields: dict[str, dict[str, Any]], metric: str) -> None:
    """Change the gate's fields to those of a metric that is better when smaller."""
    if metric not in ERRORS:
        return
    at = list(fields).index("min_accuracy")
    rest = {name: fields.pop(name) for name in list(fields)[at:]}
    fields["metric"] = {
        "type": "string",
        "enum": sorted(ERRORS),
        "title": "Metric",
        "section": _GATE,
        "description_md": "On held-out data, in the label's unit; better when smaller.",
    }
    fields["max_error"] = {
        "type": "number",
        "minimum": 0,
        "title": "Greatest error",
        "section": _GATE,
        "description_md": "Of the metric. Above it nothing is released.",
    }
    del rest["min_accuracy"]
    del rest["max_drop"]["maximum"]
    rest["max_drop"] |= {
        "title": "Largest rise",
        "description_md": "How far the metric may lie above the champion's, in its unit.",
    }
    least = rest["slice_min"] | {
        "title": "Greatest error of a slice",
        "description_md": "In each slice. Empty: slices are shown and not judged.",
    }
    rest = {
        ("slice_max" if k == "slice_min" else k): (least if k == "slice_min" else v) for k, v in rest.items()
    }
    rest["slice_max_drop"] |= {
        "title": "Largest rise of a slice",
        "description_md": "Above the champion's in the same slice, in its unit. Empty: not judged.",
    }
    fields |= rest

"""The arguments of a job that the loop itself knows, checked before anything starts.

    steps, batch_size, seed, checkpoint_every, loss_every, devices
    learning_rate, learning_rate_scaling, learning_rate_schedule
    gradient_clip_norm, gradient_clip_value, ema_momentum, mixed_precision, jit_compile
    tensorboard, summary_every, histogram_every

What each does is in docs/training.md. All others are the trainer module's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from trainers.job.checks import check, is_number, is_whole

__all__ = ["PRECISIONS", "SCALINGS", "SCHEDULES", "check_training_args"]

SCALINGS = ("none", "linear", "sqrt")
PRECISIONS = ("float32", "bfloat16", "float16")
SCHEDULES: Mapping[str, frozenset[str]] = {
    "constant": frozenset(),
    "cosine": frozenset({"decay_steps", "final_factor"}),
    "exponential": frozenset({"decay_steps", "decay_rate", "staircase"}),
    "piecewise": frozenset({"boundaries", "factors"}),
}
"""Names of `learning_rate_schedule`, and the fields that each takes beside `warmup_steps`."""


def check_training_args(args: Mapping[str, Any]) -> None:
    """Refuse a value that the loop could not work with: InvalidSpec, "NAME must ..., got VALUE"."""
    counts = ("steps", "batch_size", "checkpoint_every", "loss_every", "devices")
    for name in (*counts, "summary_every", "histogram_every"):
        _check(args, name, "be a whole number of 1 or more", lambda v: is_whole(v) and v >= 1)
    _check(args, "seed", "be a whole number", is_whole)
    for name in ("learning_rate", "gradient_clip_norm", "gradient_clip_value"):
        _check(args, name, "be a number above 0", lambda v: is_number(v) and v > 0)
    check(
        not ("gradient_clip_norm" in args and "gradient_clip_value" in args),
        "gradient_clip_value",
        "be left out where gradient_clip_norm is given",
        args.get("gradient_clip_value"),
    )
    _check(args, "ema_momentum", "be a number above 0 and below 1", lambda v: is_number(v) and 0 < v < 1)
    for name in ("jit_compile", "tensorboard"):
        _check(args, name, "be true or false", lambda v: isinstance(v, bool))
    for name, values in (("learning_rate_scaling", SCALINGS), ("mixed_precision", PRECISIONS)):
        _check(args, name, f"be one of {', '.join(values)}", values.__contains__)
    if "learning_rate_schedule" in args:
        _check_schedule(args["learning_rate_schedule"])


def _check(args: Mapping[str, Any], name: str, must: str, holds: Callable[[Any], bool]) -> None:
    if name in args:
        check(holds(args[name]), name, must, args[name])


def _check_schedule(value: Any) -> None:
    field = "learning_rate_schedule"
    check(
        isinstance(value, Mapping), field, 'be an object like {"name": "cosine", "warmup_steps": 100}', value
    )
    names = f"be one of {', '.join(SCHEDULES)}"
    kind = value.get("name")
    check(isinstance(kind, str) and kind in SCHEDULES, f"{field}.name", names, kind)
    known = SCHEDULES[kind] | {"name", "warmup_steps"}
    unknown = sorted(set(value) - known)
    check(not unknown, field, f"have no fields but {sorted(known)} with name {kind}", unknown)
    within = {f"{field}.{name}": given for name, given in value.items()}
    _check(
        within, f"{field}.warmup_steps", "be a whole number of 0 or more", lambda v: is_whole(v) and v >= 0
    )
    _check(within, f"{field}.decay_steps", "be a whole number of 1 or more", lambda v: is_whole(v) and v >= 1)
    _check(within, f"{field}.final_factor", "be a number from 0 to 1", lambda v: is_number(v) and 0 <= v <= 1)
    _check(within, f"{field}.decay_rate", "be a number above 0", lambda v: is_number(v) and v > 0)
    _check(within, f"{field}.staircase", "be true or false", lambda v: isinstance(v, bool))
    if kind == "exponential":
        for name in ("decay_steps", "decay_rate"):
            check(name in value, f"{field}.{name}", "be given", None)
    if kind == "piecewise":
        _check_pieces(field, value.get("boundaries"), value.get("factors"))


def _check_pieces(field: str, boundaries: Any, factors: Any) -> None:
    rising = (
        isinstance(boundaries, list)
        and len(boundaries) > 0
        and all(is_whole(b) and b > 0 for b in boundaries)
        and all(a < b for a, b in itertools.pairwise(boundaries))
    )
    check(rising, f"{field}.boundaries", "be a list of rising steps above 0", boundaries)
    fit = (
        isinstance(factors, list)
        and len(factors) == len(boundaries) + 1
        and all(is_number(f) and f >= 0 for f in factors)
    )
    check(fit, f"{field}.factors", f"be {len(boundaries) + 1} numbers of 0 or more", factors)

"""The gate's limits of slices and of other metrics, drops judged by their intervals, and what always holds."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ConfigInvalid
from serving.release.gate import FAIL, PASS, UNKNOWN, Thresholds, Verdict, decide
from serving.release.verdict import Approval, decided, overridden, override


def row(name, accuracy, examples=100, champion=None, low=None, high=None):
    other = None
    if champion is not None:
        difference = (
            {} if low is None else {"accuracy": {"value": accuracy - champion, "low": low, "high": high}}
        )
        other = {"metrics": {"accuracy": champion}, "difference": difference}
    return {"slice": name, "examples": examples, "metrics": {"accuracy": accuracy}, "champion": other}


def evaluation(accuracy=0.95, champion=None, interval=None, slices=(), **metrics):
    other = None
    if champion is not None:
        other = {"version": 3, "metrics": {"accuracy": champion}}
        if interval:
            other["difference"] = {"accuracy": {"value": 0.0, "low": interval[0], "high": interval[1]}}
    return {
        "metrics": {"accuracy": accuracy, **metrics},
        "examples": 400,
        "champion": other,
        "slices": list(slices),
    }


LOW = Thresholds(min_accuracy=0.5)
GOOD_SLICES = [
    row("c=UA", 0.95, champion=0.94),
    row("c=AA", 0.9, champion=0.95),
    row("c=B6", 0.4, examples=7),
]

TABLE = [
    # relative to the champion
    (evaluation(0.90, champion=0.95), {"max_drop": None, "max_drop_relative": 0.06}, PASS, "at most 6 %, 0.0570 below"),
    (evaluation(0.90, champion=0.95), {"max_drop": None, "max_drop_relative": 0.05}, FAIL, "0.0500 below champion 3"),
    (evaluation(0.90, champion=0.95), {"max_drop": 0.1, "max_drop_relative": 0.01}, FAIL, "at most 1 %, 0.0095 below"),
    # by the interval of the difference, candidate - champion
    (evaluation(0.90, 0.95, (-0.09, -0.02)), {"drop_test": "significantly_worse"}, FAIL, "+0.0200 to +0.0900 worse"),
    (evaluation(0.90, 0.95, (-0.09, -0.005)), {"drop_test": "significantly_worse"}, PASS, "+0.0050 to +0.0900 worse"),
    (evaluation(0.95, 0.95, (-0.005, 0.005)), {"drop_test": "non_inferior"}, PASS, "-0.0050 to +0.0050 worse"),
    (evaluation(0.95, 0.95, (-0.02, 0.02)), {"drop_test": "non_inferior"}, FAIL, "to +0.0200 worse"),
    (evaluation(0.95, 0.95), {"drop_test": "non_inferior"}, UNKNOWN, "no interval to judge it by"),
    (evaluation(0.95, 0.95, (math.nan, 0.1)), {"drop_test": "non_inferior"}, UNKNOWN, "no interval"),
    (evaluation(0.95, 0.95, (0.1, -0.1)), {"drop_test": "non_inferior"}, UNKNOWN, "no interval"),
    (evaluation(0.95), {"drop_test": "non_inferior"}, PASS, "no champion to compare with"),
    # slices
    (evaluation(slices=GOOD_SLICES), {"slice_min": 0.85}, PASS, "2 slices keep their limits, 1 more have fewer"),
    (evaluation(slices=GOOD_SLICES), {"slice_min": 0.92}, FAIL, "in slice c=AA accuracy 0.9000 is below the minimum"),
    (evaluation(slices=GOOD_SLICES), {"slice_min": 0.85, "small_slices": "unknown"}, UNKNOWN, "c=B6 has 7 examples"),
    (evaluation(slices=GOOD_SLICES), {"slice_min": 0.85, "slice_min_examples": 7}, FAIL, "in slice c=B6"),
    (evaluation(slices=GOOD_SLICES), {"slice_min": 0.1, "slice_min_examples": 500}, UNKNOWN, "no slice has the 500"),
    (evaluation(), {"slice_min": 0.1}, UNKNOWN, "the evaluation has no slices"),
    ({**evaluation(), "slices": "many"}, {"slice_min": 0.1}, UNKNOWN, "the evaluation has no slices"),
    (evaluation(0.9, 0.9, slices=GOOD_SLICES), {"slice_max_drop": 0.06}, PASS, "2 slices keep"),
    (evaluation(0.9, 0.9, slices=GOOD_SLICES), {"slice_max_drop": 0.04}, FAIL, "c=AA accuracy lies 0.0500 below"),
    (evaluation(0.9, 0.9, slices=GOOD_SLICES), {"slice_max_drop_relative": 0.04}, FAIL, "at most 4 %, 0.0380 below"),
    (evaluation(0.9, 0.9, slices=[row("a", 0.9)]), {"slice_max_drop": 0.1}, UNKNOWN, "in slice a the champion has no"),
    (evaluation(slices=[row("a", 0.9)]), {"slice_max_drop": 0.1}, PASS, "1 slice keeps its limits"),
    (evaluation(slices=[row("a", math.nan)]), {"slice_min": 0.1}, UNKNOWN, "slice a has no accuracy"),
    (evaluation(slices=[row("a", 0.9, examples="many")]), {"slice_min": 0.1}, UNKNOWN, "no slice has the 30"),
    (evaluation(slices=GOOD_SLICES), {"slices": {"c=AA": {"min": 0.95}}}, FAIL, "in slice c=AA"),
    (evaluation(slices=GOOD_SLICES), {"slices": {"c=AA": {"min": 0.85}}}, PASS, "1 slice keeps"),
    (evaluation(slices=GOOD_SLICES), {"slices": {"c=XX": {"min": 0.85}}}, UNKNOWN, "has no slice c=XX"),
    (evaluation(slices=GOOD_SLICES), {"slices": {"c=B6": {"min": 0.1}}}, UNKNOWN, "slice c=B6 has 7 examples"),
    (evaluation(slices=GOOD_SLICES), {"slice_min": 0.92, "slices": {"c=AA": {"min": 0.8}}}, PASS, "2 slices keep"),
    (evaluation(0.3, slices=[row("a", 0.1), row("b", math.nan)]), {"slice_min": 0.2}, FAIL, "in slice a accuracy"),
    # other metrics
    (evaluation(ece=0.02), {"also": {"ece": {"max": 0.05}}}, PASS, "ece 0.0200 is within the maximum 0.0500"),
    (evaluation(ece=0.07), {"also": {"ece": {"max": 0.05}}}, FAIL, "ece 0.0700 is above the maximum"),
    (evaluation(), {"also": {"ece": {"max": 0.05}}}, UNKNOWN, "metric ece is missing"),
    (evaluation(0.95, 0.95, auc=0.9), {"also": {"auc": {"max_drop": 0.1}}}, UNKNOWN, "the champion has no auc"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "changes", "outcome", "words"), TABLE)
def test_the_gate(given, changes, outcome, words):
    verdict = decide(given, replace(LOW, **changes))
    assert verdict.outcome == outcome, verdict.words()
    assert words in verdict.words()
    document = json.loads(json.dumps(verdict.to_json()))
    assert Verdict.from_json(document).to_json() == document


def test_many_bad_slices_are_said_the_worst_first():
    slices = [row(f"c={n}", 0.5 - n / 100) for n in range(12)]
    verdict = decide(evaluation(slices=slices), replace(LOW, slice_min=0.6))
    assert len(verdict.reasons) == 6
    assert "c=11" in verdict.reasons[0]
    assert verdict.reasons[-1] == "7 more limits of slices are not kept"
    assert verdict.numbers["slices"] == {
        "judged": 12,
        "too_small": 0,
        "failed": [f"c={n}" for n in range(11, -1, -1)],
    }


def test_a_champion_that_can_not_be_asked_may_be_ignored():
    given = {**evaluation(), "champion": {"version": 3, "error": "it takes pixels"}}
    assert decide(given, LOW).outcome == UNKNOWN
    verdict = decide(given, replace(LOW, champion_unusable="ignore"))
    assert verdict.outcome == PASS
    assert "champion 3 can't be compared with, which is ignored: it takes pixels" in verdict.words()
    lacking = {**evaluation(), "champion": {"version": 3, "metrics": {"loss": 1.0}}}
    assert decide(lacking, replace(LOW, champion_unusable="ignore")).outcome == UNKNOWN


WRONG = [
    {"slice_min": "0.9"},
    {"slice_max_drop": -0.1},
    {"max_drop_relative": -1.0},
    {"slice_min_examples": 0},
    {"drop_test": "lenient"},
    {"champion_unusable": "pass"},
    {"small_slices": "pass"},
    {"slices": [1]},
    {"slices": {"a": {}}},
    {"slices": {"a": {"least": 1}}},
    {"also": {"ece": {"max": math.nan}}},
    {"also": {"ece": 0.05}},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_thresholds_that_can_not_be(wrong):
    with pytest.raises(ConfigInvalid, match=f"{next(iter(wrong))}|of (a|ece)"):
        Thresholds(**wrong)


# ---- what always holds

share = st.floats(0, 1)
some = st.none() | share
tests = st.sampled_from(["value", "significantly_worse", "non_inferior"])
thresholds = st.builds(
    Thresholds,
    min_accuracy=some, max_error=some, max_drop=some, max_drop_relative=some, drop_test=tests,
    metric=st.sampled_from(["accuracy", "mae"]), slice_min=some, slice_max=some, slice_max_drop=some,
    slice_max_drop_relative=some, slice_min_examples=st.integers(1, 60),
    small_slices=st.sampled_from(["skip", "unknown"]),
    min_examples=st.integers(1, 200),
)  # fmt: skip


def model(value, other, spread):
    def side(v):
        return {"metrics": {"accuracy": v, "mae": v}}

    if other is None:
        return side(value), None
    if spread is None:
        return side(value), side(other)
    ends = {"value": value - other, "low": value - other - spread, "high": value - other + spread}
    return side(value), {**side(other), "difference": {"accuracy": ends, "mae": ends}}


@st.composite
def evaluations(draw):
    """Values of a candidate and a champion, overall and in slices, as plain numbers."""
    has_champion = draw(st.booleans())
    spread = draw(st.none() | st.floats(0, 0.2)) if has_champion else None
    cells = draw(st.lists(st.tuples(share, share, st.integers(1, 90)), min_size=1, max_size=4))
    return has_champion, spread, cells


def made(has_champion, spread, cells, shift=0.0):
    whole, *parts = cells
    ours, theirs = model(whole[0] + shift, whole[1] if has_champion else None, spread)
    rows = []
    for n, (value, other, examples) in enumerate(parts):
        mine, champions = model(value + shift, other if has_champion else None, spread)
        rows.append({"slice": f"s={n}", "examples": examples, "champion": champions, **mine})
    champion = None if theirs is None else {"version": 1, **theirs}
    return {**ours, "examples": 100, "champion": champion, "slices": rows}


@settings(max_examples=150, deadline=None)
@given(evaluations(), thresholds, st.floats(0, 0.5))
def test_a_better_candidate_never_makes_a_worse_verdict(parts, limits, better):
    before = decide(made(*parts), limits)
    shift = -better if limits.smaller_is_better else better
    after = decide(made(*parts, shift=shift), limits)
    assert not (before.outcome == PASS and after.outcome != PASS), (before.words(), after.words())
    assert (before.outcome == UNKNOWN) <= (after.outcome == UNKNOWN)


@settings(max_examples=100, deadline=None)
@given(evaluations(), thresholds, st.sampled_from(["metrics", "examples", "slices", "champion"]), st.data())
def test_what_is_not_known_is_never_deployed(parts, limits, lost, data):
    given_ = made(*parts)
    nothing = data.draw(st.sampled_from([None, {}, "?", math.nan, {"metrics": {}}, [], True]))
    verdict = decide({**given_, lost: nothing}, limits)
    if lost in ("metrics", "examples"):
        assert verdict.outcome == UNKNOWN
    assert verdict.deployable == (verdict.outcome == PASS)
    rejected = decided(verdict, Approval("reject", "ada"))
    assert not rejected.deployable
    assert decided(verdict, Approval("approve", "ada")).deployable == verdict.deployable
    json.dumps(verdict.to_json(), allow_nan=False)


# ---- people


def test_the_name_in_a_form_is_not_the_user():
    failed = decide(evaluation(0.1), LOW)
    found = override(failed, " a demo ", "ada", on_behalf_of="grace", source="airflow")
    assert found.override.author == "ada"
    assert found.override.on_behalf_of == "grace"
    assert found.reasons[0] == "ada, for grace as they say, overrides fail: a demo"
    assert override(failed, "a demo", "ada", on_behalf_of="ada").override.on_behalf_of == ""
    alone = override(failed, "a demo", "", on_behalf_of="grace", source="airflow")
    assert (alone.override.author, alone.override.source) == ("grace", "form")
    assert "no user of Airflow" in alone.reasons[0]
    assert Verdict.from_json(alone.to_json()) == alone


def test_a_version_that_was_never_judged_is_promoted_with_a_reason():
    found = overridden(None, "an emergency", "ada")
    assert found["outcome"] == PASS
    assert found["override"] == {
        "outcome_before": "unknown", "reason": "an emergency", "author": "ada", "on_behalf_of": "", "source": "cli",
    }  # fmt: skip
    with pytest.raises(ConfigInvalid, match="reason"):
        overridden(None, " ", "ada")


def test_an_answer_is_kept():
    passed = decide(evaluation(), LOW)
    found = decided(passed, Approval("reject", "ada", "2026-01-01T00:00:00Z", "not on a Friday"))
    assert found.outcome == FAIL
    assert found.reasons[0] == "ada rejects: not on a Friday"
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert "nobody answered in time" in decided(passed, Approval("reject", "", timed_out=True)).words()
    with pytest.raises(ConfigInvalid, match="decision"):
        Approval("maybe", "ada")

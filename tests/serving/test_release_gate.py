from __future__ import annotations

import json
import math

import pytest

from serving.errors import ConfigInvalid
from serving.release.gate import Override, Thresholds, Verdict, decide, override


def _evaluation(accuracy=0.97, examples=360, champion=None, **metrics):
    return {
        "metrics": {"accuracy": accuracy, "loss": 0.1, **metrics},
        "examples": examples,
        "champion": None if champion is None else {"version": 3, "metrics": {"accuracy": champion}},
    }


LIMITS = Thresholds(min_accuracy=0.95, max_drop=0.01, min_examples=100)

TABLE = [
    # evaluation, thresholds, outcome, words
    (_evaluation(), LIMITS, "pass", "accuracy 0.9700 reaches the minimum 0.9500"),
    (_evaluation(), LIMITS, "pass", "no champion to compare with"),
    (_evaluation(0.95), LIMITS, "pass", "reaches"),
    (_evaluation(0.9499), LIMITS, "fail", "accuracy 0.9499 is below the minimum 0.9500"),
    (_evaluation(champion=0.975), LIMITS, "pass", "0.0050 below champion 3 (0.9750)"),
    (_evaluation(champion=0.98), LIMITS, "pass", "0.0100 below champion 3"),
    (_evaluation(champion=0.9801), LIMITS, "fail", "0.0101 below champion 3 (0.9801), at most 0.0100 below"),
    (_evaluation(champion=0.9), LIMITS, "pass", "0.0700 above champion 3"),
    (_evaluation(0.5, champion=0.9), LIMITS, "fail", "is below the minimum"),
    (_evaluation(0.5, champion=0.9), Thresholds(min_accuracy=None, max_drop=None), "pass", "judged on 360"),
    (_evaluation(math.nan), LIMITS, "unknown", "accuracy is missing"),
    (_evaluation(math.inf), LIMITS, "unknown", "not a finite number"),
    (_evaluation("0.97"), LIMITS, "unknown", "accuracy is missing"),
    (_evaluation(True), LIMITS, "unknown", "accuracy is missing"),
    ({"metrics": {}, "examples": 360}, LIMITS, "unknown", "accuracy is missing"),
    ({"examples": 360}, LIMITS, "unknown", "accuracy is missing"),
    ({"metrics": None, "examples": None}, LIMITS, "unknown", "does not say on how many examples"),
    (_evaluation(examples=99), LIMITS, "unknown", "99 examples are too few, 100 are needed"),
    (_evaluation(examples=True), LIMITS, "unknown", "does not say on how many"),
    (_evaluation(champion=math.nan), LIMITS, "unknown", "the champion has no accuracy to compare with"),
    ({**_evaluation(), "champion": {"version": 3}}, LIMITS, "unknown", "the champion has no accuracy"),
    ({**_evaluation(), "champion": "3"}, LIMITS, "unknown", "the champion has no accuracy"),
    (_evaluation(auc=0.8), Thresholds(min_accuracy=0.7, metric="auc"), "pass", "auc 0.8000 reaches"),
    (_evaluation(0.5, examples=5), LIMITS, "unknown", "too few"),
]


@pytest.mark.parametrize(("evaluation", "thresholds", "outcome", "words"), TABLE)
def test_the_gate(evaluation, thresholds, outcome, words):
    verdict = decide(evaluation, thresholds)
    assert verdict.outcome == outcome
    assert words in verdict.words()
    assert verdict.deployable == (outcome == "pass")
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))).words() == verdict.words()


def test_a_champion_that_is_not_compared_may_lack_the_metric():
    evaluation = {**_evaluation(), "champion": {"version": 3, "metrics": {}}}
    assert decide(evaluation, Thresholds(max_drop=None)).deployable


def test_numbers_are_kept():
    numbers = decide(_evaluation(champion=0.975), LIMITS).numbers
    assert numbers["value"] == 0.97
    assert numbers["champion_value"] == 0.975
    assert numbers["champion_version"] == 3
    assert numbers["drop"] == pytest.approx(0.005)


def test_an_override_names_its_author_and_reason():
    verdict = override(decide(_evaluation(0.9), LIMITS), "holiday traffic needs it", "Ada")
    assert verdict.deployable
    assert verdict.override == Override("fail", "holiday traffic needs it", "Ada")
    assert verdict.words().startswith(
        "pass: Ada overrides fail: holiday traffic needs it; accuracy 0.9000 is below"
    )
    assert Verdict.from_json(verdict.to_json()) == verdict
    passed = decide(_evaluation(), LIMITS)
    assert override(passed, "why not", "Ada") is passed
    for reason, author in (("", "Ada"), ("because", " ")):
        with pytest.raises(ConfigInvalid):
            override(verdict, reason, author)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_accuracy": math.nan}, "min_accuracy must be a number"),
        ({"min_accuracy": "high"}, "min_accuracy must be a number"),
        ({"max_drop": -0.1}, "max_drop must be 0 or more, got -0.1"),
        ({"min_examples": 0}, "min_examples must be a whole number of 1 or more, got 0"),
        ({"min_examples": True}, "min_examples"),
        ({"metric": ""}, "metric must be"),
    ],
)
def test_bad_thresholds_are_refused(given, message):
    with pytest.raises(ConfigInvalid, match=message):
        Thresholds(**given)


@pytest.mark.parametrize("document", [{}, {"outcome": "maybe", "reasons": []}, {"outcome": "pass"}, []])
def test_what_is_no_verdict_is_refused(document):
    with pytest.raises(ConfigInvalid):
        Verdict.from_json(document)

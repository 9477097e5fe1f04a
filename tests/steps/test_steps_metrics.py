"""Metrics and their intervals against scikit-learn, the normal law and DeLong's variance."""

import math

import numpy as np
import pytest
import sklearn.metrics as reference

from trainers.evaluation.bootstrap import resampled, spread_interval
from trainers.evaluation.metrics import calibration, measures
from trainers.evaluation.scoring import Scores
from trainers.evaluation.summary import Measured, summarize
from trainers.task import CLASSIFICATION, REGRESSION, Task

NONE = np.zeros(0, np.float32)
CLASSES = Task(CLASSIFICATION)


def classified(labels, probabilities):
    """What a Scorer gathers of probabilities [n, classes]."""
    from trainers.evaluation.scoring import _probabilities

    labels, predicted = np.asarray(labels, np.int32), probabilities.argmax(axis=1).astype(np.int32)
    kept = _probabilities(probabilities, labels, predicted)
    losses = -np.log(kept["truth"])
    return Scores(labels, predicted, losses, NONE, NONE, probabilities.shape[1], {}, **kept)


def two_classes(n, seed=0, shift=1.0, ties=False):
    rng = np.random.default_rng(seed)
    labels = (rng.random(n) < 0.3).astype(np.int32)
    second = 1 / (1 + np.exp(-(rng.normal(size=n) + shift * (2 * labels - 1))))
    second = np.round(second, 1) if ties else second
    return labels, np.stack([1 - second, second], axis=1)


def many_classes(n, classes, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    scores = rng.normal(size=(n, classes)) + 1.5 * np.eye(classes)[labels]
    return labels, np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


@pytest.mark.parametrize("ties", [False, True])
def test_two_classes(ties):
    labels, probabilities = two_classes(800, ties=ties)
    second = probabilities[:, 1]
    found = summarize(classified(labels, probabilities), CLASSES)["metrics"]
    assert found["auc"] == pytest.approx(reference.roc_auc_score(labels, second))
    assert found["pr_auc"] == pytest.approx(reference.average_precision_score(labels, second))
    assert found["brier"] == pytest.approx(reference.brier_score_loss(labels, second), rel=1e-5)
    assert found["macro_f1"] == pytest.approx(
        reference.f1_score(labels, probabilities.argmax(axis=1), average="macro")
    )
    if not ties:
        assert found["log_loss"] == pytest.approx(reference.log_loss(labels, second), rel=1e-5)
    assert "top_3_accuracy" not in found


def test_many_classes():
    labels, probabilities = many_classes(600, 8)
    found = summarize(classified(labels, probabilities), CLASSES)["metrics"]
    assert found["log_loss"] == pytest.approx(reference.log_loss(labels, probabilities), rel=1e-5)
    one_hot = np.eye(8)[labels]
    assert found["brier"] == pytest.approx(np.square(probabilities - one_hot).sum(axis=1).mean(), rel=1e-5)
    for k in (3, 5):
        assert found[f"top_{k}_accuracy"] == pytest.approx(
            reference.top_k_accuracy_score(labels, probabilities, k=k)
        )
    assert found["macro_f1"] == pytest.approx(
        reference.f1_score(labels, probabilities.argmax(axis=1), average="macro")
    )
    assert "auc" not in found


def test_calibration_errors():
    rng = np.random.default_rng(2)
    second = rng.random(100_000)
    honest = (rng.random(100_000) < second).astype(np.int32)
    probabilities = np.stack([1 - second, second], axis=1)
    assert measures(classified(honest, probabilities), CLASSES)["ece"] < 0.01
    boasting = np.where(second > 0.5, 0.99, 0.01)
    scores = classified(honest, np.stack([1 - boasting, boasting], axis=1))
    assert measures(scores, CLASSES)["ece"] == pytest.approx(0.24, abs=0.01)
    bins = calibration(scores)
    assert [row["examples"] for row in bins] == np.bincount(second > 0.5).tolist()
    assert [row["said"] for row in bins] == pytest.approx([0.01, 0.99])
    assert [row["true"] for row in bins] == pytest.approx([0.25, 0.75], abs=0.01)


def test_a_regression():
    rng = np.random.default_rng(1)
    wanted = rng.normal(size=500).astype(np.float32)
    given = (wanted + rng.normal(size=500) / 2).astype(np.float32)
    error = given - wanted
    scores = Scores(NONE, NONE, error**2, np.abs(error), error**2, 0, {}, wanted=wanted, given=given)
    found = summarize(scores, Task(REGRESSION))
    assert found["metrics"]["r2"] == pytest.approx(reference.r2_score(wanted, given), rel=1e-5)
    assert found["metrics"]["median_absolute_error"] == pytest.approx(
        reference.median_absolute_error(wanted, given)
    )
    for name in ("r2", "median_absolute_error"):
        assert found["intervals"][name]["low"] < found["metrics"][name] < found["intervals"][name]["high"]


def test_what_is_not_defined_is_no_number():
    labels, probabilities = two_classes(50)
    found = summarize(classified(np.zeros_like(labels), probabilities), CLASSES)
    assert found["metrics"]["auc"] is found["metrics"]["pr_auc"] is None
    assert "auc" not in found["intervals"]
    flat = Scores(NONE, NONE, *[np.ones(5, np.float32)] * 3, 0, {}, wanted=np.ones(5), given=np.zeros(5))
    assert summarize(flat, Task(REGRESSION))["metrics"]["r2"] is None
    probabilities[3] = math.nan
    found = summarize(classified(labels, probabilities), CLASSES)
    assert found["metrics"]["auc"] is found["metrics"]["ece"] is found["metrics"]["brier"] is None
    assert found.get("calibration") == []


@pytest.mark.parametrize("n", [500, 40_000])
def test_the_interval_of_an_area_is_delongs(n):
    labels, probabilities = two_classes(n)
    second = probabilities[:, 1]
    found = summarize(classified(labels, probabilities), CLASSES)
    positive, negative = np.sort(second[labels == 1]), np.sort(second[labels == 0])
    above = np.searchsorted(negative, second[labels == 1]) / len(negative)
    below = 1 - np.searchsorted(positive, second[labels == 0]) / len(positive)
    spread = 1.96 * math.sqrt(above.var() / len(positive) + below.var() / len(negative))
    interval = found["intervals"]["auc"]
    assert (interval["high"] - interval["low"]) / 2 == pytest.approx(spread, rel=0.25)


def test_the_difference_of_areas_is_paired():
    labels, probabilities = two_classes(3000)
    worse = probabilities.copy()
    worse[:60] = worse[:60, ::-1]
    ours, theirs = (Measured(classified(labels, p), CLASSES) for p in (probabilities, worse))
    found, alone = ours.less(theirs)["auc"], ours.intervals()["auc"]
    assert 0 < found["low"] < found["value"] < found["high"]
    assert found["high"] - found["low"] < alone["high"] - alone["low"]
    assert theirs.less(ours)["auc"]["value"] == pytest.approx(-found["value"])


def test_fewer_rows_than_examples_are_scaled_to_all_of_them():
    values = np.random.default_rng(0).exponential(size=100_000)
    samples = resampled(len(values), lambda rows: {"mean": float(values[rows].mean())})["mean"]
    low, high = spread_interval(float(values.mean()), samples, len(values))
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / math.sqrt(len(values)), rel=0.25)
    assert spread_interval(1.0, np.array([1.0, math.nan]), 10) is None
    assert resampled(1, lambda rows: {"mean": 0.0}) == {}

"""From what models said to numbers, against scikit-learn and the normal law."""

import math

import numpy as np
import pytest
import sklearn.metrics as reference

from trainers.evaluation.bootstrap import mean_interval
from trainers.evaluation.scoring import Scores
from trainers.evaluation.summary import compare, finite, summarize
from trainers.task import CLASSIFICATION, REGRESSION, Task

NONE = np.zeros(0, np.float32)


def classified(labels, predicted, classes=3, losses=None, **more):
    labels, predicted = np.asarray(labels, np.int32), np.asarray(predicted, np.int32)
    losses = np.ones(len(labels), np.float32) if losses is None else np.asarray(losses, np.float32)
    return Scores(labels, predicted, losses, NONE, NONE, classes, more)


def test_a_classifier_against_scikit_learn():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 500)
    predicted = np.where(rng.random(500) < 0.8, labels, rng.integers(0, 3, 500))
    out = summarize(
        classified(labels, predicted, losses=rng.random(500)), Task(CLASSIFICATION, ("a", "b", "c"))
    )
    assert out["metrics"]["accuracy"] == pytest.approx(reference.accuracy_score(labels, predicted))
    assert out["confusion"] == reference.confusion_matrix(labels, predicted).tolist()
    recall = reference.recall_score(labels, predicted, average=None)
    precision = reference.precision_score(labels, predicted, average=None)
    assert [row["accuracy"] for row in out["per_class"]] == pytest.approx(recall.tolist())
    assert [row["precision"] for row in out["per_class"]] == pytest.approx(precision.tolist())
    assert [row["class"] for row in out["per_class"]] == ["a", "b", "c"]
    for name in ("accuracy", "loss"):
        interval = out["intervals"][name]
        assert interval["low"] < out["metrics"][name] < interval["high"]


def test_a_class_without_examples_has_no_accuracy():
    rows = summarize(classified([0, 0], [0, 1]), Task(CLASSIFICATION))["per_class"]
    assert rows[2] == {"class": "2", "examples": 0, "accuracy": None, "precision": None}
    assert rows[1]["precision"] == 0.0


def test_many_classes_have_no_matrix_on_disk():
    out = summarize(classified([0, 1], [0, 1], classes=201), Task(CLASSIFICATION))
    assert "confusion" not in out
    assert len(out["per_class"]) == 201


def test_no_examples_no_metrics():
    assert summarize(classified([], []), Task(CLASSIFICATION)) == {"metrics": {}, "intervals": {}}


def test_a_regression():
    errors = np.array([1.0, -1.0, 3.0, -3.0], np.float32)
    scores = Scores(NONE, NONE, errors**2, np.abs(errors), errors**2, 0, {"mape": 7.0})
    out = summarize(scores, Task(REGRESSION))
    assert out["metrics"] == {
        "loss": 5.0,
        "mae": 2.0,
        "rmse": pytest.approx(math.sqrt(5)),
        "median_absolute_error": 2.0,
        "mape": 7.0,
    }
    assert 1 <= out["intervals"]["rmse"]["low"] < math.sqrt(5) < out["intervals"]["rmse"]["high"] <= 3
    assert "per_class" not in out


def test_the_trainers_own_metric_wins():
    out = summarize(classified([0, 1], [0, 1], accuracy=0.25), Task(CLASSIFICATION))
    assert out["metrics"]["accuracy"] == 0.25


def test_what_is_not_finite_is_no_measurement():
    out = summarize(classified([0, 1], [0, 1], losses=[1, np.nan]), Task(CLASSIFICATION))
    assert out["metrics"]["loss"] is None
    assert "loss" not in out["intervals"]
    assert finite(math.inf) is None
    assert finite(1) == 1.0


def test_losses_of_whole_batches_have_no_interval():
    scores = Scores(
        *(np.zeros(4, np.int32),) * 2, np.ones(4, np.float32), NONE, NONE, 2, {}, by_example=False
    )
    assert set(summarize(scores, Task(CLASSIFICATION))["intervals"]) == {"accuracy", "macro_f1"}
    assert set(compare(scores, scores, Task(CLASSIFICATION))) == {"accuracy", "macro_f1"}


def test_the_difference_is_paired():
    labels = np.zeros(1000, np.int32)
    predicted = np.r_[np.zeros(900, np.int32), np.ones(100, np.int32)]
    better = predicted.copy()
    better[900:910] = 0  # right wherever the other is, and ten times more
    found = compare(classified(labels, better), classified(labels, predicted), Task(CLASSIFICATION))[
        "accuracy"
    ]
    assert found["value"] == pytest.approx(0.01)
    assert 0 < found["low"] < 0.01 < found["high"] < 0.02  # unpaired, it would lie about from -0.016 to 0.036


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_the_interval_of_a_rate_is_the_binomials(rate):
    values = np.zeros(2000)
    values[: int(2000 * rate)] = 1
    low, high = mean_interval(values)
    spread = 1.96 * math.sqrt(rate * (1 - rate) / 2000)
    assert low == pytest.approx(rate - spread, abs=spread / 8)
    assert high == pytest.approx(rate + spread, abs=spread / 8)


@pytest.mark.parametrize("n", [50, 3_000, 20_000])
def test_the_interval_of_a_mean(n):
    values = np.random.default_rng(1).exponential(size=n)
    low, high = mean_interval(values)
    spread = 1.96 * values.std() / math.sqrt(n)
    assert low == pytest.approx(values.mean() - spread, abs=spread / 4)
    assert high == pytest.approx(values.mean() + spread, abs=spread / 4)
    assert mean_interval(values) == (low, high)  # the same numbers each time


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.inf], [1.0, math.nan]])
def test_no_interval(values):
    assert mean_interval(np.array(values)) is None

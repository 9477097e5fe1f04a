"""What a model is for and what it answers."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainers.runtime.module import TrainerModule
from trainers.task import CLASSIFICATION, REGRESSION, ModelContractBroken, Task, call


def module(loss, classes=None):
    found = types.ModuleType("trainer_of_test")
    found.build_model = lambda hparams: None
    found.loss = lambda hparams: loss
    if classes is not None:
        found.CLASSES = classes
    return TrainerModule(found)


KINDS = [
    (keras.losses.SparseCategoricalCrossentropy(from_logits=True), None, Task(CLASSIFICATION)),
    (keras.losses.SparseCategoricalCrossentropy(), None, Task(CLASSIFICATION, None, False)),
    (keras.losses.CategoricalCrossentropy(from_logits=True), ["a", 2], Task(CLASSIFICATION, ("a", "2"))),
    (keras.losses.BinaryCrossentropy(from_logits=True), None, Task(CLASSIFICATION)),
    (keras.losses.MeanSquaredError(), None, Task(REGRESSION)),
    (keras.losses.CategoricalHinge(), ["a", "b"], Task(CLASSIFICATION, ("a", "b"))),
    (lambda label, output: 0.0, None, Task(REGRESSION)),
    (lambda label, output: 0.0, ["a", "b"], Task(CLASSIFICATION, ("a", "b"))),
]


@pytest.mark.parametrize(("loss", "classes", "task"), KINDS)
def test_task_of_a_trainer(loss, classes, task):
    assert Task.of(module(loss, classes), {}) == task


def test_task_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match="kind must be classification or regression"):
        Task("ranking")


LOGITS = np.log([[0.2, 0.7, 0.1], [0.5, 0.25, 0.25]]).astype(np.float32)
THREE = np.exp(LOGITS)
SECOND = np.array([[0.0], [2.0]], np.float32)  # one score a row
TWO = np.array([[0.5, 0.5], [0.1192, 0.8808]], np.float32)

ANSWERS = [
    # (from_logits, what the model gives, probabilities, classes, other names)
    (True, LOGITS, THREE, [1, 0], {"logits"}),
    (True, {"logits": LOGITS, "embedding": SECOND}, THREE, [1, 0], {"logits", "embedding"}),
    (True, {"anything": LOGITS}, THREE, [1, 0], {"logits", "anything"}),
    (False, THREE, THREE, [1, 0], set()),
    (False, {"probabilities": THREE}, THREE, [1, 0], set()),
    (True, SECOND, TWO, [0, 1], {"logits"}),
    (True, SECOND[:, 0], TWO, [0, 1], {"logits"}),
    (False, TWO[:, 1:], TWO, [0, 1], set()),
]


@pytest.mark.parametrize(("from_logits", "output", "probabilities", "classes", "more"), ANSWERS)
def test_answers_of_a_classifier(from_logits, output, probabilities, classes, more):
    output = tf.nest.map_structure(tf.constant, output)
    answers = Task(CLASSIFICATION, None, from_logits).answers(output)
    np.testing.assert_allclose(answers["probabilities"], probabilities, atol=1e-4)
    assert answers["classes"].numpy().tolist() == classes
    assert answers["classes"].dtype == tf.int64
    assert set(answers) == {"probabilities", "classes"} | more


def test_answers_of_a_regression():
    assert list(Task(REGRESSION).answers(tf.constant(SECOND))) == ["predictions"]
    assert list(Task(REGRESSION).answers({"outputs": tf.constant(SECOND)})) == ["outputs"]


@pytest.mark.parametrize("output", [[1, 2], {"a": 1, "b": 2}], ids=["list", "dict"])
def test_an_output_without_scores_is_told(output):
    with pytest.raises(ModelContractBroken, match="the model returns a"):
        Task(CLASSIFICATION).scores(output)


def test_a_model_of_other_classes_than_the_trainers_is_told():
    with pytest.raises(ModelContractBroken, match="gives 3 scores a row for 2 CLASSES"):
        Task(CLASSIFICATION, ("a", "b")).answers(tf.constant(LOGITS))


def test_call_by_the_names_of_inputs():
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    difference = keras.layers.Subtract()([a, b])
    features = {"b": tf.constant([[1.0]]), "a": tf.constant([[3.0]]), "key": tf.constant(["k"])}
    for inputs in ([a, b], {"b": b, "a": a}):
        assert float(call(keras.Model(inputs, difference), features)[0, 0]) == 2.0
    assert float(call(keras.Model(a, keras.layers.Identity()(a)), features)[0, 0]) == 3.0


def test_call_pads_ragged_features_and_any_other_model_gets_all():
    class Total(tf.Module):
        def __call__(self, features):
            return {name: tf.reduce_sum(value, axis=1) for name, value in features.items()}

    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    assert call(Total(), {"x": ragged})["x"].numpy().tolist() == [1.0, 5.0]

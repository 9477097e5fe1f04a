"""Whose fault an error is, and what of its traceback is shown."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from trainers.job.failures import FailureClass
from trainers.runtime.blame import blame, user_traceback
from trainers.runtime.strategies import UnsupportedJob


def tensorflow_error(name: str, message: str) -> Exception:
    import tensorflow as tf

    error = getattr(tf.errors, name)(None, None, message)
    assert isinstance(error, Exception)
    return error


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        ("UnavailableError", "Socket closed", "PEER_LOST"),
        ("AbortedError", "The peer restarted", "PEER_LOST"),
        ("InvalidArgumentError", "Unable to find a context_id matching the specified one", "PEER_LOST"),
        ("InvalidArgumentError", "logits and labels must have the same first dimension", "USER"),
        ("ResourceExhaustedError", "OOM when allocating tensor", "OOM"),
        ("ResourceExhaustedError", "step-3.data; No space left on device", "INFRA"),
        ("UnknownError", "Could not start gRPC server", "INFRA"),
        ("DataLossError", "corrupted record at 12", "DATA"),
    ],
)
def test_whose_fault_an_error_of_tensorflow_is(name: str, message: str, expected: str) -> None:
    failure = blame(tensorflow_error(name, message), role="chief", index=0)
    assert (failure.failure_class.value, failure.replica) == (expected, "chief-0")
    assert message in failure.reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "INFRA"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OOM"),
        (MemoryError(), "OOM"),
        (KeyError("x"), "USER"),
        (UnsupportedJob("not yet"), "CONFIG"),
    ],
)
def test_whose_fault_other_errors_are(error: Exception, expected: str) -> None:
    failure = blame(error)
    assert failure.failure_class is FailureClass(expected)


def test_an_error_of_a_workers_dataset_is_unwrapped() -> None:
    wrapper = RuntimeError("closure input")
    wrapper.original_exception = tensorflow_error("DataLossError", "corrupted record")  # type: ignore[attr-defined]
    assert blame(wrapper).failure_class is FailureClass.DATA


def test_the_reason_of_a_graph_error_is_what_went_wrong() -> None:
    head = "Graph execution error:\n\nDetected at node x defined at\n  File a.py\n\n"
    text = head + "Incompatible shapes\n\t [[{{node x}}]]"
    assert (
        blame(tensorflow_error("InvalidArgumentError", text)).reason
        == "InvalidArgumentError: Incompatible shapes"
    )


def test_a_traceback_begins_with_the_users_own_frames(write_module: Callable[[str, str], str]) -> None:
    import importlib

    import tensorflow as tf

    name = write_module(
        "raises",
        """
        import json
        def outer(text):
            try:
                return json.loads(text)
            except ValueError as e:
                raise KeyError("no such thing") from e
        def in_graph(x):
            if x > 0:
                raise ValueError("wrong in user code")
        """,
    )
    module = importlib.import_module(name)
    with pytest.raises(KeyError) as outer:
        module.outer("{")
    text = user_traceback(outer.value)
    assert text.count("raises.py") == 2
    assert "site-packages" not in text
    assert text.rstrip().endswith("KeyError: 'no such thing'")
    with pytest.raises(ValueError, match="wrong in user code") as in_graph:
        tf.function(module.in_graph)(1)
    failure = blame(in_graph.value)
    assert failure.reason == "ValueError: wrong in user code"
    assert "raises.py" in failure.detail
    with pytest.raises(tf.errors.InvalidArgumentError) as eager:
        tf.reshape(tf.zeros([4]), [3])
    assert "test_runtime_blame.py" in user_traceback(eager.value)

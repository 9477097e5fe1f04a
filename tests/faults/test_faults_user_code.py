"""Trainer modules that fail, in every place and way: the job ends with one card that shows the user's lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import LIMIT, assert_arrived, card_of
from trainers.runtime.checkpoints import known_checkpoints

pytestmark = pytest.mark.slow

DIGITS = "from trainers.models.digits import build_model, loss, optimizer\n"


@pytest.mark.parametrize(
    ("where", "text", "reason", "shown"),
    [
        (
            "model",
            "from trainers.models.digits import loss\n"
            "def build_model(hparams):\n    raise KeyError('filters')  # mine\n",
            "KeyError: 'filters'",
            "raise KeyError('filters')  # mine",
        ),
        (
            "dataset",
            DIGITS + "def make_dataset(records, ctx):\n    return records.nothing  # mine\n",
            "has no attribute 'nothing'",
            "return records.nothing  # mine",
        ),
        (
            "mapped",
            DIGITS + "import tensorflow as tf\n"
            "def make_dataset(records, ctx):\n"
            "    data = tf.data.Dataset.range(10)\n"
            "    return data.map(lambda x: tf.ensure_shape(x, [7]))  # mine\n",
            "",
            "# mine",
        ),
        ("importing", "import no_such_library  # mine\n", "No module named 'no_such_library'", "# mine"),
        ("syntax", "def build_model(hparams)  # mine\n", "SyntaxError", "# mine"),
        (
            "leaving",
            DIGITS + "import sys\ndef make_dataset(records, ctx):\n    sys.exit(3)  # mine\n",
            "SystemExit: 3",
            "sys.exit(3)  # mine",
        ),
    ],
)
def test_an_error_of_the_user_is_not_retried(
    gang: Callable, user_module: Callable, where: str, text: str, reason: str, shown: str
) -> None:
    run = gang("local", trainer=f"wrong_{where}", env=user_module(f"wrong_{where}", text), steps=10)
    run.start()
    failure = card_of(run, run.wait(LIMIT), "USER")
    assert reason in failure.reason
    assert shown in failure.detail
    assert "site-packages" not in failure.detail
    card = failure.card()
    assert card.index(shown) < (card.index("log tail:") if failure.log_tail else len(card))
    assert len(run.record.attempts()) == 1


@pytest.mark.parametrize(
    ("name", "line", "failure_class", "reason", "attempts"),
    [
        ("silent", "os._exit(0)", "USER", "exited with 0, but the record does not say", 1),
        ("strange", "os._exit(7)", "INFRA", "exited with 7 (failure 2 of its class)", 2),
        ("aborting", "os.abort()", "INFRA", "ended by SIGABRT (failure 2 of its class)", 2),
        ("crashing", "ctypes.string_at(0)", "INFRA", "ended by SIGSEGV (failure 2 of its class)", 2),
        ("greedy", "raise MemoryError('50 GiB')", "OOM", "MemoryError: 50 GiB (failure 2 of its class)", 2),
    ],
)
def test_user_code_that_ends_the_process(
    gang: Callable,
    user_module: Callable,
    name: str,
    line: str,
    failure_class: str,
    reason: str,
    attempts: int,
) -> None:
    env = user_module(
        name, f"{DIGITS}import ctypes, os\ndef make_dataset(records, ctx):\n    {line}  # mine\n"
    )
    caps = {failure_class: 1} if attempts > 1 else {}
    run = gang("local", trainer=name, env=env, steps=10, caps=caps, retries=3)
    run.start()
    failure = card_of(run, run.wait(LIMIT), failure_class)
    assert failure.reason.endswith(reason) or reason in failure.reason
    assert [a.failure_class for a in run.record.attempts()] == [failure_class] * attempts
    if name in ("aborting", "crashing"):
        # Where Python was when native code died.
        assert f"{name}.py" in "\n".join(failure.log_tail)


def test_weights_that_go_to_nan_leave_the_last_good_checkpoint(gang: Callable, user_module: Callable) -> None:
    env = user_module(
        "diverging",
        """
        import keras, tensorflow as tf
        from trainers.models.digits import build_model, optimizer

        class Diverging(keras.losses.SparseCategoricalCrossentropy):
            calls = None

            def call(self, y_true, y_pred):
                if Diverging.calls is None:
                    with tf.init_scope():
                        Diverging.calls = tf.Variable(0)
                value = super().call(y_true, y_pred)
                bad = tf.where(Diverging.calls.assign_add(1) > 60, float("nan"), 1.0)
                return value * bad

        def loss(hparams):
            return Diverging(from_logits=True)
        """,
    )
    run = gang("local", trainer="diverging", env=env, steps=500, checkpoint_every=20)
    run.start()
    failure = card_of(run, run.wait(LIMIT), "USER")
    assert "became NaN or infinite" in failure.reason
    assert "the last good checkpoint is kept" in failure.card()
    assert len(run.record.attempts()) == 1
    kept = known_checkpoints(run.record.folder / "checkpoints")
    assert kept == ["step-20", "step-40", "step-60"]


def test_a_thread_of_the_user_that_never_ends_holds_nothing_up(
    gang: Callable, user_module: Callable, tmp_path: Path
) -> None:
    """Nor does a process that it has put into a session of its own."""
    env = user_module(
        "threaded",
        f"""
        import subprocess, threading, time
        {DIGITS}
        def _forever():
            while True:
                time.sleep(1)
        def make_dataset(records, ctx):
            from trainers.runtime.datasets import default_dataset
            threading.Thread(target=_forever).start()
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            return default_dataset(records, ctx, ["image"])
        """,
    )
    run = gang("local", trainer="threaded", env=env, steps=30)
    run.start()
    assert_arrived(run, run.wait(LIMIT), 30)


def test_user_code_that_hangs_is_shown_where(gang: Callable, user_module: Callable) -> None:
    env = user_module(
        "hanging", f"{DIGITS}import time\ndef make_dataset(records, ctx):\n    time.sleep(600)  # mine\n"
    )
    run = gang(
        "local",
        trainer="hanging",
        env=env,
        steps=30,
        caps={"STALLED": 0},
        budgets={"start": 8.0, "stall": 4.0},
    )
    run.start()
    failure = card_of(run, run.wait(LIMIT), "STALLED")
    assert "no step for" in failure.reason
    assert "hanging.py" in (run.record.folder / "stacks" / "chief-0-0001.txt").read_text()
    assert "stacks" in failure.hint

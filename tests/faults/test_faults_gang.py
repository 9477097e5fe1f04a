"""Gangs of real processes: they train, they are killed, they arrive; nothing of them is left."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.faults.conftest import LIMIT, assert_arrived
from trainers.job import termination
from trainers.job.record import JobRecord
from trainers.job.times import time_split
from trainers.runtime.loopback import listeners
from trainers.runtime.restore import load_trained

pytestmark = pytest.mark.slow


def accuracy(folder: Path, manifest: Path) -> float:
    """On the held-out digits."""
    from trainers.records.read import Dataset

    model = load_trained(folder).model
    (batch,) = Dataset.open(manifest).dataset("eval", 1000)
    return float(np.mean(np.argmax(model(batch["image"]), axis=-1) == batch["label"].numpy()))


def first_asked(record: JobRecord) -> float:
    """When the job was asked for."""
    return float(json.loads((record.folder / "generations" / "0001.json").read_text())["at"])


def test_parameter_servers_and_a_killed_worker(gang: Callable, digits_manifest: Path) -> None:
    run = gang(workers=2, ps=1, steps=1200, checkpoint_every=400, cold=True)
    run.start()
    run.until_step(50)
    trainers = [run.trainer_pid(replica.role.value, replica.index) for replica in run.plan.replicas]
    found = {host for pid in trainers for host, _ in listeners(pid)}
    assert found in ({"::ffff:7f00:1"}, {"::ffff:127.0.0.1"})  # as Python before and since 3.13 shows it
    run.kill_trainer("worker", 1)
    killed_at = run.until_step(50)
    result = run.wait(LIMIT)
    assert_arrived(run, result, 1200)
    assert killed_at < 1200
    first, second = run.record.attempts("worker", 1)
    assert (first.signal, first.failure_class, second.failure_class) == (9, "INFRA", None)
    assert len(run.record.attempts("chief", 0)) == 1
    assert accuracy(run.record.folder, digits_manifest) > 0.95


def test_a_killed_chief_and_a_killed_parameter_server(
    gang: Callable, tmp_path: Path, digits_manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a weight that is cut over both servers."""
    (tmp_path / "wide.py").write_text(
        textwrap.dedent(
            """
            import keras
            from trainers.models.digits import loss

            def build_model(hparams):
                image = keras.Input((8, 8, 1), dtype="uint8", name="image")
                x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
                x = keras.layers.Dense(2048, activation="relu")(x)      # 512 KiB
                return keras.Model(image, keras.layers.Dense(10)(x))
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = gang(
        workers=2,
        ps=2,
        steps=800,
        checkpoint_every=100,
        trainer="wide",
        env={"PYTHONPATH": str(tmp_path)},
        cold=True,
    )
    run.start()
    run.until(lambda: (run.record.folder / "checkpoints" / "checkpoint").exists())
    run.kill_trainer("chief")
    run.until(lambda: len(run.record.attempts("chief", 0)) == 2)
    run.until_step(210)
    run.kill_trainer("ps", 1)
    result = run.wait(LIMIT)
    assert_arrived(run, result, 800)
    chief = run.record.attempts("chief", 0)
    assert (chief[0].failure_class, chief[1].failure_class) == ("INFRA", "PEER_LOST")
    attempts = [len(run.record.attempts(*replica)) for replica in (("worker", 0), ("ps", 0), ("ps", 1))]
    assert attempts == [1, 1, 2]
    starts = [line for line in run.log("chief-0").splitlines() if "from step" in line]
    resumed = [int(line.split("from step ")[1].split()[0]) for line in starts]
    assert resumed[0] == 0
    assert 100 <= resumed[1] <= resumed[2]
    split = time_split(run.record)
    assert result.outcome is not None
    assert sum(split.values()) == pytest.approx(result.outcome.at - first_asked(run.record), abs=0.5)
    assert split["restarts"] > 0
    assert min(split[name] for name in ("start", "init", "train", "checkpoint")) > 0
    assert accuracy(run.record.folder, digits_manifest) > 0.95


def test_an_error_in_user_code_ends_the_gang_with_its_own_traceback(
    gang: Callable, tmp_path: Path, digits_manifest: Path
) -> None:
    (tmp_path / "wrong_loss.py").write_text(
        textwrap.dedent(
            """
            import keras
            from trainers.models.digits import build_model

            def loss(hparams):
                return WrongLoss()

            class WrongLoss(keras.losses.Loss):
                def call(self, y_true, y_pred):
                    raise ValueError("labels must be one-hot")  # the user's own mistake
            """
        )
    )
    run = gang(workers=1, ps=1, steps=100, trainer="wrong_loss", env={"PYTHONPATH": str(tmp_path)})
    run.start()
    result = run.wait(LIMIT)
    assert result.exit_codes == {"chief-0": 81, "worker-0": 81, "ps-0": 81}
    assert result.outcome is not None
    failure = result.outcome.failure
    assert failure is not None
    assert failure.reason == "ValueError: labels must be one-hot"
    assert "wrong_loss.py" in failure.detail
    assert 'raise ValueError("labels must be one-hot")' in failure.detail
    assert "site-packages" not in failure.detail
    for name in run.exit_codes:
        said = termination.parse(run.termination_file(name).read_text())
        assert said is not None
        assert said.failure is not None
        assert said.failure.replica == "chief-0"
    assert run.leftovers() == []


def test_all_reduce_and_a_killed_peer(gang: Callable, digits_manifest: Path) -> None:
    run = gang("multi_worker", workers=1, steps=1200, checkpoint_every=100, cold=True)
    run.start()
    run.until_step(120)
    run.kill_trainer("worker")
    result = run.wait(LIMIT)
    assert_arrived(run, result, 1200)
    assert run.record.generation().number == 2
    assert run.record.generation().by in ("worker-0", "chief-0")
    assert accuracy(run.record.folder, digits_manifest) > 0.95


def test_several_devices_in_one_process(gang: Callable, digits_manifest: Path) -> None:
    run = gang("mirrored", devices=2, steps=300, seed=1)
    run.start()
    assert_arrived(run, run.wait(LIMIT), 300)
    assert accuracy(run.record.folder, digits_manifest) > 0.95


def test_a_damaged_record_is_named(gang: Callable, tmp_path: Path, digits_manifest: Path) -> None:
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(digits_manifest.parent, folder)
    shard = next(folder.glob("train-*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    run = gang(workers=1, ps=1, steps=100, manifest=folder / "manifest.json")
    run.start()
    result = run.wait(LIMIT)
    assert set(result.exit_codes.values()) == {82}, result
    assert result.outcome is not None
    assert result.outcome.failure is not None
    assert "is damaged at record" in result.outcome.failure.reason
    assert shard.name in result.outcome.failure.reason


def test_launchers_in_a_warm_interpreter_fork_their_trainers(gang: Callable) -> None:
    """As the process kubelet starts them: forked from a process that has TensorFlow imported."""
    run = gang(workers=1, ps=1, steps=100)
    program = """
    import json, os, sys
    from trainers.lean import import_tensorflow
    import_tensorflow()
    from trainers.runtime import launcher
    pids = []
    for env in json.loads(sys.argv[1]):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(env)
            os._exit(launcher.main())
    print("codes", [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    """
    envs = [
        {**r.env, "TRAINYARD_TERMINATION_LOG": str(run.termination_file(r.replica))}
        for r in run.plan.replicas
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",  # Python 3.12 and later: OpenBLAS has threads
            "-c",
            textwrap.dedent(program),
            json.dumps(envs),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert "codes [0, 0, 0]" in done.stdout, done.stdout + done.stderr
    outcome = run.record.outcome()
    assert outcome is not None
    assert outcome.step == 100
    assert outcome.seconds["start"] < 3.0  # nothing was imported again
    assert "chief-0 is done" in done.stdout

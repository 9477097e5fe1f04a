"""Event files, read back by TensorBoard's own accumulator."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

from trainers.job.plan import Plan
from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind
from trainers.runtime import run as run_module
from trainers.runtime.evaluator import Evaluator
from trainers.runtime.heartbeat import Progress
from trainers.runtime.loop import LeftEarly
from trainers.runtime.run import train
from trainers.runtime.summaries import (
    EventWriter,
    SummarySettings,
    TrainSummaries,
    model_graph,
    summary_folder,
)


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def values(accumulator: EventAccumulator, tag: str) -> dict[int, float]:
    """A tag's figures by step; a step that is there twice is a failure."""
    events = accumulator.Scalars(tag)
    assert len({event.step for event in events}) == len(events)
    return {event.step: event.value for event in events}


def train_here(plan: Plan) -> JobRecord:
    record = JobRecord.open(plan.job.output)
    train(record, plan, plan.replica(RoleKind.CHIEF, 0))
    return record


def test_a_run_in_one_process(digits_jobs: Any) -> None:
    plan = digits_jobs.plan(
        steps=330, summary_every=50, histogram_every=100, evaluator=True, learning_rate=0.003
    )
    record = train_here(plan)
    Evaluator(record, plan, plan.replica(RoleKind.EVALUATOR, 0)).run()
    found = read(summary_folder(record.folder, "train"))
    figures = {"loss", "examples_per_s", "input_wait_share", "learning_rate"}
    assert set(found.Tags()["scalars"]) == figures
    weights = found.Tags()["histograms"]
    assert len(weights) == 8  # kernels and biases of two convolutions and two dense layers
    assert all(tag.startswith("weights/") for tag in weights)
    loss = values(found, "loss")
    assert list(loss) == [50, 100, 150, 200, 250, 300, 330]
    outcome = record.outcome()
    assert outcome is not None
    assert loss[330] == pytest.approx(outcome.metrics["loss"])
    assert loss[330] < loss[50]
    assert list(values(found, "learning_rate").values()) == pytest.approx([0.003] * 7)
    assert all(0 <= share <= 1 for share in values(found, "input_wait_share").values())
    kernel = next(tag for tag in weights if tag.endswith("logits/kernel"))
    drawn = {event.step: event.histogram_value for event in found.Histograms(kernel)}
    assert list(drawn) == [100, 200, 300]
    assert all(histogram.num == sum(histogram.bucket) == 32 * 10 for histogram in drawn.values())
    assert drawn[100].sum != drawn[300].sum
    assert found.Tags()["graph"]
    assert any("logits" in node.name for node in found.Graph().node)

    after = read(summary_folder(record.folder, "eval"))
    assert {"loss", "accuracy"} <= set(after.Tags()["scalars"])
    assert values(after, "accuracy")[330] > 0.9


def test_a_run_that_goes_on_repeats_no_step(digits_jobs: Any) -> None:
    """The first life wrote beyond its last checkpoint, as one that was killed has."""
    plan = digits_jobs.plan(steps=300, summary_every=20)
    record = JobRecord.open(plan.job.output)
    run = run_module._Run(record, plan, plan.replica(RoleKind.CHIEF, 0))

    def stop_soon() -> None:
        while run.progress.step < 60:
            pass
        run.stop.set()

    thread = threading.Thread(target=stop_soon)
    thread.start()
    with pytest.raises(LeftEarly):
        run.train(None)
    thread.join()
    saved = run.progress.step
    folder = summary_folder(record.folder, "train")
    beyond = EventWriter(folder, begin=saved)
    for step in range(saved + 1, saved + 50):
        beyond.scalars(step, {"loss": 99.0})
    beyond.close()
    assert max(values(read(folder), "loss").values()) == 99.0
    again = run_module._Run(record, plan, plan.replica(RoleKind.CHIEF, 0))
    again.train(None)
    assert len(list(folder.iterdir())) == 3
    loss = values(read(folder), "loss")
    assert max(loss.values()) < 99.0
    assert list(loss) == list(range(20, 301, 20))


def test_off_by_a_setting(digits_jobs: Any) -> None:
    plan = digits_jobs.plan(steps=20, summary_every=10, tensorboard=False, evaluator=True)
    record = train_here(plan)
    Evaluator(record, plan, plan.replica(RoleKind.EVALUATOR, 0)).run()
    assert not (record.folder / "tensorboard").exists()


def test_by_default_figures_come_by_time_and_at_the_end(digits_jobs: Any) -> None:
    record = train_here(digits_jobs.plan(steps=40))
    loss = values(read(summary_folder(record.folder, "train")), "loss")
    assert 40 in loss


def test_steps_are_left_room_for() -> None:
    both = SummarySettings(summary_every=50, histogram_every=30)
    assert [both.room(step) for step in (0, 10, 30, 49, 60)] == [30, 20, 20, 1, 30]
    assert SummarySettings().room(7) > 10**8
    assert SummarySettings(on=False, summary_every=50).room(7) > 10**8
    peer = TrainSummaries(both, Progress(100, 1))
    peer.after(30)
    peer.close(100)
    assert peer.room(0) == 30


def test_a_disk_that_is_full_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "train").write_text("no folder")
    writer = EventWriter(tmp_path / "train" / "x")
    for step in range(500):
        writer.scalars(step, {"loss": 1.0})
    writer.close()
    assert "no more event files for TensorBoard" in caplog.text


def test_what_is_too_much_for_the_disk_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = EventWriter(tmp_path)
    held, entered = threading.Event(), threading.Event()

    def slow() -> Any:
        entered.set()
        held.wait()
        return Event()

    writer._queue.put(slow)
    entered.wait()
    for step in range(100):
        writer.scalars(step, {"loss": 1.0})
    held.set()
    writer.close()
    assert caplog.text.count("event files fall behind") == 1
    assert "what is due from step 64 on is left out" in caplog.text
    assert list(values(read(tmp_path), "loss")) == list(range(64))


def test_a_model_whose_graph_can_not_be_drawn(caplog: pytest.LogCaptureFixture) -> None:
    import keras

    class Odd(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                raise ValueError("only for training")
            return keras.KerasTensor(x.shape, x.dtype)

        def compute_output_spec(self, x: Any, training: bool = False) -> Any:
            return keras.KerasTensor(x.shape, x.dtype)

    x = keras.Input((2,), name="x")
    assert model_graph(keras.Model(x, Odd()(x))) is None
    assert "no graph for TensorBoard: ValueError" in caplog.text
    assert model_graph(object()) is None


@pytest.mark.parametrize(
    ("args", "field"), [({"tensorboard": "no"}, "tensorboard"), ({"histogram_every": 0}, "histogram_every")]
)
def test_wrong_settings_are_refused_by_name(jobs: Any, args: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        jobs.plan(**args)


def test_histograms_of_odd_arrays(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    odd = {"empty": [], "one": [3.0], "nan": [1.0, float("nan"), float("inf")], "whole": [[1, 2], [3, 4]]}
    writer.histograms(1, odd)
    writer.close()
    found = read(tmp_path)
    counts = {tag: found.Histograms(tag)[0].histogram_value.num for tag in odd}
    assert counts == {"empty": 0, "one": 1, "nan": 1, "whole": 4}

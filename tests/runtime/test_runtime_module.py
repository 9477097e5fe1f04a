"""The trainer module, its context, and the data that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainers.job.errors import ConfigError, InvalidSpec
from trainers.job.spec import RoleKind, Strategy, TrainingJob, standard_roles
from trainers.runtime.context import context_of
from trainers.runtime.datasets import NoRecords, make_dataset, model_features, open_records
from trainers.runtime.module import UnusableTrainer, load_module


@pytest.mark.parametrize(
    ("strategy", "args", "devices", "rate", "global_batch"),
    [
        ("local", {}, 1, 0.1, 8),
        ("mirrored", {"learning_rate_scaling": "linear"}, 4, 0.4, 32),
        ("multi_worker", {"learning_rate_scaling": "sqrt"}, 1, 0.2, 32),
        ("parameter_server", {"learning_rate_scaling": "linear"}, 1, 0.1, 8),
    ],
)
def test_the_context_scales_the_learning_rate(
    strategy: str, args: dict[str, Any], devices: int, rate: float, global_batch: int
) -> None:
    kind = Strategy.from_dict(strategy)
    job = TrainingJob(
        "job",
        "trainer",
        args={"batch_size": 8, "learning_rate": 0.1, **args},
        roles=standard_roles(kind, workers=3, ps=1),
        strategy=kind,
        output="/nowhere",
    )
    ctx = context_of(job, RoleKind.CHIEF, 0, devices=devices)
    assert ctx.learning_rate == pytest.approx(rate)
    assert ctx.global_batch == global_batch
    if strategy == "multi_worker":
        assert (ctx.shard, context_of(job, RoleKind.WORKER, 2).shard) == ((0, 4), (3, 4))
    else:
        assert ctx.shard == (0, 1)


def test_a_wrong_scaling_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidSpec, match=r"learning_rate_scaling must be one of none, linear, sqrt, got 'cubic'"
    ):
        TrainingJob("job", "trainer", args={"learning_rate_scaling": "cubic"}, output="/nowhere")


def test_workers_of_parameter_servers_shuffle_by_seeds_of_their_own() -> None:
    strategy = Strategy.from_dict("parameter_server")
    roles = standard_roles(strategy, workers=1, ps=1)
    job = TrainingJob("job", "trainer", args={"seed": 1}, roles=roles, strategy=strategy, output="/nowhere")
    ctx = context_of(job, RoleKind.CHIEF, 0)
    assert len({int(ctx.shuffle_seed()) for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def loss(hparams): pass", "has no function build_model"),
        ("def build_model(hparams): pass\nloss = 3", "has no function loss"),
    ],
)
def test_a_module_that_lacks_something_is_refused(
    write_module: Callable[[str, str], str], text: str, message: str
) -> None:
    with pytest.raises(UnusableTrainer, match=message):
        load_module(write_module("lacking", text))


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(UnusableTrainer, match=r"there is no trainer module 'trainers\.models\.nobody'"):
        load_module("trainers.models.nobody")


def test_a_module_whose_import_fails_shows_its_own_error(write_module: Callable[[str, str], str]) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_module(write_module("fails", "import no_such_package"))


def test_what_a_module_may_leave_out(write_module: Callable[[str, str], str]) -> None:
    module = load_module(write_module("least", "def build_model(hparams): pass\ndef loss(hparams): pass"))
    assert (module.name, module.metrics({}), module.classes, module.make_dataset) == ("least", [], None, None)
    assert float(module.optimizer({}, 0.5).learning_rate) == 0.5
    digits = load_module("trainers.models.digits")
    assert digits.classes == [str(i) for i in range(10)]
    assert [metric.name for metric in digits.metrics({})] == ["accuracy"]


def test_a_model_with_an_input_that_no_record_has(digits_jobs: Any) -> None:
    import keras

    records = open_records(digits_jobs.plan().job)
    picture = keras.Input((8, 8, 1), name="picture")
    with pytest.raises(ConfigError, match=r"inputs \['picture'\] that the records in .* do not hold"):
        model_features(keras.Model(picture, keras.layers.Flatten()(picture)), records)
    assert model_features(object(), records) == ["image"]


def test_no_records_and_no_dataset(jobs: Any) -> None:
    job = jobs.plan().job
    assert open_records(job) is None
    module = load_module("trainers.models.digits")
    with pytest.raises(NoRecords, match="has no records"):
        make_dataset(module, None, None, context_of(job, RoleKind.CHIEF, 0))

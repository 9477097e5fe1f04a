"""What a job trains: the user's model, optimizer and loss, with what the job's settings add to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from trainers.job.errors import ConfigError
from trainers.runtime.averages import Averages
from trainers.runtime.context import TrainerContext
from trainers.runtime.module import TrainerModule, UnusableTrainer
from trainers.runtime.schedules import make_schedule
from trainers.runtime.steps import (
    make_apply,
    make_gradients,
    mean_over_replicas,
    model_inputs,
    trainable_parts,
)

__all__ = ["Training", "UnusableSetting", "build_training", "explain_jit", "make_model", "make_optimizer"]


# By which the messages of XLA's compiler are known.
_OF_XLA = ("uncompilable", "not compilable", "XLA_CPU_JIT", "XLA_GPU_JIT", "XLA compilation")


class UnusableSetting(ConfigError):
    """A setting of the job does not go with its strategy, or with its model."""

    code = "runtime.unusable_setting"


@dataclasses.dataclass(frozen=True)
class Training:
    """A model with what trains it.

    `gradients(batch) -> (mean loss, gradients)` and `apply(mean gradients)` are the halves of a step
    (steps.make_gradients, steps.make_apply); `averages` are the weights' moving averages, or None.
    """

    model: Any
    optimizer: Any
    averages: Averages | None
    gradients: Callable[[Any], tuple[Any, list[Any]]]
    apply: Callable[[list[Any]], None]

    def step(self, replicas: int) -> Callable[[Any], Any]:
        """One step of one of `replicas` that step together: a batch in, its mean loss out; in `strategy.run`."""

        def step(batch: Any) -> Any:
            value, found = self.gradients(batch)
            self.apply(mean_over_replicas(found, replicas))
            return value

        return step

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds beside model and optimizer."""
        return {"average": self.averages.saved()} if self.averages is not None else {}


def build_training(
    module: TrainerModule, strategy: Any, ctx: TrainerContext, data: Callable[[Any], Any]
) -> Training:
    """Build what a job trains, in the scope of its strategy.

    `data(model)` makes the dataset; it is asked for one batch where a model makes its variables when it is first
    called. Raises UnusableTrainer for a model that can't be trained, UnusableSetting for a setting that does not
    go with it.
    """
    settings = ctx.hparams
    jit = bool(settings.get("jit_compile", False))
    if jit and ctx.strategy == "parameter_server":
        raise UnusableSetting(
            "jit_compile does not work with strategy parameter_server: XLA compiles for one device, and the "
            "variables are on others",
            hint="leave jit_compile out, or choose local, mirrored or multi_worker",
        )
    with strategy.scope():
        model = make_model(module, ctx, data)
        optimizer = make_optimizer(module, ctx)
        optimizer.build(trainable_parts(model))
        loss = module.loss(settings)
        momentum = settings.get("ema_momentum")
        averages = None if momentum is None else Averages(model, optimizer, float(momentum))
    return Training(
        model,
        optimizer,
        averages,
        make_gradients(model, loss, optimizer, jit_compile=jit),
        make_apply(model, optimizer, averages),
    )


def explain_jit(error: Exception, ctx: TrainerContext) -> None:
    """Raise UnusableSetting when the loop failed because XLA can't compile the model."""
    import tensorflow as tf

    kinds = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)
    if not ctx.hparams.get("jit_compile") or not isinstance(error, kinds):
        return
    lines = [line.strip() for line in str(error).splitlines()]
    told = next((line for line in lines if any(word in line for word in _OF_XLA)), None)
    if told is not None:
        raise UnusableSetting(
            f"jit_compile: XLA can't compile the model: {told[:300]}",
            hint="text, ragged features and lookups don't compile: make numbers of them in make_dataset, or leave "
            "jit_compile out",
        ) from error


def make_model(module: TrainerModule, ctx: TrainerContext, data: Callable[[Any], Any]) -> Any:
    """The user's model with all its variables made."""
    import keras
    import tensorflow as tf

    precision = ctx.hparams.get("mixed_precision", "float32")
    with _precision(precision):
        model = module.build_model(ctx.hparams, ctx.records)
    where = f"build_model of {module.name}"
    if not isinstance(model, (keras.Model, keras.Layer, tf.Module)):
        raise UnusableTrainer(f"{where} must return a keras.Model or a tf.Module, got {type(model).__name__}")
    if not callable(model):
        raise UnusableTrainer(f"{where} returns a {type(model).__name__} that has no __call__(features)")
    is_keras = isinstance(model, keras.Layer)
    if precision != "float32" and not is_keras:
        raise UnusableSetting(
            f"mixed_precision {precision} works on Keras layers, and {where} returns a {type(model).__name__}",
            hint="cast in the module itself, or leave mixed_precision out",
        )
    unbuilt = is_keras and not all(layer.built for layer in [model, *_layers(model)])
    if unbuilt or not model.trainable_variables:
        # Keras's subclasses, and modules that make variables when they are first called.
        features = next(iter(data(model).take(1)))[0]
        inputs = model_inputs(model, features)
        model(inputs, training=False) if is_keras else model(inputs)
    if not model.trainable_variables:
        raise UnusableTrainer(
            f"{where} returns a model without trainable variables",
            hint="a tf.Module finds tf.Variables and other tf.Modules in its attributes, but no Keras layers: "
            "make the whole a keras.Model then",
        )
    return model


def make_optimizer(module: TrainerModule, ctx: TrainerContext) -> Any:
    """The user's optimizer, or Adam, with the job's schedule, clipping and loss scaling."""
    import keras

    settings = ctx.hparams
    rate: Any = ctx.learning_rate
    if "learning_rate_schedule" in settings:
        rate = make_schedule(rate, settings["learning_rate_schedule"], steps=ctx.steps)
    optimizer = module.optimizer(settings, rate)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UnusableTrainer(
            f"optimizer of {module.name} must return a keras optimizer, got {type(optimizer).__name__}"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for setting, ours in (("gradient_clip_norm", "global_clipnorm"), ("gradient_clip_value", "clipvalue")):
        if setting not in settings:
            continue
        for name in ("clipnorm", "global_clipnorm", "clipvalue"):
            if getattr(inner, name) is not None:
                raise UnusableSetting(
                    f"{setting} is given, and optimizer of {module.name} sets {name} itself",
                    hint="clip in one place",
                )
        setattr(inner, ours, float(settings[setting]))
    if settings.get("mixed_precision") == "float16" and inner is optimizer:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _layers(model: Any) -> list[Any]:
    return list(getattr(model, "_flatten_layers", lambda **_: [])(include_self=False))


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Where Keras layers compute in `name` and keep their weights in float32."""
    import keras

    before = keras.config.dtype_policy()
    if name != "float32":
        keras.config.set_dtype_policy(f"mixed_{name}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)

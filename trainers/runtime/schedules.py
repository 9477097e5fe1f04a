"""The learning rate over the steps of a job, as its `learning_rate_schedule` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["make_schedule"]


def make_schedule(learning_rate: float, schedule: Mapping[str, Any], *, steps: int) -> Any:
    """A `keras.optimizers.schedules.LearningRateSchedule` that rises to `learning_rate` and then falls.

    `schedule` is checked already (trainers.job.training_args); `steps` are the job's. Warm-up is linear (Goyal et
    al. 2017): step 0 gets 1 of `warmup_steps` shares. What follows is counted from its end: cosine (Loshchilov and
    Hutter 2017) down to `final_factor` over `decay_steps` (by default all that are left), exponential by
    `decay_rate` each `decay_steps`. The boundaries of piecewise are steps of the job.
    """
    import keras
    import tensorflow as tf

    warmup = int(schedule.get("warmup_steps", 0))
    kind = schedule["name"]

    def factor(step: Any) -> Any:
        after = tf.maximum(step - warmup, 0.0)
        if kind == "constant":
            return tf.ones_like(step)
        if kind == "cosine":
            final = float(schedule.get("final_factor", 0.0))
            share = tf.minimum(after / float(schedule.get("decay_steps", max(1, steps - warmup))), 1.0)
            return final + (1.0 - final) * 0.5 * (1.0 + tf.cos(tf.constant(3.14159265358979) * share))
        if kind == "exponential":
            periods = after / float(schedule["decay_steps"])
            if schedule.get("staircase", False):
                periods = tf.floor(periods)
            return tf.pow(float(schedule["decay_rate"]), periods)
        boundaries = tf.constant(schedule["boundaries"], tf.float32)
        return tf.gather(
            tf.constant(schedule["factors"], tf.float32),
            tf.reduce_sum(tf.cast(step >= boundaries, tf.int32)),
        )

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        """`learning_rate` times the share of the warm-up that is done, times what the kind says."""

        def __call__(self, step: Any) -> Any:
            step = tf.cast(step, tf.float32)
            warm = tf.minimum((step + 1.0) / warmup, 1.0) if warmup else 1.0
            return learning_rate * warm * factor(step)

        def get_config(self) -> dict[str, Any]:
            return {"learning_rate": learning_rate, "schedule": dict(schedule), "steps": steps}

    return Schedule()

"""The arguments that the loop knows are checked when the job is made."""

import pytest

from trainers.job.errors import InvalidSpec
from trainers.job.spec import TrainingJob

SCHEDULE = "learning_rate_schedule"

GOOD = [
    {"steps": 1, "batch_size": 1, "loss_every": 1, "devices": 2, "seed": 0, "learning_rate": 1},
    {"gradient_clip_norm": 1, "ema_momentum": 0.5, "jit_compile": False, "mixed_precision": "float16"},
    {"gradient_clip_value": 0.5, "learning_rate_scaling": "sqrt", "anything": {"of": ["the", "user"]}},
    {SCHEDULE: {"name": "constant", "warmup_steps": 0}},
    {SCHEDULE: {"name": "cosine", "warmup_steps": 10, "decay_steps": 90, "final_factor": 0}},
    {SCHEDULE: {"name": "exponential", "decay_steps": 10, "decay_rate": 0.5, "staircase": True}},
    {SCHEDULE: {"name": "piecewise", "boundaries": [5, 10], "factors": [1, 0.5, 0]}},
]

BAD = [
    ({"steps": 0}, "steps must be a whole number of 1 or more, got 0"),
    ({"devices": True}, "devices must be a whole number of 1 or more, got True"),
    ({"loss_every": 0.5}, "loss_every must be a whole number"),
    ({"seed": "one"}, "seed must be a whole number, got 'one'"),
    ({"learning_rate": -1.0}, "learning_rate must be a number above 0, got -1.0"),
    ({"gradient_clip_norm": 0}, "gradient_clip_norm must be a number above 0, got 0"),
    ({"gradient_clip_norm": 1, "gradient_clip_value": 2}, "gradient_clip_value must be left out where"),
    ({"ema_momentum": 1}, "ema_momentum must be a number above 0 and below 1, got 1"),
    ({"jit_compile": "yes"}, "jit_compile must be true or false, got 'yes'"),
    (
        {"mixed_precision": "float8"},
        "mixed_precision must be one of float32, bfloat16, float16, got 'float8'",
    ),
    ({"learning_rate_scaling": ["linear"]}, "learning_rate_scaling must be one of none, linear, sqrt"),
    ({SCHEDULE: "cosine"}, 'learning_rate_schedule must be an object like {"name": "cosine"'),
    ({SCHEDULE: {}}, "learning_rate_schedule.name must be one of constant, cosine"),
    ({SCHEDULE: {"name": ["cosine"]}}, "learning_rate_schedule.name must be one of"),
    ({SCHEDULE: {"name": "cosine", "decay_rate": 1}}, "learning_rate_schedule must have no fields but"),
    ({SCHEDULE: {"name": "cosine", "warmup_steps": -1}}, "learning_rate_schedule.warmup_steps must be"),
    ({SCHEDULE: {"name": "cosine", "decay_steps": 0}}, "learning_rate_schedule.decay_steps must be"),
    ({SCHEDULE: {"name": "cosine", "final_factor": 2}}, "learning_rate_schedule.final_factor must be"),
    (
        {SCHEDULE: {"name": "exponential", "decay_steps": 5}},
        "learning_rate_schedule.decay_rate must be given",
    ),
    (
        {SCHEDULE: {"name": "exponential", "decay_steps": 5, "decay_rate": 0}},
        "learning_rate_schedule.decay_rate must be a number above 0",
    ),
    (
        {SCHEDULE: {"name": "exponential", "decay_steps": 5, "decay_rate": 1, "staircase": 1}},
        "learning_rate_schedule.staircase must be true or false",
    ),
    ({SCHEDULE: {"name": "piecewise"}}, "learning_rate_schedule.boundaries must be a list of rising steps"),
    (
        {SCHEDULE: {"name": "piecewise", "boundaries": [5, 5], "factors": [1, 1, 1]}},
        "learning_rate_schedule.boundaries must be a list of rising steps",
    ),
    (
        {SCHEDULE: {"name": "piecewise", "boundaries": [5], "factors": [1]}},
        "learning_rate_schedule.factors must be 2 numbers of 0 or more",
    ),
]


@pytest.mark.parametrize("args", GOOD)
def test_taken(args):
    job = TrainingJob("job", "module", args=args)
    assert TrainingJob.from_dict(job.to_dict()) == job


@pytest.mark.parametrize(("args", "words"), BAD)
def test_refused_by_name(args, words):
    with pytest.raises(InvalidSpec) as refused:
        TrainingJob("job", "module", args=args)
    assert words in str(refused.value)

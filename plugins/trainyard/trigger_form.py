"""The trigger form: what people may choose when they start a pipeline, by sections, and how tasks read it.

    @dag(params=form(workers=2, ps=1, steps=400))
    def my_pipeline(): ...

Airflow checks each field against its JSON schema before anything starts (the REST API answers 400 and names
the field). What several fields must agree on is checked by `check_form`, the first task of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Param, task
from airflow.sdk.definitions._internal.mixins import ResolveMixin

from trainers.evaluation.slices import texts
from trainers.job.spec import Strategy, StrategyKind, TrainingJob, standard_roles
from trainers.job.training_args import PRECISIONS
from trainyard.failing import RetryByClass, explained
from trainyard.form_release import judge_by, release_fields

if TYPE_CHECKING:
    from airflow.sdk import Context, Operator
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["DEFAULTS", "FromForm", "check_form", "form", "strategy_of", "training_args_of"]

DEFAULTS: Mapping[str, Any] = {
    "strategy": "parameter_server",
    "workers": 2,
    "ps": 1,
    "sync": False,
    "backup_workers": 0,
    "evaluator": False,
    "steps": 400,
    "batch_size": 64,
    "learning_rate": 0.001,
    "learning_rate_schedule": None,
    "gradient_clip_norm": None,
    "ema_momentum": None,
    "mixed_precision": "float32",
    "seed": 1,
    "metric": "accuracy",
    "min_accuracy": 0.9,
    "max_error": 1.0,
    "max_drop": 0.01,
    "min_examples": 100,
    "max_drop_relative": None,
    "drop_test": "value",
    "slices": [],
    "slice_min": None,
    "slice_max": None,
    "slice_max_drop": None,
    "slice_min_examples": 30,
    "approval": False,
    "keep_versions": 5,
    "canary_share": 0.0,
    "canary_minutes": 10.0,
    "canary_min_requests": 100,
    "override_reason": "",
    "override_author": "",
}
"""What holds where neither the form nor the pipeline says otherwise."""

_STRATEGIES = {
    StrategyKind.PARAMETER_SERVER: "Parameter servers and workers (asynchronous unless synchronous is chosen)",
    StrategyKind.MULTI_WORKER: "Workers that all-reduce (no parameter servers)",
    StrategyKind.MIRRORED: "One machine, all its devices",
    StrategyKind.LOCAL: "One process",
}
_CUSTOM = {StrategyKind.CUSTOM: "As its command knows"}
# Of the fields, what means something to a command; others are there if the pipeline asks for them.
_FOR_COMMANDS = ("strategy", "workers", "steps", "batch_size", "learning_rate", "seed")
_ONLY_IF_GIVEN = ("approval",)  # fields of a pipeline that has a task for them
_REPLICAS, _TRAINING = "Replicas", "Training"


def form(*, max_workers: int = 64, max_ps: int = 16, **defaults: Any) -> dict[str, Param]:
    """The fields of a training pipeline, for `params=` of a DAG.

    `defaults` are values other than those of DEFAULTS; TypeError for a field that there is not. With
    `metric="mae"`, or another error, the gate's fields are `max_error` and `max_drop` in the label's unit. The
    field `approval` is there only if `defaults` has it, for pipelines with `gate(..., approval=FromForm("approval"))`.
    With `strategy="custom"`, for `train(command=...)`, there are the fields for replicas and training that a command
    may want, and those that `defaults` has.
    """
    unknown = sorted(set(defaults) - set(DEFAULTS))
    if unknown:
        raise TypeError(f"the form has no {', '.join(unknown)}; its fields are {', '.join(DEFAULTS)}")
    value = {**DEFAULTS, **defaults}
    strategies = _CUSTOM if value["strategy"] == StrategyKind.CUSTOM.value else _STRATEGIES
    fields: dict[str, dict[str, Any]] = {
        "strategy": {
            "type": "string",
            "enum": [kind.value for kind in strategies],
            "values_display": {kind.value: text for kind, text in strategies.items()},
            "title": "Strategy",
            "section": _REPLICAS,
            "description_md": "How replicas share the work. The chief is always there.",
        },
        "workers": {
            "type": "integer",
            "minimum": 0,
            "maximum": max_workers,
            "title": "Workers",
            "section": _REPLICAS,
            "description_md": "Replicas that compute gradients. Not used by *local* and *mirrored*.",
        },
        "ps": {
            "type": "integer",
            "minimum": 0,
            "maximum": max_ps,
            "title": "Parameter servers",
            "section": _REPLICAS,
            "description_md": "Replicas that hold the variables. Used by *parameter_server* only.",
        },
        "sync": {
            "type": "boolean",
            "title": "Synchronous",
            "section": _REPLICAS,
            "description_md": "Each step waits for the workers' gradients (*parameter_server* only).",
        },
        "backup_workers": {
            "type": "integer",
            "minimum": 0,
            "maximum": max_workers,
            "title": "Backup workers",
            "section": _REPLICAS,
            "description_md": "Of the workers, how many slowest a synchronous step does not wait for.",
        },
        "evaluator": {
            "type": "boolean",
            "title": "Evaluator",
            "section": _REPLICAS,
            "description_md": "One more replica, to evaluate checkpoints on held-out records meanwhile.",
        },
        "steps": {
            "type": "integer",
            "minimum": 1,
            "maximum": 10**9,
            "title": "Steps",
            "section": _TRAINING,
            "description_md": "Batches to train on, over all workers.",
        },
        "batch_size": {
            "type": "integer",
            "minimum": 1,
            "maximum": 2**20,
            "title": "Batch size",
            "section": _TRAINING,
            "description_md": "Examples a step of one worker.",
        },
        "learning_rate": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": 100,
            "title": "Learning rate",
            "section": _TRAINING,
        },
        "learning_rate_schedule": {
            "type": ["object", "null"],
            "title": "Learning rate schedule",
            "section": _TRAINING,
            "description_md": 'Empty: constant. Else as in `{"name": "cosine", "warmup_steps": 100}`.',
        },
        "gradient_clip_norm": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "title": "Clip gradients",
            "section": _TRAINING,
            "description_md": "To this global norm. Empty: not at all.",
        },
        "ema_momentum": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "exclusiveMaximum": 1,
            "title": "Momentum of weight averages",
            "section": _TRAINING,
            "description_md": "As 0.999: moving averages of the weights are evaluated and released. Empty: none.",
        },
        "mixed_precision": {
            "type": "string",
            "enum": list(PRECISIONS),
            "title": "Precision",
            "section": _TRAINING,
            "description_md": "What layers compute in; weights stay float32.",
        },
        "seed": {
            "type": "integer",
            "minimum": 0,
            "maximum": 2**31 - 1,
            "title": "Seed",
            "section": _TRAINING,
            "description_md": "For shuffling and initial weights.",
        },
        **release_fields(),
    }
    for name in _ONLY_IF_GIVEN:
        if name not in defaults:
            del fields[name]
    judge_by(fields, value["metric"])
    if "canary_share" not in defaults:  # only for pipelines whose release has one
        for name in ("canary_share", "canary_minutes", "canary_min_requests"):
            del fields[name]
    wanted = {*_FOR_COMMANDS, *defaults} if strategies is _CUSTOM else set(fields)
    return {name: Param(value[name], **schema) for name, schema in fields.items() if name in wanted}


class FromForm(ResolveMixin):
    """The value of a form's field, to be given to an operator in place of a value.

    It keeps its type, which a template would not. A DAG without that field gets the default.
    """

    def __init__(self, field: str) -> None:
        if field not in DEFAULTS:
            raise TypeError(f"the form has no {field}; its fields are {', '.join(DEFAULTS)}")
        self.field = field

    def iter_references(self) -> Iterator[tuple[Operator, str]]:
        """None: it comes from the run and not from a task."""
        yield from ()

    def resolve(self, context: Context) -> Any:
        """The value in this run."""
        return context["params"].get(self.field, DEFAULTS[self.field])

    def __repr__(self) -> str:
        return f"FromForm({self.field!r})"


class Under(ResolveMixin):
    """A place below a folder that another task names: `Under(trained["job"], "export")`."""

    def __init__(self, folder: Any, name: str) -> None:
        self.folder = folder
        self.name = name

    def iter_references(self) -> Iterator[tuple[Operator, str]]:
        """The task that names the folder."""
        if isinstance(self.folder, ResolveMixin):
            yield from self.folder.iter_references()

    def resolve(self, context: Context) -> str:
        """The path in this run."""
        folder = self.folder.resolve(context) if isinstance(self.folder, ResolveMixin) else self.folder
        return f"{folder}/{self.name}"

    def __repr__(self) -> str:
        return f"Under({self.folder}, {self.name!r})"


def strategy_of(values: Mapping[str, Any]) -> Strategy:
    """The strategy that a form's values say.

    Fields that the chosen kind does not use are left alone: switching the kind needs no other change.
    """
    kind = values["strategy"]
    if kind != StrategyKind.PARAMETER_SERVER.value:
        return Strategy(kind)
    return Strategy(kind, sync=values["sync"], backup_workers=values["backup_workers"])


def training_args_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a form's values are arguments of the job; fields that are empty are left out."""
    args = {name: values[name] for name in ("steps", "batch_size", "learning_rate", "seed")}
    for name in ("learning_rate_schedule", "gradient_clip_norm", "ema_momentum"):
        if values.get(name):
            args[name] = values[name]
    precision = values.get("mixed_precision", "float32")
    return args if precision == "float32" else {**args, "mixed_precision": precision}


@task(task_id="check_form", retries=0, retry_policy=RetryByClass())
@explained
def _check(**context: Any) -> None:
    values = {**DEFAULTS, **context["params"]}
    strategy = strategy_of(values)
    texts(list(values["slices"] or ()))
    if strategy.kind is StrategyKind.CUSTOM:
        return  # what a command makes of its arguments is its own affair
    roles = standard_roles(
        strategy, workers=values["workers"], ps=values["ps"], evaluator=values["evaluator"]
    )
    TrainingJob("form", "form", args=training_args_of(values), roles=roles, strategy=strategy)


def check_form() -> XComArg:
    """The task that refuses a form whose fields don't agree, naming the field; put it before all others."""
    return _check()

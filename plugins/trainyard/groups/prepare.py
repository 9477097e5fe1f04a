"""prepare: raw data to sharded records with a manifest, in one task or in many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import TaskGroup, TriggerRule, task
from airflow.sdk.definitions.xcom_arg import PlainXComArg

from trainers.job.errors import ConfigError
from trainers.job.spec import Resources
from trainyard.assets import records_asset
from trainyard.failing import RetryByClass, explained
from trainyard.groups.steps import MAPPED, for_pods
from trainyard.operators.records import PLAN_KEY, RecordsOperator, RecordsPlanOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["announced_records", "prepare", "prepare_spans"]


def prepare(
    source: Any,
    *,
    name: str,
    label: str = "label",
    key: str | None = None,
    eval_fraction: float = 0.1,
    shards: int = 2,
    slices: int = 1,
    resources: Resources | None = None,
    pod: Mapping[str, Any] | str | None = None,
    task_id: str = "prepare",
    **options: Any,
) -> XComArg:
    """Records of the raw data at `source`: {"manifest", "digest", "counts", ...}.

    `source` is a path, "storage://...", or what a task returned; `name` the dataset's; `label` its label column;
    `key` the column that decides between train and eval by hash, so that a row never changes sides. The same raw
    data and options give the same records, which are then not written again. `options` go to the step as they
    are; `span="{{ ... }}"` says which part of a longer dataset this is, and `window=3` besides returns the dataset
    of that span and the two before it.

    One task does it all. With `slices` above 1 it is a task group: a plan, that many mapped tasks which each
    encode their share of the files and row groups, and one that publishes. The records are the same. `resources`
    is what each of its pods asks for; `pod`, a part of a Pod manifest or a file of one, is laid over each.

    Something new is announced as an event of `records_asset(name)`.
    """
    window = {option: options.pop(option) for option in ("window", "held_out") if option in options}
    spec = {
        "source": source,
        "output": _output(name),
        "name": name,
        "label": label,
        "eval_fraction": eval_fraction,
        "shards": max(shards, slices),
        **({"key": key} if key else {}),
        **options,
    }
    if slices == 1:
        return RecordsOperator(
            task_id=task_id, announces=name, spec={**spec, **window}, **for_pods(resources, pod)
        ).output
    with TaskGroup(task_id):
        plan = RecordsPlanOperator(
            task_id="plan", spec={"step": "plan", "slices": slices, **spec}, **for_pods(resources, pod)
        )
        encode = RecordsOperator.partial(
            task_id="encode", module="trainers.records", **for_pods(resources, pod), **MAPPED
        ).expand_kwargs(plan.output)
        publish = RecordsOperator(
            task_id="publish",
            announces=name,
            spec={"step": "publish", "plan": PlainXComArg(plan, key=PLAN_KEY), **window},
            **for_pods(resources, pod),
            # Without a slice to encode, the dataset being there already, the mapped task is skipped.
            trigger_rule=TriggerRule.NONE_FAILED,
        )
        encode >> publish
    return publish.output


@task(task_id="plan", retry_policy=RetryByClass())
@explained
def _plan_spans(parts: Any, spec: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [dict(part) for part in parts]
    if not rows or any(set(row) != {"span", "source"} for row in rows):
        raise ConfigError(
            f'the parts must be a list of {{"span", "source"}} that is not empty, got {str(rows)[:200]}',
            hint="return such a list from the task that lists the partitions",
        )
    for row in rows:
        print(f"span {row['span']}: {row['source']}")
    return [{"spec": {**spec, **row}, "part": row["span"]} for row in rows]


def prepare_spans(
    parts: Any,
    *,
    name: str,
    label: str = "label",
    key: str | None = None,
    eval_fraction: float = 0.1,
    shards: int = 2,
    held_out: str = "all",
    resources: Resources | None = None,
    pod: Mapping[str, Any] | str | None = None,
    task_id: str = "prepare",
    **options: Any,
) -> XComArg:
    """Records of a window of spans, as a task group: plan -> encode[2013-01, 2013-02, ...] -> window.

    `parts` is a task's list of {"span", "source"}: the partitions of the window, a month each, say. Each is a
    dataset of its own, prepared by a mapped task once; one that is there already costs a look. The window is a
    dataset like any other that refers to theirs. `held_out="newest"` evaluates on what the newest span holds out
    and trains on all else, for spans that are split by time. The rest is as for `prepare`.
    """
    spec = {
        "output": _output(name),
        "name": name,
        "label": label,
        "eval_fraction": eval_fraction,
        "shards": shards,
        **({"key": key} if key else {}),
        **options,
    }
    with TaskGroup(task_id):
        plan = _plan_spans(parts, spec)
        encode = RecordsOperator.partial(
            task_id="encode", module="trainers.records", **for_pods(resources, pod), **MAPPED
        ).expand_kwargs(plan)
        window = RecordsOperator(
            task_id="window",
            announces=name,
            spec={
                "step": "window",
                "output": _output(name),
                "spans": plan.map(_span_of),
                "held_out": held_out,
            },
            **for_pods(resources, pod),
        )
        encode >> window
    return window.output


def _span_of(row: Mapping[str, Any]) -> str:
    return str(row["part"])


def announced_records(name: str, *, task_id: str = "records") -> XComArg:
    """The records that the newest event of `records_asset(name)` announced: {"manifest", "digest", "counts", ...}.

    For a pipeline that is scheduled on data; a run by hand takes the newest that there are.
    """
    asset = records_asset(name)

    @task(task_id=task_id, inlets=[asset], multiple_outputs=True, retry_policy=RetryByClass())
    @explained
    def announced(**context: Any) -> dict[str, Any]:
        events: Sequence[Any] = (
            context["triggering_asset_events"].get(asset) or context["inlet_events"][asset]
        )
        if not len(events):
            raise ConfigError(
                f"nothing has announced records of {name}", hint="run the pipeline that prepares them first"
            )
        found = dict(events[-1].extra)
        print(f"records of {name}: {found.get('span') or found.get('digest')}")
        return found

    return announced()


def _output(name: str) -> str:
    return f"storage://records/{name}"

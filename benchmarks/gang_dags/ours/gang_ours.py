"""The train group with pods that do nothing in its replicas' places: all else is as pipelines have it."""

from __future__ import annotations

import dataclasses
from typing import Any

from airflow.sdk import DAG, TaskGroup, TriggerRule
from gang_pause import CPU, LABEL, command, memory, mounts, setting
from trainyard.failing import RETRIES, RETRY_DELAY, RetryByClass
from trainyard.operators.admit import AdmitOperator
from trainyard.operators.gang import (
    CleanupOperator,
    JobTemplate,
    PlanOperator,
    ServiceOperator,
    VerdictOperator,
)
from trainyard.operators.replica import ReplicaOperator

from trainers.job.resources import Resources


class PausePlan(PlanOperator):
    """The plan of a gang of `size`, each replica with a command that waits; every `fail_each`th fails in the end."""

    def execute(self, context: Any) -> list[dict[str, Any]]:
        """Plan; the rows that replicas are made of."""
        size, run, fail_each = (context["params"][name] for name in ("size", "run", "fail_each"))
        self.template = dataclasses.replace(self.template, fixed={"workers": size - 2, "ps": 1})
        rows = super().execute(context)
        return [
            {
                **row,
                "labels": {**row["labels"], LABEL: run},
                "cmds": command(run, int(bool(fail_each) and i % fail_each == 0)),
            }
            for i, row in enumerate(rows)
        ]


with DAG("gang_ours", schedule=None, params={"size": 4, "run": "", "fail_each": 0}):
    template = JobTemplate(
        name="pause",
        trainer="trainers.models.digits",
        resources={"default": Resources(cpu=CPU, memory=memory())},
        image=setting("IMAGE"),
        pods={"default": mounts()} if mounts() else {},
    )
    with TaskGroup("train"):
        plan = PausePlan(task_id="plan", group="train", template=template, records="/none")
        admit = AdmitOperator(task_id="admit", group="train")
        service = ServiceOperator(task_id="service", group="train")
        replica = ReplicaOperator.partial(
            task_id="replica",
            map_index_template="{{ task.hostname }}",
            retries=int(setting("RETRIES", str(RETRIES))),
            retry_policy=RetryByClass(),
            retry_delay=RETRY_DELAY,
        ).expand_kwargs(plan.output)
        verdict = VerdictOperator(
            task_id="verdict",
            group="train",
            replica_task="train.replica",
            trigger_rule=TriggerRule.ALL_DONE,
        )
        cleanup = CleanupOperator(task_id="cleanup", group="train")
        plan >> admit >> service >> replica >> verdict
        verdict >> cleanup.as_teardown(setups=service)

"""Tasks run on a real cluster without a whole Airflow: operator, trigger and retry policy, in this process.

What a scheduler, a worker and a triggerer do with one task, try after try: execute, wait in an event loop that all
tasks share, come back, and ask the retry policy. It costs nothing but the pods.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred
from airflow.triggers.base import TaskSuccessEvent
from trainyard.failing import RetryByClass, StepFailed
from trainyard.operators.admit import AdmitOperator
from trainyard.operators.gang import (
    CleanupOperator,
    JobTemplate,
    PlanOperator,
    ServiceOperator,
    VerdictOperator,
)
from trainyard.operators.replica import ReplicaOperator
from trainyard.trigger_form import DEFAULTS

from tests.plugins.conftest import StateStore, make_context
from trainers.job.failures import Failure

__all__ = ["Gang", "Story", "in_one_loop", "run_all", "run_one"]

LONGEST_DELAY = 2.0  # seconds before another try; what a policy asks for is for people's clusters


@dataclasses.dataclass
class Story:
    """What became of a task: the failure of each try, whether the last one succeeded, and its result."""

    failures: list[Failure] = dataclasses.field(default_factory=list)
    cards: list[str] = dataclasses.field(default_factory=list)
    succeeded: bool = False
    result: Any = None

    @property
    def classes(self) -> list[str]:
        """The class of each failed try."""
        return [failure.failure_class.value for failure in self.failures]


async def run_one(make: Callable[[], Any], story: Story | None = None) -> Story:
    """Run one task, try after try, its operator made by `make`; what became of it."""
    story = story or Story()
    store = StateStore()
    while True:
        number = len(story.failures) + 1
        context = make_context(make(), store=store, try_number=number)
        try:
            story.result = await _try(make, context)
        except StepFailed as e:
            story.failures.append(e.failure)
            story.cards.append(str(e))
            decision = RetryByClass().evaluate(e, number, 10, context)
            if decision.action.value != "retry" or number > 10:
                return story
            await asyncio.sleep(min(LONGEST_DELAY, decision.retry_delay.total_seconds()))
        else:
            story.succeeded = True
            return story


async def _try(make: Callable[[], Any], context: dict[str, Any]) -> Any:
    try:
        return await asyncio.to_thread(context["task"].execute, context)
    except TaskDeferred as deferred:
        path, kwargs = deferred.trigger.serialize()
    # As Airflow does it: the trigger is made again from its arguments, and so is the operator.
    module, _, name = path.rpartition(".")
    trigger = getattr(importlib.import_module(module), name)(**kwargs)
    (event,) = [event async for event in trigger.run()]
    if isinstance(event, TaskSuccessEvent):  # the triggerer ends it itself
        return None
    operator = make()
    context["task"] = context["ti"].task = operator
    return await asyncio.to_thread(operator.trigger_reentry, context, event.payload)


def run_all(
    tasks: Mapping[str, Callable[[], Any]],
    meanwhile: Callable[[dict[str, Story]], Awaitable[None]] | None = None,
) -> dict[str, Story]:
    """Run all tasks at once, each from a function that makes its operator; `meanwhile` goes beside them."""
    stories = {name: Story() for name in tasks}

    async def all_of_them() -> None:
        beside = asyncio.ensure_future(meanwhile(stories)) if meanwhile else None
        await asyncio.gather(*(run_one(make, stories[name]) for name, make in tasks.items()))
        if beside is not None:
            await beside

    in_one_loop(all_of_them)
    return stories


def in_one_loop(work: Callable[[], Awaitable[None]]) -> None:
    """asyncio.run, after which no connection is open: watches and errands that outlive `work` are ended by it."""

    async def whole() -> None:
        try:
            await work()
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.sleep(0.5)  # TLS connections are closed some turns of the loop later

    asyncio.run(whole())


class Gang:
    """The tasks of a train group, one after the other, replicas side by side; `form` is the trigger form's."""

    def __init__(self, name: str, template: JobTemplate, form: Mapping[str, Any]) -> None:
        self.name = name
        self.job = ""
        self._template = template
        self._form = {**DEFAULTS, **form}
        self.stories: list[Story] = []
        self.waited: list[str] = []
        self.verdict: dict[str, Any] = {}

    def _task(self, operator: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        with DAG(self.name):
            made = operator(task_id=operator.__name__.lower(), **options)
        return made, make_context(made, params=self._form)

    async def run(self) -> None:
        """From plan to cleanup."""
        group = {"group": "train"}
        records = None if self._template.command else {"manifest": "storage://none"}
        plan, context = self._task(PlanOperator, template=self._template, records=records, **group)
        rows = await asyncio.to_thread(plan.execute, context)
        self.job = rows[0]["job"]
        admit, context = self._task(AdmitOperator, **group)
        while not await asyncio.to_thread(admit.poke, context):
            self.waited.append("waited")
            await asyncio.sleep(1)
        service, context = self._task(ServiceOperator, **group)
        await asyncio.to_thread(service.execute, context)
        self.stories = await asyncio.gather(*(run_one(self._replica(row)) for row in rows))
        verdict, context = self._task(VerdictOperator, replica_task="replica", **group)
        try:
            self.verdict = await asyncio.to_thread(verdict.execute, context)
        finally:
            cleanup, context = self._task(CleanupOperator, **group)
            await asyncio.to_thread(cleanup.execute, context)

    def _replica(self, row: dict[str, Any]) -> Any:
        def make() -> ReplicaOperator:
            with DAG(self.name):
                # As different map indexes: a pod is taken up by its labels.
                return ReplicaOperator(task_id=f"replica-{row['hostname']}", **row)

        return make

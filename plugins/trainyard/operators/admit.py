"""AdmitOperator: a gang waits, holding nothing, until there is room for all of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.sdk import BaseSensorOperator, PokeReturnValue

from trainers.job import labels
from trainers.job.failures import Failure, FailureClass
from trainers.job.record import JobRecord, JobState
from trainyard.admission import LEDGER, Decision, Ledger, Quota, demand_of
from trainyard.cluster import core_api
from trainyard.failing import RetryByClass, cards, report
from trainyard.settings import PipelineSettings
from trainyard.shared_files import job_files

if TYPE_CHECKING:
    from pathlib import Path

    from airflow.sdk import Context
    from kubernetes.client import CoreV1Api

    from trainers.job.plan import Plan

__all__ = ["AdmitOperator", "ask", "leave"]

_TIMEOUT = 30  # seconds a request
_TRIES = 20
_POKE_S = 15.0

Result = TypeVar("Result")


class AdmitOperator(BaseSensorOperator):
    """Compare the whole gang with the namespace's quotas, and let it in once it fits.

    It looks again every 15 s and gives its slot back between two looks. With a Kueue queue it is Kueue that admits.
    A gang larger than a quota as a whole fails at once (CONFIG), one that waits longer than `budgets.admit` with what
    it waited for (QUOTA); both end the job.
    """

    ui_color = "#fff3d6"

    def __init__(self, *, group: str, **kwargs: Any) -> None:
        kwargs.setdefault("retry_policy", RetryByClass())
        kwargs.setdefault("mode", "reschedule")
        kwargs.setdefault("poke_interval", _POKE_S)
        # Not what ends the waiting (that is the job's own budget), but what ends a watcher gone wrong.
        kwargs.setdefault("timeout", 30 * 24 * 3600)
        super().__init__(**kwargs)
        self.group = group

    def poke(self, context: Context) -> PokeReturnValue | bool:
        """Look once."""
        settings = PipelineSettings.from_environment()
        folder = settings.job_folder(self.dag_id, labels.run_slug(context["run_id"]), self.group)
        with job_files(folder, "plan.json", "outcome.json"):
            return self._ask(context, folder)

    def _ask(self, context: Context, folder: Path) -> PokeReturnValue | bool:
        with cards(context):
            record = JobRecord.open(folder)
        plan = record.plan()
        if record.outcome() is not None:
            return PokeReturnValue(is_done=True)
        if plan.job.placement.queue:
            print(f"Kueue admits the gang, by queue {plan.job.placement.queue}")
            return PokeReturnValue(is_done=True)
        with cards(context):
            decision, waited = ask(core_api(), plan)
        if decision.admitted:
            print(f"gang {plan.gang} is let in" + (f": {decision.reason}" if decision.reason else ""))
            return PokeReturnValue(is_done=True)
        failure = self._failure(plan, decision, waited)
        if failure is not None:
            leave(core_api(), plan.gang, plan.namespace)
            record.finish(JobState.FAILED, failure=failure)
            raise report(context, failure, final=True)
        print(f"gang {plan.gang} waits since {waited:.0f} s: {decision.reason}")
        return PokeReturnValue(is_done=False)

    def _failure(self, plan: Plan, decision: Decision, waited: float) -> Failure | None:
        if decision.never:
            return Failure(
                FailureClass.CONFIG,
                f"the gang can never be let in: {decision.reason}",
                code="admit.too_large",
                hint="ask for fewer or smaller replicas, or have the quota raised",
            )
        if waited > plan.job.budgets.admit:
            return Failure(
                FailureClass.QUOTA,
                f"the gang was not let in within {plan.job.budgets.admit:g} s: {decision.reason}",
                code="admit.no_room",
                hint="wait until others have ended and clear the task, or raise budgets.admit",
            )
        return None


def ask(api: CoreV1Api, plan: Plan, *, now: float | None = None) -> tuple[Decision, float]:
    """Ask for a gang; the decision, and for how many seconds it has asked. Raises ApiException.

    Without a quota nothing is counted, and every gang is let in.
    """
    from kubernetes.client.exceptions import ApiException

    to_json = api.api_client.sanitize_for_serialization
    namespace = plan.namespace
    try:
        found = api.list_namespaced_resource_quota(namespace, _request_timeout=_TIMEOUT).items
    except ApiException as e:
        if e.status != 403:
            raise
        return Decision(True, f"the quotas of {namespace} may not be read, so nothing is counted"), 0.0
    if not found:
        return Decision(True), 0.0
    quotas = [Quota.of(to_json(row)) for row in found]

    def change(ledger: Ledger) -> tuple[Decision, float]:
        # Read after the ledger: pods that came meanwhile count twice for a moment, and never not at all.
        pods = [to_json(row) for row in api.list_namespaced_pod(namespace, _request_timeout=_TIMEOUT).items]
        moment = time.time() if now is None else now
        decision = ledger.ask(plan.gang, demand_of(plan), quotas, pods, now=moment)
        return decision, moment - (ledger.asked(plan.gang) or moment)

    return _changed(api, namespace, change) or (Decision(False, "the ledger is changed all the time"), 0.0)


def leave(api: CoreV1Api, gang: str, namespace: str) -> None:
    """Give a gang's reservation or place in the queue back, where there is a ledger that may be read."""
    _changed(api, namespace, lambda ledger: ledger.leave(gang))


def _changed(api: CoreV1Api, namespace: str, change: Callable[[Ledger], Result]) -> Result | None:
    """What `change` gives once its ledger could be written; None when somebody else was always faster.

    A change that says False has changed nothing, which is not written.
    """
    from kubernetes.client.exceptions import ApiException

    for _ in range(_TRIES):
        config_map = _read(api, namespace)
        ledger = Ledger.from_data(config_map.data if config_map else None)
        result = change(ledger)
        if result is False:
            return result
        try:
            _write(api, namespace, config_map, ledger)
        except ApiException as e:
            if e.status != 409:
                raise
            time.sleep(random.uniform(0.05, 0.5))
        else:
            return result
    return None


def _read(api: CoreV1Api, namespace: str) -> Any:
    from kubernetes.client.exceptions import ApiException

    try:
        return api.read_namespaced_config_map(LEDGER, namespace, _request_timeout=_TIMEOUT)
    except ApiException as e:
        if e.status not in (403, 404):
            raise
        return None


def _write(api: CoreV1Api, namespace: str, config_map: Any, ledger: Ledger) -> None:
    """Write what was read, changed; ApiException 409 when somebody was faster."""
    if config_map is None:
        body = {
            "metadata": {"name": LEDGER, "labels": {labels.LABEL_MANAGED_BY: labels.MANAGED_BY}},
            "data": ledger.to_data(),
        }
        api.create_namespaced_config_map(namespace, body, _request_timeout=_TIMEOUT)
        return
    config_map.data = ledger.to_data()
    # With its resourceVersion, which makes it conditional.
    api.replace_namespaced_config_map(LEDGER, namespace, config_map, _request_timeout=_TIMEOUT)

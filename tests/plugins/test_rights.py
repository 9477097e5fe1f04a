"""The rights that the manifests give to Airflow: all that a pipeline asks of the Kubernetes API, and no more."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.sdk import DAG
from trainyard.cluster import core_api
from trainyard.failing import StepFailed
from trainyard.kubelet.api import Api
from trainyard.kubelet.resources import RESOURCES
from trainyard.operators.admit import AdmitOperator
from trainyard.operators.gang import CleanupOperator, PlanOperator, ServiceOperator
from trainyard.reaper import find_orphans, remove_orphans
from trainyard.trigger_form import DEFAULTS

from tests.plugins.test_gang_operators import TEMPLATE, _replica
from trainers.job.resources import Resources

ROLE = Path(__file__).parents[2] / "deploy/kubernetes/base/role.yaml"
Rights = set[tuple[str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Rights:
    """(resource, verb) of every request from now on, as Kubernetes' roles name them."""
    seen: Rights = set()
    handle = Api.handle

    def watched(self: Api, request: Any) -> Any:
        parts = request.path.strip("/").removeprefix("apis/batch/").removeprefix("api/").split("/")
        parts = ["", *parts]
        if parts[1:3] == ["v1", "namespaces"] and len(parts) >= 5:
            resource, rest = parts[4], parts[5:]
            verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(
                request.method
            )
            if verb is None:
                verb = "get" if rest else ("watch" if request.flag("watch") else "list")
            elif verb == "delete" and not rest:
                verb = "deletecollection"
            seen.add(("/".join([resource, *rest[1:]]), verb))
        elif parts[1] != "version":
            seen.add((request.path, request.method))
        return handle(self, request)

    monkeypatch.setattr(Api, "handle", watched)
    return seen


def _granted() -> Rights:
    role = next(d for d in yaml.safe_load_all(ROLE.read_text()) if d["kind"] == "Role")
    for rule in role["rules"]:
        assert rule["apiGroups"] == (["batch"] if rule["resources"][0].startswith("jobs") else [""]), rule
    return {(r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]}


def test_what_pipelines_ask_for_is_what_the_role_gives(
    asked: Rights, step: Any, context_of: Any, pipelines: Path, cluster: Any
) -> None:
    good = step('print("hello"); return {"a": 1}')
    assert good.execute(context_of(good)) == {"a": 1}
    shot = step("os.kill(os.getpid(), 9)", task_id="shot")
    with pytest.raises(StepFailed):
        shot.execute(context_of(shot))
    big = Resources(memory="900Ti")
    waits = step("return {}", task_id="big", pod_resources=big, schedule_timeout_seconds=1)
    with pytest.raises(StepFailed):
        waits.execute(context_of(waits))
    with DAG("pipeline", max_active_tasks=8):
        plan = PlanOperator(task_id="plan", group="train", template=TEMPLATE, records="storage://records/m")
        admit = AdmitOperator(task_id="admit", group="train")
        service = ServiceOperator(task_id="service", group="train")
        cleanup = CleanupOperator(task_id="cleanup", group="train")
    plan.execute(context_of(plan, params={**DEFAULTS, "workers": 1, "ps": 1}))
    # A quota put there by nobody's API call, as an administrator would; then one that makes the ledger, one that reads.
    store = cluster.kubelet.store
    quota = {"metadata": {"name": "team", "namespace": "trainyard"}, "spec": {"hard": {"requests.cpu": "90"}}}
    store.create(RESOURCES["resourcequotas"], quota)
    for _ in range(2):
        assert admit.poke(context_of(admit)).is_done
    store.delete(RESOURCES["resourcequotas"], "trainyard", "team")
    service.execute(context_of(service))
    with DAG("pipeline", max_active_tasks=8):
        template = dataclasses.replace(TEMPLATE, indexed_above=1)
        again = PlanOperator(task_id="plan", group="train", template=template, records="storage://records/m")
    group = again.execute(context_of(again, params={**DEFAULTS, "workers": 2, "ps": 1}))[0]
    workers = _replica(group, "pass")
    workers.execute(context_of(workers))
    cleanup.execute(context_of(cleanup))
    api = core_api()
    remove_orphans(api, "trainyard", find_orphans(api, "trainyard", older_than=0))

    granted = _granted()
    assert asked - granted == set(), "a cluster would refuse these"
    # Pods and events are watched by the triggerer, and by Airflow's own executor where that runs there too.
    deferred = {("pods", "watch"), ("events", "watch")}
    # Of the process kubelet no lease is asked; tests/kubernetes does that with these rights.
    leases = {("jobs/status", "patch")}
    assert granted - asked <= deferred | leases, "rights that nobody uses"


def test_the_role_has_nothing_that_would_give_more() -> None:
    for resource, verb in _granted():
        assert "*" not in (resource, verb)
        assert resource not in (
            "secrets",
            "pods/exec",
            "pods/attach",
            "pods/portforward",
            "serviceaccounts/token",
        )


def test_bindings_name_accounts_that_are_there() -> None:
    with contextlib.ExitStack() as stack:
        documents = [
            d
            for name in ("role.yaml", "service-accounts.yaml")
            for d in yaml.safe_load_all(stack.enter_context(ROLE.with_name(name).open()))
        ]
    named = {(d["kind"], d["metadata"]["name"]) for d in documents}
    (binding,) = [d for d in documents if d["kind"] == "RoleBinding"]
    assert {(s["kind"], s["name"]) for s in binding["subjects"]} <= named
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in named
    accounts = [d for d in documents if d["kind"] == "ServiceAccount"]
    assert all(d["automountServiceAccountToken"] is False for d in accounts)

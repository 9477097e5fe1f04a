"""The embedded model server as a Deployment: ready with its model, called while versions and pods come and go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kubernetes.model_servers import STORAGE, ModelServers, for_server, render
from tests.kubernetes.real_cluster import REPO, Tenant, wait_for
from tests.serving.conftest import expected, exports, images, saved_models  # noqa: F401  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def published(namespace: Tenant, exports: dict[int, Path]) -> Callable[[int], str]:  # noqa: F811
    """Puts export 1 or 2 on the storage; its path as pods see it."""

    def put(number: int) -> str:
        target = namespace.folder / "exports" / str(number)
        if not target.exists():
            shutil.copytree(exports[number], target)
            for path in (target.parent, target, *target.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
        return f"{STORAGE}/exports/{number}"

    return put


@pytest.fixture(scope="module")
def servers(namespace: Tenant) -> Iterator[ModelServers]:
    made = ModelServers(namespace, "embedded")
    try:
        made.apply()
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def first(servers: ModelServers, published: Callable[[int], str]) -> dict[str, Any]:
    """A first version released onto servers that began with no model; what was seen on the way."""

    def started() -> bool:
        states = [status for pod in servers.replicas() for status in pod.status.container_statuses or ()]
        return len(states) == 2 and all(status.started for status in states)

    wait_for("two servers have started", started)
    names = {pod.metadata.name for pod in servers.replicas()}
    refused = wait_for(
        "readiness is asked and refused", lambda: names <= set(found := servers.refused_probes()) and found
    )
    seen: dict[str, Any] = {"refused": refused, "ready without model": servers.ready()}
    # Not 1 where pipelines on the same storage have released before.
    version = seen["version"] = servers.step("publish", export=published(1))["version"]
    seen["deploy"] = servers.step("deploy", version=version)
    seen["ready before promotion"] = servers.ready()
    seen["verify"] = servers.step("verify", version=version)
    seen["promote"] = servers.step("promote", version=version)
    wait_for("both are ready", lambda: set(servers.ready()) >= names)
    return seen


def _answer(expected: dict[int, dict[str, np.ndarray]], number: int) -> str:  # noqa: F811
    return f"{float(expected[number]['logits'][0][0]):.3f}"


def test_replicas_are_ready_once_their_model_is_available_and_not_before(
    first: dict[str, Any], servers: ModelServers
) -> None:
    assert all("statuscode: 4" in message for message in first["refused"].values()), (
        "nothing answers to stable"
    )
    assert first["ready without model"] == []
    assert first["ready before promotion"] == [], "loaded, but stable points nowhere"
    addresses = {f"{pod.status.pod_ip}:8500" for pod in servers.replicas()}
    assert set(first["deploy"]["servers"]) == addresses
    assert set(first["verify"]["servers"]) == addresses
    assert first["promote"]["labels"] == dict.fromkeys(("stable", "canary"), first["version"])


def test_pods_run_as_the_manifest_says_without_root_and_on_a_root_that_cannot_be_written(
    first: dict[str, Any], servers: ModelServers
) -> None:
    look = "import os; print(os.getuid(), os.access('/', os.W_OK), os.access('/opt', os.W_OK))"
    for pod in servers.ready():
        assert servers.kubectl("exec", pod, "--", "python", "-c", look).split() == ["10001", "False", "False"]
        with pytest.raises(AssertionError, match=r"[Rr]ead-only file system"):
            servers.kubectl("exec", pod, "--", "touch", f"{STORAGE}/serving/x")


def test_callers_lose_nothing_while_versions_and_pods_change(
    first: dict[str, Any],
    servers: ModelServers,
    published: Callable[[int], str],
    expected: dict[int, dict[str, np.ndarray]],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    targets = each, *_ = [
        f"dns:///model-server-headless.{servers.tenant.name}.svc:8500",
        f"model-server.{servers.tenant.name}.svc:8500",
        f"http://model-server.{servers.tenant.name}.svc:8501",
    ]
    old, new = _answer(expected, 1), _answer(expected, 2)
    assert old != new
    servers.start_caller(targets)
    servers.wait_for_answers(20, old)

    version = servers.step("publish", export=published(2))["version"]
    for step in ("deploy", "verify", "promote"):
        servers.step(step, version=version)
    servers.wait_for_answers(20, new)
    assert servers.step("rollback")["version"] == first["version"]
    servers.wait_for_answers(20, old)

    before = servers.ready()
    servers.kubectl("rollout", "restart", "deployment/model-server")
    servers.kubectl("rollout", "status", "deployment/model-server", "--timeout=300s")
    wait_for("two new servers are ready", lambda: len(servers.ready()) == 2)
    assert not set(before) & set(servers.ready())
    servers.wait_for_answers(20, old)
    servers.kubectl("delete", "pod", servers.ready()[0])
    wait_for("two servers are ready", lambda: len(servers.ready()) == 2)
    servers.wait_for_answers(20, old)
    # On one connection, what a server has not answered when its time is up is lost; all else is not.
    for target, found in servers.calls().items():
        lost = [error for error in found["errors"] if target == each or "CANCELLED" not in error]
        assert lost == [], target

    # Killed without a word: what was being answered is lost to callers with one connection, and asked again by others.
    servers.kubectl("delete", "pod", servers.ready()[0], "--grace-period=0", "--force")
    wait_for("two servers are ready", lambda: len(servers.ready()) == 2)
    servers.wait_for_answers(20, old)
    found = servers.stop_caller()
    with capsys.disabled():
        print(f"\ncalls through a swap, a rollback, a restart of all and two lost pods: {json.dumps(found)}")
    assert found[each]["errors"] == []


def test_one_replica_may_be_evicted_at_a_time(first: dict[str, Any], servers: ModelServers) -> None:
    def evict(pod: str) -> str:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        (taken,), _ = for_server([eviction], set(servers.tenant.cluster.kubectl("api-versions").split()))
        path = f"/api/v1/namespaces/{servers.tenant.name}/pods/{pod}/eviction"
        return servers.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(taken))

    wait_for("the budget allows one", lambda: _allowed(servers) == 1)
    one, other = servers.ready()
    evict(one)
    with pytest.raises(AssertionError, match="disruption budget"):
        evict(other)
    wait_for("two servers are ready", lambda: len(servers.ready()) == 2)


def _allowed(servers: ModelServers) -> int:
    found = servers.kubectl("get", "pdb", "model-server", "-o", "jsonpath={.status.disruptionsAllowed}")
    return int(found or 0)


@pytest.mark.parametrize("overlay", ["base", "embedded", "embedded-tokens", "canary", "object-store"])
def test_what_the_server_knows_nothing_of_is_named(servers: ModelServers, overlay: str) -> None:
    served = set(servers.tenant.cluster.kubectl("api-versions").split())
    _, unknown = for_server(render(REPO / "deploy" / "kubernetes" / "serving" / overlay), served)
    # Routes come with the Gateway API's own resources; all else every server has, in one version or another.
    assert {kind.split()[1] for kind in unknown} <= {"GRPCRoute", "HTTPRoute"}

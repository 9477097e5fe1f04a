"""A training gang whose pods and node are taken away, one after the other: it goes on from its last checkpoint.

One run through the real Airflow, with deferrable replicas: a worker's pod, the parameter server's and the chief's are
deleted by force, and a node is taken off for good. Training is slow (`code/slow_digits.py`) until the last of them.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainyard.platform import Platform

from tests.faults.repeats import begins, repeated_steps
from tests.kubernetes.real_cluster import HANG, Cluster, Nodes, Tenant, wait_for
from tests.kubernetes.tries import classes, log_of_try
from tests.pipeline_runs import Run
from trainers.job import labels
from trainers.job.record import JobRecord, JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LABEL = "trainyard.io/test-lost-node"
STEPS, EVERY = 4000, 100  # as the DAG says


@pytest.fixture(scope="module")
def lost_node(cluster: Cluster, nodes: Nodes) -> Iterator[str]:
    """The node that workers are put on, and that is taken off; mended at the end."""
    ready = sorted(
        node.metadata.name
        for node in cluster.api.list_node().items
        if nodes.is_ready(node.metadata.name) and not node.spec.unschedulable
    )
    if len(ready) < 2:
        pytest.skip(f"a node can only be lost where there are two, not {ready}")
    name = os.environ.get("TRAINYARD_TEST_LOST_NODE") or ready[-1]
    cluster.kubectl("label", "node", name, f"{LABEL}=yes", "--overwrite")
    yield name
    cluster.kubectl("label", "node", name, f"{LABEL}-")
    if not nodes.is_ready(name):
        nodes("on", name)
        wait_for(f"{name} is back", lambda: nodes.is_ready(name))


class Faults:
    """Strikes at one run, a fault after the other, each when the gang has recovered from the one before."""

    def __init__(self, platform: Platform, tenant: Tenant, nodes: Nodes, node: str) -> None:
        self.platform, self.tenant, self.nodes, self.node = platform, tenant, nodes, node
        self.run_id = ""
        self.told: list[str] = []
        self.lost: list[str] = []
        self._strikes = self._all()

    def __call__(self, run_id: str) -> None:
        """Called again and again while the run goes on."""
        self.run_id = run_id
        next(self._strikes, None)

    @property
    def record(self) -> JobRecord:
        """The job's record, on the storage that this machine shares with the pods."""
        return JobRecord(self.platform.storage / "jobs" / "gang_faults" / labels.run_slug(self.run_id))

    def step(self) -> int:
        """The chief's last finished step that a heartbeat tells."""
        beat = self.record.heartbeat("chief", 0)
        return (beat.step or 0) if beat and beat.phase in ("training", "saving") else 0

    def pod(self, replica: str) -> Any:
        """The replica's pod that runs, or None."""
        role, index = replica.rsplit("-", 1)
        found = self.tenant.pods(f"{labels.LABEL_ROLE}={role},{labels.LABEL_INDEX}={index}")
        living = [
            pod for pod in found if pod.status.phase == "Running" and not pod.metadata.deletion_timestamp
        ]
        return living[0] if living else None

    def _all(self) -> Iterator[None]:
        yield from self._until("the first checkpoint", lambda: self.step() > EVERY)
        yield from self._pod_killed("worker-0")
        yield from self._pod_killed("ps-0")
        yield from self._node_lost()
        (self.record.folder / "fast").touch()
        yield from self._pod_killed("chief-0")

    def _pod_killed(self, replica: str) -> Iterator[None]:
        pod, before, attempts = self.pod(replica), self.step(), self._attempts(replica)
        assert pod is not None, f"{replica} does not run"
        self.tenant.api.delete_namespaced_pod(pod.metadata.name, self.tenant.name, grace_period_seconds=0)
        yield from self._until(
            f"{replica} came back, and steps are made",
            lambda: self._attempts(replica) > attempts and self._steps_since(before),
        )
        self.told.append(f"{replica} was killed at step {before}, training at step {self.step()}")

    def _node_lost(self) -> Iterator[None]:
        here = {
            replica: pod.metadata.name
            for replica in ("worker-0", "worker-1", "ps-0", "chief-0")
            if (pod := self.pod(replica)) is not None and pod.spec.node_name == self.node
        }
        assert here, f"no replica is on {self.node}"
        before = self.step()
        attempts = {replica: self._attempts(replica) for replica in here}
        self.lost = sorted(here.values())
        self.nodes("off", self.node)
        yield from self._until(
            f"{', '.join(here)} came back elsewhere, and steps are made",
            lambda: (
                all(self._attempts(replica) > number for replica, number in attempts.items())
                and self._steps_since(before)
            ),
        )
        names = {pod.metadata.name for pod in self.tenant.pods()}
        assert not names & set(self.lost), "a pod of the lost node keeps its address"
        assert not self.nodes.is_ready(self.node)
        self.told.append(
            f"{', '.join(here)} lost their node at step {before}, training at step {self.step()}"
        )

    def _attempts(self, replica: str) -> int:
        role, index = replica.rsplit("-", 1)
        return len(self.record.attempts(role, int(index)))

    def _steps_since(self, before: int) -> bool:
        """Whether more steps are made than before the fault; after the last fault it may be all of them."""
        outcome = self.record.outcome()
        arrived = outcome is not None and outcome.state is JobState.SUCCEEDED
        return arrived or self.step() > before + EVERY

    def _until(self, what: str, holds: Callable[[], bool]) -> Iterator[None]:
        deadline = time.monotonic() + 2 * HANG
        while not holds():
            over = self.record.outcome() if (self.record.folder / "plan.json").exists() else None
            assert over is None, f"the job ended before {what}: {over}; so far: {self.told}"
            assert time.monotonic() < deadline, f"{what}: not at step {self.step()}; so far: {self.told}"
            yield


@pytest.fixture(scope="module")
def struck(
    platform: Platform, run_dag: Callable[..., Run], namespace: Tenant, nodes: Nodes, lost_node: str
) -> tuple[Run, Faults]:
    code = platform.storage / "code"
    code.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / "code" / "slow_digits.py", code)
    faults = Faults(platform, namespace, nodes, lost_node)
    run = run_dag("gang_faults", meanwhile=faults)
    print("\n".join([run.timeline(), *faults.told]))
    return run, faults


def test_the_job_succeeds_whatever_was_taken_away(struck: tuple[Run, Faults]) -> None:
    run, faults = struck
    assert len(faults.told) == 4, faults.told
    assert run.state == "success", run.explain()
    outcome = faults.record.outcome()
    assert outcome is not None
    assert (outcome.state, outcome.step) == (JobState.SUCCEEDED, STEPS)


def test_each_start_goes_on_from_a_checkpoint(struck: tuple[Run, Faults]) -> None:
    _, faults = struck
    times = re.compile(r"^\S+ ", re.MULTILINE)
    log = times.sub("", (faults.record.folder / "logs" / "chief-0.log").read_text())
    begun = begins(log)
    assert len(begun) >= 3, "the parameter server and the chief were taken away"
    first, *later = (begun[number] for number in sorted(begun))
    assert first == 0
    assert later == sorted(later)
    assert min(later) >= EVERY, begun
    # A pod that is deleted by force may still be asked to leave, and then saves: a start is at any step. Without that
    # what was made since the last checkpoint is made again, and what was made while that one was written.
    assert max(repeated_steps(faults.record, log)) <= 2 * EVERY, begun


def test_each_loss_was_a_free_retry_of_that_replica(struck: tuple[Run, Faults]) -> None:
    run, faults = struck
    found = {name: classes(run, name) for name in run.tasks if ".replica" in name}
    print(found)
    assert {cls for tries in found.values() for cls in tries} == {"PREEMPTED"}
    assert sum(map(len, found.values())) == 3 + len(faults.lost)
    said = "\n".join(log_of_try(run, name, n + 1) for name, tries in found.items() for n in range(len(tries)))
    assert said.count("(kubernetes.node_lost)") >= len(faults.lost)
    assert f"with its node {faults.node}, which does not answer" in said


def test_nothing_is_left(struck: tuple[Run, Faults], nothing_left: Callable[[], None]) -> None:
    nothing_left()

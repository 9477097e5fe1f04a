"""A gang of which a part finds no node: the part that started is let go, and the run says what was missing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from trainyard.failing import StepFailed
from trainyard.operators.gang import JobTemplate

from tests.kubernetes.in_process import Gang, in_one_loop
from tests.kubernetes.real_cluster import Tenant
from trainers.job import labels
from trainers.job.failures import FailureClass
from trainers.job.policies import Budgets, RestartPolicy
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import Resources

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = Resources(0.02, "128Mi")
NOWHERE = Resources(0.02, "128Mi", node_selector={"example.com/place": "nowhere"})


def test_what_started_is_let_go_when_the_rest_finds_no_node(
    airflow_env: None, namespace: Tenant, nothing_left: Any
) -> None:
    gang = Gang(
        "gang-partial",
        JobTemplate(
            "partial",
            command=("python", "-c", "import time; time.sleep(3600)"),
            resources={"default": SMALL, "worker": NOWHERE},
            budgets=Budgets(schedule=5, start=10, total=600, evaluate=1),
            restart=RestartPolicy({FailureClass.PEER_LOST: 1, FailureClass.QUOTA: 1}),
        ),
        {"workers": 1, "ps": 0},
    )
    phases: dict[str, set[str]] = {}

    async def look() -> None:
        while True:
            for pod in await asyncio.to_thread(namespace.pods, f"{labels.LABEL_PIPELINE}=gang-partial"):
                phases.setdefault(pod.metadata.labels[labels.LABEL_ROLE], set()).add(pod.status.phase)
            await asyncio.sleep(0.3)

    async def whole() -> None:
        watching = asyncio.ensure_future(look())
        try:
            with pytest.raises(StepFailed):
                await gang.run()
        finally:
            watching.cancel()

    in_one_loop(whole)
    told = {story.failures[0].role: story for story in gang.stories}
    assert told["chief"].classes == ["PEER_LOST", "PEER_LOST"]
    assert "worker-0 did not come within 10 s" in told["chief"].cards[0]
    assert told["worker"].classes == ["QUOTA", "QUOTA"]
    assert "nodes are available" in told["worker"].cards[0], "the scheduler's own words"
    assert "Running" in phases["chief"], "a part of the gang was there"
    assert phases["worker"] == {"Pending"}
    outcome = JobRecord.open(gang.job).outcome()
    assert outcome is not None
    assert outcome.state is JobState.FAILED
    nothing_left()

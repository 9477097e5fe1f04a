"""`trainyard jobs reap` on a cluster, as Airflow's own account: lists, then removes what nobody waits for, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainyard import cli

from tests.kubernetes.real_cluster import Tenant, wait_for
from trainers.job import labels
from trainers.job.plan import Cluster, make_plan
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import TrainingJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUNNING = {"going-on-chief-0", "of-another-storage", "step-runs", "somebody-elses"}
OURS = {labels.LABEL_MANAGED_BY: labels.MANAGED_BY}


@pytest.fixture
def objects(namespace: Tenant) -> Iterator[Callable[[], set[str]]]:
    """What is in the namespace and not on its way out: "pod x", "service x", "configmap x"; all gone at the end."""

    def look() -> set[str]:
        listed = (
            ("pod", namespace.pods()),
            ("service", namespace.api.list_namespaced_service(namespace.name).items),
            ("configmap", namespace.api.list_namespaced_config_map(namespace.name).items),
        )
        return {
            f"{kind} {thing.metadata.name}"
            for kind, things in listed
            for thing in things
            if thing.metadata.deletion_timestamp is None
        }

    before = look()
    yield look
    for left in look() - before:
        namespace.cluster.kubectl(
            "delete", *left.split(), "--namespace", namespace.name, "--grace-period=0", "--force"
        )
    wait_for("they are gone", lambda: not namespace.pods())


@pytest.fixture
def make(namespace: Tenant) -> Callable[..., None]:
    """Makes a pod that sleeps, or that has ended."""

    def pod(name: str, *, ends: bool = False, job: str = "", marks: dict[str, str] | None = None) -> None:
        manifest: dict[str, Any] = {
            "metadata": {
                "name": name,
                "labels": marks or {},
                "annotations": {labels.ANNOTATION_JOB: job} if job else {},
            },
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "securityContext": {"runAsNonRoot": True, "runAsUser": 10001},
                "containers": [
                    {
                        "name": "base",
                        "image": namespace.cluster.image,
                        "command": ["true"] if ends else ["sleep", "3600"],
                    }
                ],
            },
        }
        namespace.api.create_namespaced_pod(namespace.name, manifest)

    return pod


def _gang(namespace: Tenant, make: Callable[..., None], name: str) -> JobRecord:
    job = TrainingJob("digits", "trainers.models.digits", output=str(namespace.folder / "jobs" / "p" / name))
    plan = make_plan(job, Cluster.kubernetes(namespace.name), gang=name)
    record = JobRecord.create(plan)
    namespace.api.create_namespaced_service(namespace.name, plan.service())
    (chief,) = plan.replicas
    make(chief.name, job=job.output, marks=dict(chief.labels))
    return record


def test_orphans_are_listed_then_removed_and_nothing_else_is_touched(
    namespace: Tenant,
    objects: Callable[[], set[str]],
    make: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    monkeypatch.setenv("COLUMNS", "200")
    before = objects()
    _gang(namespace, make, "going-on")
    _gang(namespace, make, "over").finish(JobState.FAILED)
    make("of-a-job-that-is-gone", job=str(namespace.folder / "jobs" / "p" / "gone"), marks=OURS)
    make("of-another-storage", job="/not/mounted/here/p/run", marks=OURS)
    make("step-ended", ends=True, marks=OURS)
    make("step-runs", marks=OURS)
    make("somebody-elses", ends=True)
    namespace.cluster.kubectl("create", "service", "clusterip", "theirs", "--tcp=80", "-n", namespace.name)

    def phases() -> dict[str, str]:
        return {pod.metadata.name: pod.status.phase for pod in namespace.pods()}

    ended = {"step-ended": "Succeeded", "somebody-elses": "Succeeded"}
    expected = {**dict.fromkeys(phases(), "Running"), **ended}
    wait_for("pods are as they should be", lambda: phases() == expected)
    everything = objects()
    orphans = {"pod over-chief-0", "service over", "pod of-a-job-that-is-gone", "pod step-ended"}

    command = ["jobs", "reap", "--namespace", namespace.name]
    assert cli.main(command) == 0
    assert "no orphans" in capsys.readouterr().out, "their own cleanup has ten minutes"
    command += ["--grace", "0s"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert {" ".join(line.split()[:2]) for line in shown.splitlines()[1:-1]} == orphans
    assert "4 would be removed" in shown
    assert objects() == everything, "a dry run"

    assert cli.main([*command, "--delete"]) == 0
    assert "removed 4 of 4" in capsys.readouterr().out
    wait_for("orphans are gone", lambda: objects() == everything - orphans and set(phases()) == RUNNING)
    assert cli.main([*command, "--delete"]) == 0
    assert "no orphans" in capsys.readouterr().out

    # By age: whatever is ours, also what still runs; never what is somebody else's.
    assert cli.main([*command, "--older-than", "1h"]) == 0
    assert "no orphans" in capsys.readouterr().out
    assert cli.main([*command, "--older-than", "0s", "--delete"]) == 0
    assert "removed 4 of 4" in capsys.readouterr().out
    wait_for(
        "what is left is not ours",
        lambda: objects() - before == {"pod somebody-elses", "service theirs"},
    )

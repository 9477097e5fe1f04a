"""Orphans on a process kubelet: what is found, what is left alone, what is removed."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainyard import cli
from trainyard.kubelet import FakeCluster
from trainyard.reaper import Orphan, find_orphans, remove_orphans

from trainers.job import labels
from trainers.job.plan import Cluster, Plan, make_plan
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import TrainingJob

NAMESPACE = "default"
OURS = {labels.LABEL_MANAGED_BY: labels.MANAGED_BY}


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as running:
        yield running


@pytest.fixture
def empty(cluster: FakeCluster) -> Iterator[FakeCluster]:
    yield cluster
    core = cluster.core_v1()
    for pod in core.list_namespaced_pod(NAMESPACE).items:
        core.delete_namespaced_pod(pod.metadata.name, NAMESPACE, grace_period_seconds=0)
        cluster.wait_gone(pod.metadata.name)
    for service in core.list_namespaced_service(NAMESPACE).items:
        core.delete_namespaced_service(service.metadata.name, NAMESPACE)


def _pod(cluster: FakeCluster, name: str, *, ends: bool = False, job: str = "", **marks: str) -> None:
    source = "" if ends else "import time; time.sleep(60)"
    annotations = {labels.ANNOTATION_JOB: job} if job else {}
    cluster.run(
        {
            "metadata": {"name": name, "labels": marks, "annotations": annotations},
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "base", "image": "x", "command": [sys.executable, "-c", source]}],
            },
        }
    )
    cluster.wait_phase(name, "Succeeded" if ends else "Running")


def _gang(cluster: FakeCluster, root: Path, name: str) -> tuple[JobRecord, Plan]:
    job = TrainingJob("digits", "trainers.models.digits", output=str(root / "jobs" / "p" / name))
    plan = make_plan(job, Cluster.kubernetes(NAMESPACE), gang=name)
    record = JobRecord.create(plan)
    cluster.core_v1().create_namespaced_service(NAMESPACE, plan.service())
    (chief,) = plan.replicas
    _pod(cluster, chief.name, job=job.output, **chief.labels)
    return record, plan


def _after(seconds: float) -> Callable[[], dt.datetime]:
    return lambda: dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=seconds)


def _names(orphans: list[Orphan]) -> dict[str, str]:
    return {f"{orphan.kind} {orphan.name}": orphan.why for orphan in orphans}


def test_a_job_that_is_over_leaves_orphans_after_its_grace_and_a_running_one_never(
    empty: FakeCluster, tmp_path: Path
) -> None:
    core = empty.core_v1()
    over, _ = _gang(empty, tmp_path, "over")
    _gang(empty, tmp_path, "going-on")
    _pod(empty, "somebody-elses", ends=True)
    over.finish(JobState.FAILED)
    assert find_orphans(core, NAMESPACE) == [], "its own cleanup has its time"
    found = find_orphans(core, NAMESPACE, now=_after(3600))
    assert _names(found) == {
        "pod over-chief-0": "its job has failed",
        "service over": "its job has failed",
    }
    assert remove_orphans(core, NAMESPACE, found) == found
    empty.wait_gone("over-chief-0")
    assert remove_orphans(core, NAMESPACE, found) == [], "somebody was faster"
    assert find_orphans(core, NAMESPACE, now=_after(3600)) == []
    assert empty.pod("going-on-chief-0") is not None
    assert empty.pod("somebody-elses") is not None


def test_steps_that_ended_jobs_whose_folder_is_gone_and_what_is_too_old(
    empty: FakeCluster, tmp_path: Path
) -> None:
    core = empty.core_v1()
    _pod(empty, "step-ended", ends=True, **OURS)
    _pod(empty, "step-runs", **OURS)
    (tmp_path / "jobs" / "p").mkdir(parents=True)
    _pod(empty, "of-no-job", job=str(tmp_path / "jobs" / "p" / "gone"), **OURS)
    _pod(empty, "of-another-storage", job="/not/mounted/here/p/run", **OURS)
    assert _names(find_orphans(core, NAMESPACE, now=_after(3600))) == {
        "pod step-ended": "it has ended and nobody has collected it",
        "pod of-no-job": "its job's folder is gone",
    }
    old = find_orphans(core, NAMESPACE, older_than=60, now=_after(3600))
    assert {orphan.name for orphan in old} == {"step-ended", "step-runs", "of-no-job", "of-another-storage"}


def test_the_command_lists_first_and_removes_when_told(
    empty: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KUBECONFIG", empty.kubeconfig)
    monkeypatch.setenv("COLUMNS", "160")
    _pod(empty, "step-runs", **OURS)
    command = ["jobs", "reap", "--namespace", NAMESPACE, "--older-than", "0s"]
    assert cli.main(["jobs", "reap", "--namespace", NAMESPACE]) == 0
    assert capsys.readouterr().out == f"no orphans in namespace {NAMESPACE}\n"
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "step-runs" in shown
    assert "1 would be removed" in shown
    assert empty.pod("step-runs")["metadata"].get("deletionTimestamp") is None
    assert cli.main([*command, "--delete"]) == 0
    assert "removed 1 of 1" in capsys.readouterr().out
    empty.wait_gone("step-runs")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert cli.main(command) == cli.EXIT_REFUSED
    assert "no cluster to look at" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["jobs", "reap", "--grace", "soon"])
    assert 'must be a time like 90, "10m"' in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path / "home"))
    with FakeCluster() as gone:
        path = tmp_path / "kubeconfig"
        path.write_text(Path(gone.kubeconfig).read_text())
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert cli.main(["jobs", "reap"]) == cli.EXIT_FAILED
    assert "can't be looked through" in capsys.readouterr().err


def test_a_pod_whose_deletion_does_not_end_goes_by_force(empty: FakeCluster) -> None:
    """As those of a lost node: they are Terminating for ever."""
    core = empty.core_v1()
    script = "trap '' TERM; while :; do sleep 0.1; done"
    manifest = {
        "metadata": {"name": "stuck", "labels": OURS},
        "spec": {
            "terminationGracePeriodSeconds": 3600,
            "containers": [{"name": "base", "image": "x", "command": ["sh", "-c", script]}],
        },
    }
    empty.run(manifest)
    empty.wait_phase("stuck", "Running")
    core.delete_namespaced_pod("stuck", NAMESPACE)
    assert find_orphans(core, NAMESPACE, now=_after(3600 + 200)) == []
    (orphan,) = found = find_orphans(core, NAMESPACE, now=_after(3600 + 400))
    assert (orphan.stuck, orphan.why[:26]) == (True, "its node has not ended it ")
    assert remove_orphans(core, NAMESPACE, found) == found
    empty.wait_gone("stuck")

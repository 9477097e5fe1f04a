"""digits_retrain, the same file as on one machine, through a real Airflow on a real cluster.

1 chief, 2 workers and 1 parameter server, deferrable, in a namespace with a quota; the model is released to the
embedded platform's server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainyard.platform import Platform
from trainyard.platform.external import ExternalCluster

from serving.client import PredictClient
from serving.release.promotions import PromotionLog
from tests.kubernetes.pod_watch import PodWatch
from tests.kubernetes.real_cluster import REPO, Tenant
from tests.plugins.pod_security import violations
from trainers.job.record import JobRecord, JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

REPLICAS = ("ps-0", "worker-0", "worker-1", "chief-0")


@pytest.fixture(scope="module")
def released(platform: Platform, namespace: Tenant, run_dag: Callable[..., Any]) -> tuple[Any, PodWatch]:
    """One run of the pipeline that everybody looks at, and the pods that it had."""
    with PodWatch(namespace) as pods:

        def look(run_id: str) -> None:
            for role in ("chief", "ps"):
                pods.look_inside(role)

        run = run_dag("digits_retrain", {"steps": 800}, meanwhile=look)
    print(run.timeline())
    assert run.state == "success", run.explain()
    return run, pods


@pytest.fixture(scope="module")
def released_again(released: Any, run_dag: Callable[..., Any]) -> Any:
    # A shorter training that may be a little worse: it is the comparison that is looked at.
    run = run_dag("digits_retrain", {"steps": 300, "min_accuracy": 0.9, "max_drop": 0.1})
    print(run.timeline())
    assert run.state == "success", run.explain()
    return run


def job_of(run: Any) -> Path:
    return Path(run.xcom("train.verdict")["job"])


def text_of(run: Any, task: Any) -> str:
    return "\n".join(str(row.get("event", "")) for row in run.client.task_log(run.dag_id, run.run_id, task))


def mlflow_of(platform: Platform) -> httpx.Client:
    return httpx.Client(base_url=f"{platform.urls['mlflow']}/api/2.0/mlflow", trust_env=False, timeout=60)


def pods_reach_mlflow(platform: Platform) -> bool:
    cluster = platform.settings.cluster
    assert isinstance(cluster, ExternalCluster)
    return not any(text.startswith("MLflow") for text in cluster.warnings())


def test_every_task_succeeds(released: Any) -> None:
    states = released[0].states()
    assert states.pop("not_released") == "skipped"
    assert set(states.values()) == {"success"}, states
    assert {f"train.replica[{name}]" for name in REPLICAS} <= set(states)


def test_the_model_is_as_good_as_on_one_machine(released: Any) -> None:
    run, _ = released
    verdict = run.xcom("train.verdict")
    assert verdict["step"] == 800, "exactly as many as asked"
    assert JobRecord.open(verdict["job"]).state is JobState.SUCCEEDED
    assert run.xcom("evaluate")["metrics"]["accuracy"] > 0.95
    assert run.xcom("gate", "decision")["outcome"] == "pass"


def test_version_1_is_served(released: Any, platform: Platform) -> None:
    import numpy as np
    from sklearn.datasets import load_digits

    promoted = released[0].xcom("release.promote")
    assert (promoted["name"], promoted["version"], promoted["previous"]) == ("digits", 1, None)
    digits = load_digits()
    images = np.rint(digits.images[:50, :, :, None] * (255 / 16)).astype(np.uint8)
    with PredictClient(platform.urls["model-grpc"], "digits") as client:
        answers = client.predict({"image": images})
    scores = next(value for value in answers.values() if value.shape == (50, 10))
    assert (scores.argmax(axis=1) == digits.target[:50]).mean() > 0.9


def test_every_heavy_step_was_a_pod_of_the_image(released: Any, namespace: Tenant) -> None:
    _, watched = released
    labels = [pod["metadata"]["labels"] for pod in watched.pods.values()]
    replicas = {
        f"{row['trainyard.io/role']}-{row['trainyard.io/index']}"
        for row in labels
        if "trainyard.io/role" in row
    }
    assert replicas == set(REPLICAS)
    assert {row["task_id"] for row in labels} == {
        "prepare",
        "train.replica",
        "evaluate",
        "release.export",
        "release.register",
    }
    images = {row["image"] for pod in watched.pods.values() for row in pod["spec"]["containers"]}
    assert images == {namespace.cluster.image}


def test_every_pod_met_the_restricted_level(released: Any, namespace: Tenant) -> None:
    _, watched = released
    for name, pod in watched.pods.items():
        assert violations(pod) == [], name
        spec = pod["spec"]
        assert spec["serviceAccountName"] == namespace.service_account
        assert spec["automountServiceAccountToken"] is False
        assert all(row["securityContext"]["readOnlyRootFilesystem"] for row in spec["containers"]), name
        assert [c["restartCount"] for c in pod["status"]["containerStatuses"]] == [0], name


def test_the_kernel_says_so_too(released: Any) -> None:
    """What the manifests ask for arrives at the processes: a node may know nothing of seccomp, say."""
    _, watched = released
    assert set(watched.inside) == {"chief", "ps"}, watched.problems
    for role, said in watched.inside.items():
        assert int(said.pop("Uid")) == int(said.pop("Gid")) == 10001, role
        assert int(said.pop("CapEff"), 16) == int(said.pop("CapBnd"), 16) == 0, role
        assert said == {
            "NoNewPrivs": "1",
            "Seccomp": "2",  # a filter
            "Root": "read-only",
            "Scratch": "writable",
            "Token": "none",
        }, role


def test_pods_and_tasks_share_files_by_their_group(released: Any, namespace: Tenant) -> None:
    run, _ = released
    job = job_of(run)
    owners = {path.stat().st_uid for path in job.rglob("*")}
    assert owners == {10001, os.getuid()}, "both have written here"
    for path in (job, *job.rglob("*")):
        found = path.stat()
        assert found.st_gid == namespace.group, path
        # TensorFlow gives the folders of a SavedModel their mode itself; nobody writes in them again.
        if path.is_dir() and path.parent.name != "export":
            assert found.st_mode & 0o2070 == 0o2070, f"{path}: the group may write in it, and so on below"


def test_each_replica_s_log_is_its_own_task_s_and_outlives_its_pod(released: Any, namespace: Tenant) -> None:
    run, _ = released
    assert namespace.pods() == []
    for name in REPLICAS:
        text = text_of(run, run.tasks[f"train.replica[{name}]"])
        assert re.search(rf"\b{name} (serves at|is done)\b", text), text
        others = [other for other in REPLICAS if other != name]
        assert not re.search(rf"\b({'|'.join(others)}) (serves at|is done)\b", text), text


def test_jobs_logs_shows_all_replicas(released: Any, platform: Platform) -> None:
    run, _ = released
    done = subprocess.run(
        [sys.executable, "-m", "trainyard.cli", "jobs", "logs", f"digits_retrain/{job_of(run).name}"],
        env={**os.environ, **platform.environment()},
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {
        line.split("]")[0].strip("[ ") for line in done.stdout.splitlines() if line.startswith("[")
    } >= set(REPLICAS)


def test_mlflow_has_the_run(released: Any, platform: Platform) -> None:
    run, _ = released
    noted = json.loads((job_of(run) / "tracking" / "run.json").read_text())
    with mlflow_of(platform) as mlflow:
        told = mlflow.get("/runs/get", params={"run_id": noted["run_id"]}).raise_for_status().json()["run"]
        assert told["info"]["status"] == "FINISHED"
        assert {row["key"] for row in told["data"]["metrics"]} >= {"loss"}
        warnings = run.xcom("release.promote")["warnings"]
        if pods_reach_mlflow(platform):
            answer = mlflow.get("/registered-models/alias", params={"name": "digits", "alias": "champion"})
            assert answer.raise_for_status().json()["model_version"]["version"] == "1"
            assert warnings == []
        else:
            assert run.xcom("release.register")["registered"] is False
            assert any("regist" in text for text in warnings), warnings


def test_a_second_run_is_compared_with_the_first(released_again: Any, platform: Platform) -> None:
    run = released_again
    champion = run.xcom("evaluate")["champion"]
    assert champion["version"] == 1
    promoted = run.xcom("release.promote")
    assert (promoted["version"], promoted["previous"]) == (2, 1)
    entries = PromotionLog(platform.storage / "releases" / "digits" / "promotion.jsonl").entries()
    assert [entry.version for entry in entries] == [1, 2]


def test_what_pods_can_t_tell_mlflow_the_verdict_does(
    run_dag: Callable[..., Any], platform: Platform
) -> None:
    run = run_dag("cluster_untracked")
    print(run.timeline())
    assert run.state == "success", run.explain()
    noted = json.loads((job_of(run) / "tracking" / "run.json").read_text())
    with mlflow_of(platform) as mlflow:
        told = mlflow.get("/runs/get", params={"run_id": noted["run_id"]}).raise_for_status().json()["run"]
    assert told["info"]["status"] == "FINISHED"
    assert {row["key"] for row in told["data"]["metrics"]} >= {"loss"}


def test_nothing_is_left(released_again: Any, nothing_left: Callable[[], None]) -> None:
    nothing_left()

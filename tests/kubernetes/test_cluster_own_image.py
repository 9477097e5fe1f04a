"""Images of one's own on a real cluster, by a real Airflow: Python and the trainer package are enough."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.pod_watch import PodWatch
from tests.kubernetes.real_cluster import REPO, Tenant
from trainers.job.record import JobRecord, JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

IMAGE = "trainyard-line:1"
EXAMPLE = REPO / "docs" / "examples"
WHAT_IS_THERE = (
    "import importlib.metadata as m, json; "
    "print(json.dumps(sorted(d.metadata['Name'] for d in m.distributions())))"
)


@pytest.fixture(scope="module")
def own_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image of docs/examples/own-image, built as its Dockerfile says, on every node."""
    command = os.environ.get("TRAINYARD_TEST_BUILD_COMMAND")
    if not command:
        pytest.skip("TRAINYARD_TEST_BUILD_COMMAND names no command that builds images for the nodes")
    context = tmp_path_factory.mktemp("image")
    wheel = [sys.executable, str(REPO / "scripts" / "trainer_wheel.py"), str(context)]
    subprocess.run(wheel, check=True, capture_output=True)
    for path in (EXAMPLE / "line_by_sockets.py", EXAMPLE / "own-image" / "Dockerfile"):
        shutil.copy(path, context)
    built = subprocess.run(
        [*shlex.split(command), "-t", IMAGE, str(context)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return IMAGE


def test_python_and_the_trainer_package_are_enough_and_a_killed_pod_comes_back(
    own_image: str, namespace: Tenant, run_dag: Callable[..., Any], nothing_left: Callable[[], None]
) -> None:
    there: list[str] = []
    killed: list[str] = []

    def meddle(run_id: str) -> None:
        """Once there is a checkpoint, look what the image has, and kill a worker's pod."""
        if killed or not list(namespace.folder.glob("jobs/cluster_own_image/*/checkpoints/line.json")):
            return
        for pod in namespace.pods("trainyard.io/role=worker,trainyard.io/index=1"):
            if pod.status.phase == "Running":
                name = pod.metadata.name
                kubectl = namespace.cluster.kubectl
                told = kubectl(
                    "exec", "-n", namespace.name, name, "-c", "base", "--", "python", "-c", WHAT_IS_THERE
                )
                there.extend(json.loads(told))
                kubectl("delete", "pod", name, "-n", namespace.name, "--grace-period=0", "--force")
                killed.append(name)

    with PodWatch(namespace) as watched:
        run = run_dag("cluster_own_image", {"workers": 2, "steps": 300}, meanwhile=meddle)
    print(run.timeline())
    assert run.state == "success", run.explain()
    assert "trainyard-trainer" in there
    assert not {"tensorflow", "numpy", "mlflow", "mlflow-skinny", "apache-airflow"} & set(there), there
    replicas = [pod for pod in watched.pods.values() if "trainyard.io/role" in pod["metadata"]["labels"]]
    assert {pod["spec"]["containers"][0]["image"].rpartition("/")[2] for pod in replicas} == {own_image}
    assert len(replicas) == 4, "three, and one in the place of the killed one"
    verdict = run.xcom("train.verdict")
    assert verdict["step"] == 300
    assert verdict["metrics"]["w"] == pytest.approx(3, abs=0.05)
    record = JobRecord.open(verdict["job"])
    assert record.generation().number >= 2
    log = (Path(verdict["job"]) / "logs" / "chief-0.log").read_text()
    print(log)
    assert "rank 0 of 3 goes on from step 0" in log
    assert "goes on from step" in log.split("goes on from step 0", 1)[1]
    nothing_left()


def test_an_image_without_the_package_is_refused_at_once_with_what_it_lacks(
    run_dag: Callable[..., Any], nothing_left: Callable[[], None]
) -> None:
    run = run_dag("cluster_bare_image")
    print(run.timeline())
    assert run.state == "failed"
    replicas = {name: task for name, task in run.tasks.items() if name.startswith("train.replica")}
    assert {task.state for task in replicas.values()} == {"failed"}
    # On a machine that is too busy Airflow may lose a task and run it again; the failure itself is never retried.
    assert min(task.try_number for task in replicas.values()) == 1
    failure = run.xcom("train.verdict", "failure")
    assert (failure["class"], failure["code"]) == ("CONFIG", "kubernetes.image")
    assert "the trainer package" in failure["hint"]
    nothing_left()


def test_an_image_that_can_t_be_changed_gets_the_package_as_its_pods_start(
    run_dag: Callable[..., Any], nothing_left: Callable[[], None]
) -> None:
    run = run_dag("cluster_brought_along")
    print(run.timeline())
    assert run.state == "success", run.explain()
    record = JobRecord.open(run.xcom("train.verdict")["job"])
    assert record.state is JobState.SUCCEEDED
    for rank, name in enumerate(("chief-0", "worker-0")):
        assert f"rank {rank} of 2" in (record.folder / "logs" / f"{name}.log").read_text()
    nothing_left()

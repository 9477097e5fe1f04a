"""The whole of digits_retrain through a real scheduler: real pods, a real gang, MLflow and the model server."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainyard.platform import Platform
from trainyard.platform.pipeline_run import FormRefused, start_run

from serving.client import PredictClient
from serving.release.promotions import PromotionLog
from trainers.job.record import JobRecord, JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MOST_XCOM = 8_000  # characters of one value: names, URIs and figures, never data


class Links:
    """Looks at a replica's link while it runs."""

    def __init__(self, platform: Platform) -> None:
        self.client = platform.airflow
        self.live = ""

    def __call__(self, run_id: str) -> None:
        """Called again and again while the run goes on."""
        if not self.live and any(
            task.task_id == "train.replica" and task.state == "running"
            for task in self.client.tasks("digits_retrain", run_id)
        ):
            self.live = (
                self.client.xcom("digits_retrain", run_id, "train.replica", "trainyard_mlflow_run", 0) or ""
            )


@pytest.fixture(scope="module")
def released(platform: Platform, run_dag: Callable[..., Any]) -> tuple[Any, str]:
    """One run of the pipeline that everybody looks at, and the link that its replicas showed meanwhile."""
    links = Links(platform)
    run = run_dag("digits_retrain", {"steps": 800}, meanwhile=links)
    print(run.timeline())
    assert run.state == "success", run.explain()
    return run, links.live


def _mlflow_run(run: Any) -> str:
    path = Path(run.xcom("train.verdict")["job"]) / "tracking" / "run.json"
    return str(json.loads(path.read_text())["run_id"])


def test_every_task_succeeds_and_only_not_released_is_skipped(released: Any) -> None:
    states = released[0].states()
    assert states.pop("not_released") == "skipped"
    assert set(states.values()) == {"success"}, states
    assert {f"train.replica[{name}]" for name in ("ps-0", "worker-0", "worker-1", "chief-0")} <= set(states)


def test_the_model_is_good_and_the_verdict_says_so(released: Any, platform: Platform) -> None:
    run, _ = released
    verdict = run.xcom("train.verdict")
    assert verdict["step"] == 800, "exactly as many as asked"
    assert JobRecord.open(verdict["job"]).state is JobState.SUCCEEDED
    evaluation = run.xcom("evaluate")
    assert evaluation["metrics"]["accuracy"] > 0.95
    assert evaluation["examples"] > 300
    assert evaluation["champion"] is None
    assert run.xcom("gate", "decision")["outcome"] == "pass"


def test_version_1_is_the_champion_in_the_log_and_in_the_registry(released: Any, platform: Platform) -> None:
    run, _ = released
    promoted = run.xcom("release.promote")
    assert (promoted["name"], promoted["version"], promoted["previous"]) == ("digits", 1, None)
    assert promoted["warnings"] == []
    entries = PromotionLog(platform.storage / "releases" / "digits" / "promotion.jsonl").entries()
    assert [entry.version for entry in entries] == [1]
    assert "accuracy" in entries[0].why
    answer = httpx.get(
        f"{platform.urls['mlflow']}/api/2.0/mlflow/registered-models/alias",
        params={"name": "digits", "alias": "champion"},
        trust_env=False,
    )
    version = answer.raise_for_status().json()["model_version"]
    assert version["version"] == "1"
    assert (
        version["run_id"]
        == json.loads((Path(run.xcom("train.verdict")["job"]) / "tracking/run.json").read_text())["run_id"]
    )


def test_the_served_model_reads_digits(released: Any, platform: Platform) -> None:
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images[:50, :, :, None] * (255 / 16)).astype(np.uint8)
    with PredictClient(platform.urls["model-grpc"], "digits") as client:
        answers = client.predict({"image": images})
    scores = next(value for value in answers.values() if value.shape == (50, 10))
    assert (scores.argmax(axis=1) == digits.target[:50]).mean() > 0.9


def test_xcoms_are_small_and_links_are_live(released: Any, platform: Platform) -> None:
    run, live = released
    for task_id, map_index, key in run.client.xcom_keys(run.dag_id, run.run_id):
        assert len(json.dumps(run.xcom(task_id, key, map_index))) < MOST_XCOM, (task_id, key)
    assert live.endswith(f"/runs/{_mlflow_run(run)}")
    for task_id in ("train.verdict", "release.register"):
        assert run.xcom(task_id, "trainyard_mlflow_run") == live
    assert run.xcom("release.promote", "trainyard_model").endswith("/#/models/digits/versions/1")


def test_nothing_of_the_gang_is_left(released: Any, platform: Platform) -> None:
    from kubernetes import client, config

    api = config.new_client_from_config(str(platform.settings.kubeconfig))
    core = client.CoreV1Api(api)
    assert core.list_namespaced_pod(platform.settings.namespace).items == []
    assert core.list_namespaced_service(platform.settings.namespace).items == []
    api.close()


@pytest.mark.parametrize(
    ("conf", "field"),
    [({"strategy": "magic"}, "strategy"), ({"workers": -1}, "workers"), ({"steps": 0}, "steps")],
)
def test_a_wrong_form_is_refused_before_anything_starts(
    platform: Platform, conf: dict[str, Any], field: str
) -> None:
    dag = platform.airflow.wait_for_dag("digits_retrain")
    with pytest.raises(FormRefused) as caught:
        start_run(platform.airflow, dag, conf)
    assert caught.value.field == field


def test_fields_that_do_not_agree_are_refused_by_the_first_task(run_dag: Callable[..., Any]) -> None:
    run = run_dag("digits_retrain", {"ps": 0})
    states = run.states()
    assert run.state == "failed"
    assert states["check_form"] == "failed"
    assert set(states.values()) <= {"failed", "upstream_failed"}
    assert "ps must be 1 or more" in run.xcom("check_form", "failure")["reason"]


def test_corrupt_raw_data_fails_prepare_and_publishes_nothing(
    released: Any, run_dag: Callable[..., Any], platform: Platform
) -> None:
    raw = platform.storage / "raw" / "digits"
    datasets = sorted((platform.storage / "records" / "digits").glob("*/manifest.json"))
    for picture in sorted((raw / "3").glob("*.png")):
        picture.write_bytes(b"no picture")
    run = run_dag("digits_retrain")
    shutil.rmtree(raw)
    assert run.state == "failed"
    assert run.states()["prepare"] == "failed"
    assert run.tasks["prepare"].try_number == 1  # class DATA is never retried
    failure = run.xcom("prepare", "failure")
    assert failure["class"] == "DATA", failure
    assert {run.states()[name] for name in ("train.plan", "train.verdict", "evaluate")} == {"upstream_failed"}
    assert sorted((platform.storage / "records" / "digits").glob("*/manifest.json")) == datasets
    entries = PromotionLog(platform.storage / "releases" / "digits" / "promotion.jsonl").entries()
    assert [entry.version for entry in entries] == [1]


def test_plain_tasks_hang_between_stages_and_a_lost_pod_runs_again(
    run_dag: Callable[..., Any], platform: Platform
) -> None:
    from kubernetes import client, config

    api = config.new_client_from_config(str(platform.settings.kubeconfig))
    core = client.CoreV1Api(api)
    deleted: list[str] = []

    def delete_the_chief(run_id: str) -> None:
        chiefs = core.list_namespaced_pod(
            platform.settings.namespace, label_selector="trainyard.io/role=chief"
        ).items
        for pod in chiefs:
            if not deleted and pod.status.phase == "Running":
                core.delete_namespaced_pod(pod.metadata.name, platform.settings.namespace)
                deleted.append(pod.metadata.name)

    # Long enough to be caught alive.
    run = run_dag("wine_checked", {"steps": 20_000}, meanwhile=delete_the_chief)
    api.close()
    print(run.timeline())
    assert run.state == "success", run.explain()
    assert deleted
    chief = run.tasks["train.replica[chief-0]"]
    assert (chief.state, chief.try_number) == ("success", 2)
    assert [name for name in run.tasks if name.startswith("train.replica")] == ["train.replica[chief-0]"]
    assert run.xcom("tell").startswith("wine is good enough: accuracy")
    assert run.xcom("train.verdict")["step"] >= 20_000


def test_failing_a_run_by_hand_deletes_its_pods_and_its_service(platform: Platform) -> None:
    from kubernetes import client, config
    from trainyard.platform.pipeline_run import end_early

    api = config.new_client_from_config(str(platform.settings.kubeconfig))
    core, namespace = client.CoreV1Api(api), platform.settings.namespace

    def until(reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 180
        while not reached():
            assert time.monotonic() < deadline, what
            time.sleep(0.2)

    airflow = platform.airflow
    run = start_run(airflow, airflow.wait_for_dag("wine_checked"), {"steps": 10**8})
    airflow.set_paused("wine_checked", False)
    until(
        lambda: any(
            p.status.phase == "Running"
            for p in core.list_namespaced_pod(namespace).items
            if "chief" in p.metadata.name
        ),
        "the chief runs",
    )
    end_early(airflow, run)
    until(lambda: core.list_namespaced_pod(namespace).items == [], "its pods are gone")
    until(lambda: core.list_namespaced_service(namespace).items == [], "its service is gone")
    airflow.set_paused("wine_checked", True)
    api.close()

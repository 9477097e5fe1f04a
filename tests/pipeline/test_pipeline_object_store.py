"""The whole of digits_retrain where tasks and pods share no folder, but a real S3 server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainyard.platform import Platform, Settings

from serving.client import PredictClient
from serving.release.promotions import PromotionLog
from tests.pipeline_runs import Run, runner
from tests.s3_server import SECRET, empty_store
from trainers.storage.objects import ObjectStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 200
FORM = {"steps": STEPS, "workers": 1, "ps": 1, "min_accuracy": 0.5, "max_drop": 0.5}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An empty place in a store that programs find by the environment, and whose keys are in a file."""
    with empty_store(tmp_path_factory.mktemp("moto")) as found:
        yield found


@pytest.fixture(scope="module")
def platform(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform of its own whose pods have only the store."""
    home = tmp_path_factory.mktemp("platform") / "home"
    settings = Settings.from_environment({"TRAINYARD_STORE": store.url}, home=home)
    with Platform(settings=settings).running() as running:
        yield running


@pytest.fixture(scope="module")
def released(platform: Platform) -> Run:
    """One run of the pipeline as it is, on a chief, a worker and a parameter server."""
    run = runner(platform, hang_seconds=1200)("digits_retrain", FORM)
    print(run.timeline())
    assert run.state == "success", run.explain()
    return run


def test_every_task_succeeds_and_only_not_released_is_skipped(released: Run) -> None:
    states = released.states()
    assert states.pop("not_released") == "skipped"
    assert set(states.values()) == {"success"}, states
    assert {f"train.replica[{name}]" for name in ("ps-0", "worker-0", "chief-0")} <= set(states)
    assert {f"release.{step}" for step in ("export", "register", "publish", "verify", "promote")} <= set(
        states
    )


def test_records_checkpoints_and_the_export_are_in_the_store_alone(
    released: Run, platform: Platform, store: ObjectStore
) -> None:
    keys = set(store.find(""))
    here = {p.relative_to(platform.storage).as_posix() for p in platform.storage.rglob("*") if p.is_file()}
    job = Path(released.xcom("train.verdict")["job"]).relative_to(platform.storage).as_posix()
    shards = {key for key in keys if key.endswith(".tfrecord")}
    assert shards
    checkpoints = {key for key in keys if key.startswith(f"{job}/checkpoints/")}
    assert any(key.endswith("/complete.json") for key in checkpoints)
    assert not here & (shards | checkpoints), "no pod wrote on the disk of Airflow's tasks"
    assert any(key.startswith("models/digits/1/") and key.endswith("saved_model.pb") for key in keys)
    outcome = json.loads(store.read(f"{job}/outcome.json") or b"{}")
    assert (outcome["state"], outcome["step"]) == ("SUCCEEDED", STEPS)
    assert str(platform.storage).encode() not in (store.read(f"{job}/plan.json") or b"")


def test_version_1_is_served_and_reads_digits(released: Run, platform: Platform) -> None:
    from sklearn.datasets import load_digits

    promoted = released.xcom("release.promote")
    assert (promoted["name"], promoted["version"], promoted["warnings"]) == ("digits", 1, [])
    entries = PromotionLog(platform.storage / "releases" / "digits" / "promotion.jsonl").entries()
    assert [entry.version for entry in entries] == [1]
    digits = load_digits()
    images = np.rint(digits.images[:50, :, :, None] * (255 / 16)).astype(np.uint8)
    with PredictClient(platform.urls["model-grpc"], "digits") as client:
        answers = client.predict({"image": images})
    scores: Any = next(value for value in answers.values() if value.shape == (50, 10))
    assert (scores.argmax(axis=1) == digits.target[:50]).mean() > 0.8


def test_the_registry_knows_the_version_and_its_run(released: Run, platform: Platform) -> None:
    import httpx

    answer = httpx.get(
        f"{platform.urls['mlflow']}/api/2.0/mlflow/registered-models/alias",
        params={"name": "digits", "alias": "champion"},
        trust_env=False,
    )
    version = answer.raise_for_status().json()["model_version"]
    run = json.loads((Path(released.xcom("train.verdict")["job"]) / "tracking" / "run.json").read_text())
    assert (version["version"], version["run_id"]) == ("1", run["run_id"])


def test_the_stores_key_is_in_no_file_of_the_platform_and_in_no_object(
    released: Run, platform: Platform, store: ObjectStore
) -> None:
    told = [
        path
        for path in platform.settings.home.rglob("*")
        if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes()
    ]
    assert told == []
    assert [key for key in store.find("") if SECRET.encode() in (store.read(key) or b"")] == []


def test_nothing_of_the_gang_is_left(released: Run, platform: Platform) -> None:
    from kubernetes import client, config

    api = config.new_client_from_config(str(platform.settings.kubeconfig))
    core = client.CoreV1Api(api)
    assert core.list_namespaced_pod(platform.settings.namespace).items == []
    assert core.list_namespaced_service(platform.settings.namespace).items == []
    api.close()


def test_the_next_run_compares_with_the_champion_of_the_store(released: Run, platform: Platform) -> None:
    """The champion's files come from the store, as pods have no other place to find them."""
    run = runner(platform, hang_seconds=1200)("digits_retrain", FORM)
    print(run.timeline())
    assert run.state == "success", run.explain()
    champion = run.xcom("evaluate")["champion"]
    assert champion["version"] == 1
    assert champion["metrics"]["accuracy"] == released.xcom("evaluate")["metrics"]["accuracy"]
    promoted = run.xcom("release.promote")
    assert (promoted["version"], promoted["previous"]) == (2, 1)

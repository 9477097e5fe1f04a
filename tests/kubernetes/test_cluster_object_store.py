"""A pipeline on a cluster whose pods and Airflow's tasks share no folder: an S3 server, its keys in a Secret."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainyard.platform import Platform, Settings
from trainyard.platform.external import ExternalCluster

from tests.kubernetes.pod_watch import PodWatch
from tests.kubernetes.real_cluster import Cluster, Tenant
from tests.pipeline_runs import runner
from tests.s3_server import KEYS, SECRET, credentials, empty_store
from trainers.storage.objects import ObjectStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def store(namespace: Tenant, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An empty place in a store: its address in the environment, its keys in a file here and in a Secret there."""
    host = os.environ.get("TRAINYARD_TEST_HOST")
    if not host:
        pytest.skip(
            "TRAINYARD_TEST_HOST names no address of this machine that pods reach: they find no store"
        )
    with empty_store(tmp_path_factory.mktemp("moto"), host=host) as found:
        keys = {name: value for name, value in credentials(0).items() if name in KEYS}
        secret = {"metadata": {"name": "s3-keys"}, "stringData": keys}
        namespace.api.create_namespaced_secret(namespace.name, secret)
        yield found
        namespace.api.delete_namespaced_secret("s3-keys", namespace.name)


def test_a_gang_trains_from_and_into_the_store(
    cluster: Cluster,
    namespace: Tenant,
    store: ObjectStore,
    nothing_left: Callable[[], None],
    tmp_path: Path,
) -> None:
    settings = Settings(
        home=tmp_path / "home",
        storage=tmp_path / "storage",
        dags=Path(__file__).parent / "dags",
        namespace=namespace.name,
        deferrable=True,
        without=("mlflow", "model-server"),
        store=store.url,
        cluster=ExternalCluster(
            namespace.kubeconfig,
            {
                "TRAINYARD_IMAGE": cluster.image,
                "TRAINYARD_SERVICE_ACCOUNT": namespace.service_account,
                "TRAINYARD_FS_GROUP": str(namespace.group),
            },
        ),
    )
    before = {path for path in namespace.folder.rglob("*") if path.is_file()}
    with Platform(settings=settings).running() as platform, PodWatch(namespace) as watched:
        run = runner(platform, hang_seconds=1200)("cluster_in_store", {})
        print(run.timeline())
        assert run.state == "success", run.explain()
        job = Path(run.xcom("train.verdict")["job"]).relative_to(platform.storage).as_posix()
        here = {
            p.relative_to(platform.storage).as_posix() for p in platform.storage.rglob("*") if p.is_file()
        }
    outcome = json.loads(store.read(f"{job}/outcome.json") or b"{}")
    assert (outcome["state"], outcome["step"]) == ("SUCCEEDED", 100)
    keys = set(store.find(""))
    shards = {key for key in keys if key.endswith(".tfrecord")}
    checkpoints = {key for key in keys if key.startswith(f"{job}/checkpoints/")}
    assert shards
    assert any(key.endswith("/complete.json") for key in checkpoints)
    assert not here & (shards | checkpoints), "no pod wrote on the disk of Airflow's tasks"
    assert {path for path in namespace.folder.rglob("*") if path.is_file()} == before, "nor on the volume"
    roles = {pod["metadata"]["labels"].get("trainyard.io/role") for pod in watched.pods.values()}
    assert {"chief", "worker", "ps"} <= roles
    assert SECRET not in json.dumps(list(watched.pods.values())), "pods are told of the Secret, not the key"
    nothing_left()

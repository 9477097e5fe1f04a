"""The embedded platform's Airflow with its pods on a real cluster, in a namespace of their own; see `real_cluster`."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainyard.platform import Platform, Settings
from trainyard.platform.external import ExternalCluster
from trainyard.platform.ports import HOST

from tests.kubernetes.real_cluster import HANG, REPO, Cluster, Nodes, Tenant, wait_for
from tests.pipeline_runs import Run, runner


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of KUBECONFIG."""
    found = Cluster.of_environment(tmp_path_factory.mktemp("cluster"))
    yield found
    found.api.api_client.close()


@pytest.fixture(scope="session")
def namespace(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    """A namespace with quota, limits, rights and storage, gone at the end."""
    given = os.environ.get("TRAINYARD_TEST_SHARED")
    shared = Path(given) if given else tmp_path_factory.mktemp("shared")
    tenant = Tenant(cluster, f"trainyard-test-{secrets.token_hex(3)}", shared)
    try:
        tenant.make()
        yield tenant
    finally:
        tenant.remove()
        tenant.kubeconfig.unlink(missing_ok=True)
        shutil.rmtree(tenant.folder)


@pytest.fixture(scope="session")
def platform(
    cluster: Cluster, namespace: Tenant, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """The embedded platform with deferrable tasks and its pods on the cluster, as Airflow's own account there."""
    dags = tmp_path_factory.mktemp("dags")
    for file in (*(REPO / "dags").glob("*.py"), *(REPO / "tests" / "kubernetes" / "dags").glob("*.py")):
        (dags / file.name).symlink_to(file)
    settings = Settings(
        home=tmp_path_factory.mktemp("platform") / "home",
        storage=namespace.folder,
        dags=dags,
        namespace=namespace.name,
        deferrable=True,
        cluster=ExternalCluster(
            namespace.kubeconfig,
            {
                "TRAINYARD_IMAGE": cluster.image,
                "TRAINYARD_STORAGE_CLAIM": namespace.claim,
                "TRAINYARD_SERVICE_ACCOUNT": namespace.service_account,
                "TRAINYARD_FS_GROUP": str(namespace.group),
            },
            mlflow_host=os.environ.get("TRAINYARD_TEST_HOST") or HOST,
        ),
    )
    with Platform(settings=settings).running() as running:
        yield running


@pytest.fixture(scope="module")
def airflow_env(namespace: Tenant) -> Iterator[None]:
    """The environment of Airflow's tasks, for operators that tests run in this process (`in_process`)."""
    extra = {"kube_config_path": str(namespace.kubeconfig), "namespace": namespace.name}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AIRFLOW_CONN_TRAINYARD_KUBERNETES": json.dumps({"conn_type": "kubernetes", "extra": extra}),
            "TRAINYARD_STORAGE": str(namespace.folder),
            "TRAINYARD_STORAGE_CLAIM": namespace.claim,
            "TRAINYARD_NAMESPACE": namespace.name,
            "TRAINYARD_SERVICE_ACCOUNT": namespace.service_account,
            "TRAINYARD_FS_GROUP": str(namespace.group),
            "TRAINYARD_IMAGE": namespace.cluster.image,
            "TRAINYARD_DEFERRABLE": "true",
        }.items():
            patch.setenv(name, value)
        before = os.umask(0o002)  # pods write into the folders that tasks make, as users of the same group
        yield
        os.umask(before)


@pytest.fixture(scope="session")
def run_dag(platform: Platform) -> Callable[..., Run]:
    """Triggers a DAG, waits for its end and gives the run; `meanwhile` is called with its id again and again."""
    return runner(platform, hang_seconds=3000)


@pytest.fixture
def nothing_left(namespace: Tenant) -> Callable[[], None]:
    """Asserts that runs have left nothing in the namespace, as soon as what is being deleted has gone."""

    def check() -> None:
        last: list[str] = []

        def empty() -> bool:
            last[:] = namespace.left()
            return not last

        try:
            wait_for("nothing is left", empty, seconds=HANG)
        except AssertionError as e:
            raise AssertionError(f"left behind: {', '.join(last)}") from e

    return check


@pytest.fixture(scope="session")
def nodes(cluster: Cluster) -> Nodes:
    """Breaks and mends nodes, where a command for it is given."""
    command = os.environ.get("TRAINYARD_TEST_NODE_COMMAND")
    if not command:
        pytest.skip("TRAINYARD_TEST_NODE_COMMAND names no command that breaks and mends nodes")
    return Nodes(tuple(shlex.split(command)), cluster.api)

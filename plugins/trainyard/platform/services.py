"""What the embedded platform runs: command lines, environments, probes, order. No secret is on a command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.platform.external import ExternalCluster
from trainyard.platform.ports import HOST
from trainyard.platform.probes import Probe, airflow_component, all_of, file_written, http_ok
from trainyard.platform.settings import Settings

__all__ = ["Service", "base_environment", "client_environment", "platform_services", "platform_urls"]


@dataclass(frozen=True)
class Service:
    """One process of the platform.

    `needs` are started and answering before it is started. `start_seconds` is its budget until `probe`
    answers. Stopping goes by `stop_wave`, lowest first; `grace` seconds after SIGTERM its group is killed.
    `one_shot` is a step that must end with 0 before those that need it start. `umask` is its file mode mask, -1
    this process's.
    """

    name: str
    title: str
    command: tuple[str, ...]
    probe: Probe | None = field(default=None, repr=False)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    needs: tuple[str, ...] = ()
    url: str = ""
    start_seconds: float = 240.0
    stop_wave: int = 0
    grace: float = 10.0
    one_shot: bool = False
    umask: int = -1

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError(f"the command of {self.name!r} must not be empty")
        if (self.probe is None) != self.one_shot:
            raise ValueError(f"{self.name!r} must either be one_shot or have a probe")


def platform_urls(ports: Mapping[str, int], cluster: ExternalCluster | None = None) -> dict[str, str]:
    """Where people and clients find things, by name; "model-grpc" is host:port, as gRPC has it.

    With pods on a cluster, MLflow is where that says, "mlflow-for-pods" where they know it by another name, and
    there is no "kubelet".
    """
    urls = {
        "airflow": f"http://{HOST}:{ports['airflow']}",
        "mlflow": f"http://{cluster.mlflow_name if cluster else HOST}:{ports['mlflow']}",
        "model-rest": f"http://{HOST}:{ports['model-rest']}",
        "model-grpc": f"{HOST}:{ports['model-grpc']}",
    }
    if cluster is None:
        return urls | {"kubelet": f"http://{HOST}:{ports['kubelet']}"}
    if cluster.mlflow_name_for_pods:
        urls["mlflow-for-pods"] = f"http://{cluster.mlflow_name_for_pods}:{ports['mlflow']}"
    return urls


def client_environment(settings: Settings, urls: Mapping[str, str]) -> dict[str, str]:
    """The variables by which pipelines, pods and clients find this platform (nothing secret in it)."""
    told = {
        "TRAINYARD_HOME": str(settings.home),
        "TRAINYARD_STORAGE": str(settings.storage),
        "TRAINYARD_NAMESPACE": settings.namespace,
        "TRAINYARD_MODEL_SERVER": urls["model-grpc"],
        "TRAINYARD_MODEL_SERVER_REST": urls["model-rest"],
        "TRAINYARD_MODEL_CONFIG": str(settings.model_config),
        "MLFLOW_TRACKING_URI": urls["mlflow"],
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    if settings.deferrable:
        told["TRAINYARD_DEFERRABLE"] = "true"
    if settings.store:
        told["TRAINYARD_STORE"] = settings.store
        if settings.store_patience:
            told["TRAINYARD_STORE_PATIENCE"] = settings.store_patience
    if settings.cluster:
        told |= {**settings.cluster.pods, "TRAINYARD_KUBECONFIG": str(settings.cluster.kubeconfig)}
    if "mlflow-for-pods" in urls:
        told["TRAINYARD_MLFLOW_FOR_PODS"] = urls["mlflow-for-pods"]
    return told


_FOREIGN = ("AIRFLOW", "_AIRFLOW", "MLFLOW", "_MLFLOW", "TRAINYARD", "COVERAGE_", "PYTEST_")


def base_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The user's environment without what would bend a component: other Airflows', MLflow's, no-bytecode.

    Loopback is added to the proxies' exceptions: clients inside the components obey http_proxy.
    """
    environ = os.environ if environ is None else environ
    kept = {key: value for key, value in environ.items() if not key.startswith(_FOREIGN)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files every start costs seconds more
    for name in ("no_proxy", "NO_PROXY"):
        kept[name] = ",".join(filter(None, [kept.get(name, ""), HOST, "localhost"]))
    kept["PYTHONUNBUFFERED"] = "1"
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    return kept


def platform_services(
    settings: Settings,
    ports: Mapping[str, int],
    *,
    migrate: bool,
    environ: Mapping[str, str] | None = None,
) -> tuple[Service, ...]:
    """The services of one platform in the order they are started; `migrate` adds Airflow's database step.

    What starts slowest is first in line for the two cores: the api-server bounds the whole.
    """
    urls = platform_urls(ports, settings.cluster)
    shared = base_environment(environ) | client_environment(settings, urls)
    services = (
        *_airflow(settings, urls["airflow"], shared, migrate=migrate),
        *((_kubelet(settings, ports, shared),) if settings.cluster is None else ()),
        _mlflow(settings, ports, shared),
        _model_server(settings, ports, shared),
    )
    return tuple(service for service in services if service.name not in settings.missing)


# Airflow's own log servers would listen on every interface; the api-server reads the files themselves.
_WORKING = {
    "scheduler": ("--skip-serve-logs",),
    "dag-processor": (),
    "triggerer": ("--skip-serve-logs",),
}


def _airflow(
    settings: Settings, url: str, shared: Mapping[str, str], *, migrate: bool
) -> tuple[Service, ...]:
    airflow = str(Path(sys.executable).with_name("airflow"))
    api_environ = {
        **shared,
        "AIRFLOW_HOME": str(settings.airflow_home),
        # airflow_local_settings is found here; it preloads what every task would import again.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(settings.repo / "config"), shared.get("PYTHONPATH", "")])
        ),
    }
    task_environ = {**api_environ, "AIRFLOW_CONN_TRAINYARD_KUBERNETES": _kubernetes_connection(settings)}
    needs = ("airflow-db",) if migrate else ()
    # What tasks write in the storage root, pods of that group go on with.
    umask = 0o002 if settings.cluster and settings.cluster.fs_group is not None else -1
    services = [
        Service(
            name="api-server",
            title="Airflow api-server",
            command=(airflow, "api-server"),
            environ=api_environ,
            # The application for tasks is built at its first request, which takes seconds: not while a run waits.
            probe=all_of(
                http_ok(f"{url}/api/v2/monitor/health"), http_ok(f"{url}/execution/health", timeout=60)
            ),
            needs=needs,
            url=url,
            stop_wave=1,
            # It has answered everything within a moment; then it frees a million objects one by one.
            grace=4.0,
        ),
        *(
            Service(
                name=name,
                title=f"Airflow {name}",
                command=(airflow, name, *flags),
                environ=task_environ,
                probe=airflow_component(url, name.replace("-", "_")),
                needs=needs,
                stop_wave=0,  # before the api-server and the kubelet, which tasks need to end in good order
                grace=15.0,
                umask=umask,
            )
            for name, flags in _WORKING.items()
        ),
    ]
    if migrate:
        step = Service(
            name="airflow-db",
            title="Airflow's database",
            command=(airflow, "db", "migrate"),
            environ=api_environ,
            one_shot=True,
        )
        services.insert(0, step)
    return tuple(services)


def _kubernetes_connection(settings: Settings) -> str:
    """The Airflow connection `trainyard_kubernetes`: the cluster or the process kubelet, by its kubeconfig."""
    extra = {"kube_config_path": str(settings.kubeconfig), "namespace": settings.namespace}
    return json.dumps({"conn_type": "kubernetes", "extra": extra})


def _kubelet(settings: Settings, ports: Mapping[str, int], shared: Mapping[str, str]) -> Service:
    return Service(
        name="kubelet",
        title="process kubelet",
        command=(
            sys.executable,
            "-m",
            "trainyard.kubelet",
            f"--root={settings.kubelet_root}",
            f"--port={ports['kubelet']}",
            f"--kubeconfig={settings.kubeconfig}",
            # Steps and replicas fork from an interpreter that has it imported, instead of importing it each.
            "--preload=trainers.lean:import_tensorflow",
            f"--namespace={settings.namespace}",
            # Where containers start: `python -m my_trainers.step` finds the user's modules beside ours.
            f"--workdir={settings.repo}",
        ),
        environ=shared,
        probe=http_ok(f"http://{HOST}:{ports['kubelet']}/healthz"),
        url=f"http://{HOST}:{ports['kubelet']}",
        stop_wave=1,
        grace=20.0,
    )


def _mlflow(settings: Settings, ports: Mapping[str, int], shared: Mapping[str, str]) -> Service:
    """What `mlflow server --serve-artifacts --workers 1` starts in the end, without staying beside it.

    The command `mlflow server` imports everything to start this very process, and waits: 3 CPU-s and 200 MB.
    """
    cluster = settings.cluster
    url = platform_urls(ports, cluster)["mlflow"]
    # It answers to names that it knows only, so that no web page reaches it under one of its own.
    names = dict.fromkeys(
        filter(
            None,
            ("localhost", HOST, *((cluster.mlflow_name, cluster.mlflow_name_for_pods) if cluster else ())),
        )
    )
    allowed = ",".join(pattern for name in names for pattern in (name, f"{name}:*"))
    database = f"sqlite:///{settings.mlflow_home / 'mlflow.db'}"
    return Service(
        name="mlflow",
        title="MLflow",
        command=(
            sys.executable,
            "-m",
            "uvicorn",
            f"--host={settings.mlflow_host}",
            f"--port={ports['mlflow']}",
            "--workers=1",
            "mlflow.server.fastapi_app:app",
        ),
        environ={
            **shared,
            "_MLFLOW_SERVER_FILE_STORE": database,
            "_MLFLOW_SERVER_REGISTRY_STORE": database,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(settings.mlflow_home / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SGI_NAME": "uvicorn",
            # Job execution would add eight processes for features that are not used here.
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            **({"MLFLOW_SERVER_ALLOWED_HOSTS": allowed} if cluster else {}),
        },
        # The database is made and migrated at the first request that needs it.
        probe=http_ok(f"{url}/api/2.0/mlflow/experiments/get?experiment_id=0", timeout=60),
        url=url,
        stop_wave=1,
    )


def _request_log(settings: Settings) -> tuple[str, ...]:
    """Flags to log a share of the requests; none unless it is asked for, since they are users' data."""
    if not settings.request_log_rate:
        return ()
    return (
        f"--request_log_dir={settings.request_logs}",
        f"--request_log_sample_rate={settings.request_log_rate}",
    )


def _model_server(settings: Settings, ports: Mapping[str, int], shared: Mapping[str, str]) -> Service:
    return Service(
        name="model-server",
        title="model server",
        command=(
            sys.executable,
            "-m",
            "serving.server",
            f"--port={ports['model-grpc']}",
            f"--rest_api_port={ports['model-rest']}",
            f"--model_config_file={settings.model_config}",
            f"--ready-file={settings.model_server_ready}",
            *_request_log(settings),
        ),
        environ=shared,
        probe=file_written(settings.model_server_ready),
        url=platform_urls(ports)["model-rest"],
        stop_wave=1,
    )

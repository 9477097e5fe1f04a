"""What pipelines need to know about where they run, read from the environment when a task runs.

    TRAINYARD_STORAGE         the storage root, at the same path in tasks and pods (required)
    TRAINYARD_STORE           an object store ("s3://bucket/prefix") that tasks and pods keep their files in, where they
                              share no folder: TRAINYARD_STORAGE is then a folder of each one's own
    TRAINYARD_NAMESPACE       Kubernetes namespace of the pods ("trainyard")
    TRAINYARD_IMAGE           image of pods that name none
    TRAINYARD_STORAGE_CLAIM   PersistentVolumeClaim mounted at the storage root; none on one machine
    TRAINYARD_DEFERRABLE      "true": tasks wait for pods in the triggerer, not in a slot (a cluster's setting)
    TRAINYARD_SERVICE_ACCOUNT service account of the pods ("default")
    TRAINYARD_SCRATCH         where pods may write, as their root file system can't be written ("/tmp"); "none" for
                              a volume of one's own
    TRAINYARD_FS_GROUP        the group id that owns the pods' volumes, where their storage needs one
    TRAINYARD_MODEL_SERVER    gRPC addresses of the model servers' replicas, host:port, with commas between; or
                              dns:///host:port for all that a headless Service names
    TRAINYARD_MODEL_CONFIG    their config file
    TRAINYARD_MODEL_SERVER_REST   their HTTP addresses (or dns:///host:port), where canaries are counted
    TRAINYARD_MODEL_CANARY_REST   those of a canary that is a Deployment of its own
    TRAINYARD_MODEL_BASE_PATH     where the servers see the models, where that is not models/ of the storage root
    TRAINYARD_MODEL_STORE     an object store's URI that versions and config are copied to, for servers that sync
    MLFLOW_TRACKING_URI       MLflow's server; none switches tracking off
    TRAINYARD_MLFLOW_FOR_PODS its address as pods know it, where that is another

A DAG file never reads these: it is parsed elsewhere, and a value of one machine has no place in it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError, InvalidSpec

__all__ = ["CONNECTION", "SCHEME", "PipelineSettings", "storage_path"]

CONNECTION = "trainyard_kubernetes"
"""The Airflow connection that says where pods run: a cluster, or the process kubelet."""

SCHEME = "storage://"
"""A URI of the storage root, wherever that is: "storage://raw/digits"."""

# What a replica or step is told about its surroundings; nothing secret may ever be added.
_PASSED_ON = (
    "TRAINYARD_STORAGE",
    "TRAINYARD_STORE",
    "TRAINYARD_STORE_PATIENCE",
    "TRAINYARD_NAMESPACE",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_DISABLE_TELEMETRY",
    "MLFLOW_S3_ENDPOINT_URL",
    "MLFLOW_TRACKING_SERVER_CERT_PATH",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_SHARED_CREDENTIALS_FILE",  # a path, of a file that is mounted into pods
    "TRAINYARD_CODE_VERSION",
    "TRAINYARD_SYSTEM_METRICS_EVERY",
    "TRAINYARD_FS_GROUP",  # whose the storage root is: what pods write, the group may write too
)
_DEFAULT_IMAGE = "trainyard-trainer:0.1.0"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class PipelineSettings:
    """Where pipelines of this Airflow keep their files and run their pods."""

    storage: Path
    namespace: str = "trainyard"
    image: str = _DEFAULT_IMAGE
    storage_claim: str = ""
    store: str = ""
    deferrable: bool = False
    service_account: str = ""
    scratch: str = "/tmp"  # noqa: S108 - in a pod, where it is its own
    fs_group: int | None = None
    mlflow: str = ""
    model_servers: tuple[str, ...] = ()
    model_config: str = ""
    model_metrics: tuple[str, ...] = ()
    model_canary_metrics: tuple[str, ...] = ()
    model_base: str = ""
    model_store: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.storage.is_absolute():
            raise InvalidSpec("TRAINYARD_STORAGE", "be an absolute path", str(self.storage))
        if self.store and self.storage_claim:
            raise InvalidSpec(
                "TRAINYARD_STORAGE_CLAIM",
                "not be set beside TRAINYARD_STORE",
                self.storage_claim,
                hint="pods share either a volume or an object store",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> PipelineSettings:
        """The settings of this process; ConfigError names the variable that is missing or wrong."""
        environ = os.environ if environ is None else environ
        storage = environ.get("TRAINYARD_STORAGE", "")
        if not storage:
            raise ConfigError(
                "TRAINYARD_STORAGE is not set, so there is no place for records, jobs and models",
                hint="start Airflow by `trainyard up`, or set it to a path that tasks and pods share",
            )
        return cls(
            storage=Path(storage),
            namespace=environ.get("TRAINYARD_NAMESPACE") or "trainyard",
            image=environ.get("TRAINYARD_IMAGE") or _DEFAULT_IMAGE,
            storage_claim=environ.get("TRAINYARD_STORAGE_CLAIM", ""),
            store=(store := _store(environ.get("TRAINYARD_STORE", ""))),
            deferrable=deferrable(environ),
            service_account=environ.get("TRAINYARD_SERVICE_ACCOUNT", ""),
            scratch=_scratch(environ.get("TRAINYARD_SCRATCH", "")),
            fs_group=_group(environ.get("TRAINYARD_FS_GROUP", "")),
            mlflow=environ.get("MLFLOW_TRACKING_URI", "").rstrip("/"),
            model_servers=_listed(environ, "TRAINYARD_MODEL_SERVER"),
            model_config=environ.get("TRAINYARD_MODEL_CONFIG", ""),
            model_metrics=_listed(environ, "TRAINYARD_MODEL_SERVER_REST"),
            model_canary_metrics=_listed(environ, "TRAINYARD_MODEL_CANARY_REST"),
            model_base=environ.get("TRAINYARD_MODEL_BASE_PATH", ""),
            # Pods that look at a released model find it where everything else is.
            model_store=store or environ.get("TRAINYARD_MODEL_STORE", "").rstrip("/"),
            environ=_passed_on(environ),
        )

    def serving(self) -> tuple[tuple[str, ...], str]:
        """The model servers' addresses and config file; ConfigError when they are not set."""
        for name, value in (
            ("TRAINYARD_MODEL_SERVER", self.model_servers),
            ("TRAINYARD_MODEL_CONFIG", self.model_config),
        ):
            if not value:
                raise ConfigError(
                    f"{name} is not set, so there is no server to release to",
                    hint="start Airflow by `trainyard up`, or set it as docs/architecture.md says",
                )
        return self.model_servers, self.model_config

    def resolve(self, value: Any) -> Any:
        """`value` with every "storage://..." in it turned into a path, through lists and mappings.

        InvalidSpec when one leads out of the storage root.
        """
        if isinstance(value, str) and value.startswith(SCHEME):
            return str(self._inside(value))
        if isinstance(value, Mapping):
            return {key: self.resolve(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.resolve(item) for item in value]
        return value

    def _inside(self, uri: str) -> Path:
        path = Path(os.path.normpath(self.storage / uri.removeprefix(SCHEME).lstrip("/")))
        if not path.is_relative_to(os.path.normpath(self.storage)):
            raise InvalidSpec("uri", "stay within the storage root", uri)
        return path

    def job_folder(self, pipeline: str, run: str, group: str = "train") -> Path:
        """The folder of a run's job; a second training group of the same run has its own beside it."""
        return self.storage / "jobs" / pipeline / (run if group == "train" else f"{run}--{group}")


def _passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    told = {name: environ[name] for name in _PASSED_ON if environ.get(name)}
    if address := environ.get("TRAINYARD_MLFLOW_FOR_PODS"):
        told["MLFLOW_TRACKING_URI"] = address
    return told


def _store(url: str) -> str:
    if not url:
        return ""
    from trainers.storage.objects import check_store_url

    return check_store_url(url)


def _listed(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, environ.get(name, "").split(","))))


def _scratch(text: str) -> str:
    if text == "none":
        return ""
    path = text or "/tmp"  # noqa: S108
    if not path.startswith("/"):
        raise InvalidSpec("TRAINYARD_SCRATCH", "be an absolute path, or none", text)
    return path


def _group(text: str) -> int | None:
    if text and not text.isdecimal():
        raise InvalidSpec("TRAINYARD_FS_GROUP", "be a group's number", text)
    return int(text) if text else None


def deferrable(environ: Mapping[str, str] | None = None) -> bool:
    """Whether tasks wait for their pods in the triggerer; InvalidSpec for a value that is no yes or no."""
    text = (os.environ if environ is None else environ).get("TRAINYARD_DEFERRABLE", "").lower()
    if text not in (*_TRUE, *_FALSE):
        raise InvalidSpec("TRAINYARD_DEFERRABLE", "be true or false", text)
    return text in _TRUE


def storage_path(relative: str) -> Path:
    """A path under the storage root, for tasks that read or write files there; call it inside a task.

    >>> os.environ["TRAINYARD_STORAGE"] = "/data"
    >>> str(storage_path("raw/digits"))
    '/data/raw/digits'
    """
    return Path(PipelineSettings.from_environment().resolve(f"{SCHEME}{relative.removeprefix(SCHEME)}"))

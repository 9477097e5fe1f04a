"""What pipelines need to know about where they run, read from the environment when a task runs.

    TRAINYARD_STORAGE         the storage root, at the same path in tasks and pods (required)
    TRAINYARD_NAMESPACE       Kubernetes namespace of the pods ("trainyard")
    TRAINYARD_IMAGE           image of pods that name none
    TRAINYARD_STORAGE_CLAIM   PersistentVolumeClaim mounted at the storage root; none on one machine
    TRAINYARD_DEFERRABLE      "true": tasks wait for pods in the triggerer, not in a slot (a cluster's setting)
    TRAINYARD_SERVICE_ACCOUNT service account of the pods ("default")
    TRAINYARD_MODEL_SERVER    gRPC addresses of the model servers' replicas, host:port, with commas between
    TRAINYARD_MODEL_CONFIG    their config file
    MLFLOW_TRACKING_URI       MLflow's server; none switches tracking off

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
    "TRAINYARD_NAMESPACE",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_DISABLE_TELEMETRY",
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
    deferrable: bool = False
    service_account: str = ""
    mlflow: str = ""
    model_servers: tuple[str, ...] = ()
    model_config: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.storage.is_absolute():
            raise InvalidSpec("TRAINYARD_STORAGE", "be an absolute path", str(self.storage))

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
            deferrable=deferrable(environ),
            service_account=environ.get("TRAINYARD_SERVICE_ACCOUNT", ""),
            mlflow=environ.get("MLFLOW_TRACKING_URI", "").rstrip("/"),
            model_servers=tuple(
                filter(None, map(str.strip, environ.get("TRAINYARD_MODEL_SERVER", "").split(",")))
            ),
            model_config=environ.get("TRAINYARD_MODEL_CONFIG", ""),
            environ={name: environ[name] for name in _PASSED_ON if environ.get(name)},
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

"""Where the embedded platform keeps its things, and how big it is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainers.job.errors import InvalidSpec
from trainyard.platform.external import ExternalCluster
from trainyard.platform.ports import HOST
from trainyard.settings import deferrable

__all__ = ["REPO", "Settings"]

REPO = Path(__file__).resolve().parents[3]
"""The checkout this package was installed from: it is deployed as a whole, dags/ and config/ beside plugins/."""

_PATHS = ("home", "storage", "repo", "dags")
_OPTIONAL = ("kubelet", "mlflow", "model-server")


@dataclass(frozen=True)
class Settings:
    """One embedded platform: its folders and its few choices.

    `home` belongs to the platform alone; `storage` is the pipelines' storage root (a volume on a cluster).
    `parallelism` is how many tasks Airflow runs at once: at least a gang's replicas and two more.
    `triggerer` adds Airflow's triggerer, for deferrable operators, and comes with `deferrable`: tasks that wait for
    their pods there. `without` names components not to start ("mlflow", "model-server", "kubelet"), for pipelines
    that need none of them. `request_log_rate` is the share of requests that the model server logs, for monitoring:
    none unless it is asked for. `cluster` is where pods run instead of this machine's process kubelet. `store` is the
    object store that tasks and pods keep their files in, each with a storage root of its own, and `store_patience` the
    seconds that they wait for it, as text; "" for none and for what pods do unless they are told.
    """

    home: Path
    storage: Path
    repo: Path = REPO
    dags: Path = REPO / "dags"
    namespace: str = "trainyard"
    parallelism: int = 8
    triggerer: bool = False
    without: tuple[str, ...] = ()
    request_log_rate: float = 0.0
    deferrable: bool = False
    cluster: ExternalCluster | None = None
    store: str = ""
    store_patience: str = ""

    def __post_init__(self) -> None:
        for name in _PATHS:
            path = getattr(self, name)
            if not path.is_absolute():
                raise ValueError(f"{name} must be an absolute path, got {str(path)!r}")
        if self.parallelism < 1:
            raise ValueError(f"parallelism must be at least 1, got {self.parallelism}")
        if not 0 <= self.request_log_rate <= 1:
            raise ValueError(f"request_log_rate must be from 0 to 1, got {self.request_log_rate}")
        if unknown := set(self.without) - set(_OPTIONAL):
            raise ValueError(
                f"without must name some of {', '.join(_OPTIONAL)}, got {', '.join(sorted(unknown))}"
            )
        if self.store:
            self._check_store()

    def _check_store(self) -> None:
        from trainers.storage.objects import check_store_url
        from trainers.storage.retry import ENV_PATIENCE, patience_of

        check_store_url(self.store)
        patience_of({ENV_PATIENCE: self.store_patience})
        if self.cluster and (claim := self.cluster.pods.get("TRAINYARD_STORAGE_CLAIM")):
            raise InvalidSpec("TRAINYARD_STORAGE_CLAIM", "not be set beside TRAINYARD_STORE", claim)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, *, home: Path | None = None
    ) -> Settings:
        """The settings of TRAINYARD_HOME, TRAINYARD_STORAGE, TRAINYARD_DAGS and so on, with a checkout's defaults.

        Raises:
            ValueError: a variable holds something that can't be; the message names it.
        """
        environ = os.environ if environ is None else environ
        home = (home or Path(environ.get("TRAINYARD_HOME") or REPO / ".trainyard")).expanduser().absolute()
        storage = Path(environ.get("TRAINYARD_STORAGE") or home / "storage").expanduser().absolute()
        dags = Path(environ.get("TRAINYARD_DAGS") or REPO / "dags").expanduser().absolute()
        return cls(
            home=home,
            storage=storage,
            dags=dags,
            namespace=environ.get("TRAINYARD_NAMESPACE") or "trainyard",
            parallelism=_whole_number(environ, "TRAINYARD_PARALLELISM", 8),
            triggerer=_yes_or_no(environ, "TRAINYARD_TRIGGERER", default=False),
            without=tuple(filter(None, environ.get("TRAINYARD_WITHOUT", "").split(","))),
            request_log_rate=_share(environ, "TRAINYARD_REQUEST_LOG_RATE"),
            deferrable=deferrable(environ),
            cluster=ExternalCluster.from_environment(environ),
            store=environ.get("TRAINYARD_STORE", ""),
            store_patience=environ.get("TRAINYARD_STORE_PATIENCE", ""),
        )

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that `to_json` wrote."""
        values = json.loads(text)
        paths = {name: Path(values.pop(name)) for name in _PATHS}
        cluster = values.pop("cluster")
        return cls(
            **paths,
            **{**values, "without": tuple(values["without"])},
            cluster=ExternalCluster.from_dict(cluster) if cluster else None,
        )

    def to_json(self) -> str:
        """One line for a command line; nothing in it is secret."""
        return json.dumps(dataclasses.asdict(self), default=str)

    def warnings(self) -> list[str]:
        """What will not work the way it is set up, a sentence each."""
        return self.cluster.warnings(has_store=bool(self.store)) if self.cluster else []

    @property
    def logs(self) -> Path:
        """The folder of the components' own logs, one file each."""
        return self.home / "logs"

    @property
    def secrets(self) -> Path:
        """The folder of generated keys and passwords, mode 0700."""
        return self.home / "secrets"

    @property
    def airflow_home(self) -> Path:
        """Airflow's home: airflow.cfg, its database and its task logs."""
        return self.home / "airflow"

    @property
    def airflow_database(self) -> Path:
        """Airflow's SQLite database."""
        return self.airflow_home / "airflow.db"

    @property
    def mlflow_home(self) -> Path:
        """MLflow's database and artifacts."""
        return self.home / "mlflow"

    @property
    def kubelet_root(self) -> Path:
        """The process kubelet's own folder."""
        return self.home / "kubelet"

    @property
    def kubeconfig(self) -> Path:
        """The cluster's kubeconfig, or the one that the process kubelet writes for its clients, mode 0600."""
        return self.cluster.kubeconfig if self.cluster else self.kubelet_root / "kubeconfig"

    @property
    def mlflow_host(self) -> str:
        """The address that MLflow listens on."""
        return self.cluster.mlflow_host if self.cluster else HOST

    @property
    def missing(self) -> frozenset[str]:
        """The components that are not started."""
        triggerer = () if self.triggerer or self.deferrable else ("triggerer",)
        return frozenset((*self.without, *triggerer, *(("kubelet",) if self.cluster else ())))

    @property
    def model_config(self) -> Path:
        """The model server's configuration file: the truth of what is deployed."""
        return self.storage / "serving" / "models.config"

    @property
    def request_logs(self) -> Path:
        """Where the model server logs requests, for `monitor`."""
        return self.storage / "requests"

    @property
    def model_server_ready(self) -> Path:
        """The file that the model server writes once it answers."""
        return self.home / "model-server.ready"

    @property
    def state_file(self) -> Path:
        """platform.json: what runs, where, since when."""
        return self.home / "platform.json"

    @property
    def lock_file(self) -> Path:
        """Held by the supervisor as long as it lives: one platform a home."""
        return self.home / "platform.lock"

    @property
    def pause_notes(self) -> Path:
        """Names the DAGs that a run has unpaused, until it has paused them again."""
        return self.airflow_home / "unpaused"

    @property
    def supervisor_log(self) -> Path:
        """The supervisor's own log."""
        return self.logs / "supervisor.log"

    def make_folders(self) -> None:
        """Make the platform's folders; those with secrets are the user's alone."""
        for folder in (
            self.home,
            self.logs,
            self.secrets,
            self.airflow_home,
            self.mlflow_home,
            self.kubelet_root,
        ):
            folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.home, self.secrets, self.airflow_home, self.kubelet_root):
            folder.chmod(0o700)
        self.storage.mkdir(parents=True, exist_ok=True)
        self.model_config.parent.mkdir(exist_ok=True)
        if self.cluster and self.cluster.fs_group is not None:
            for folder in (self.storage, self.model_config.parent):
                _share_with(folder, self.cluster.fs_group)


def _share_with(folder: Path, group: int) -> None:
    """Give a folder to a group, with what is made in it from now on."""
    found = folder.stat()
    if found.st_gid == group and found.st_mode & 0o2070 == 0o2070:
        return
    try:
        os.chown(folder, -1, group)
        folder.chmod(0o2775)
    except PermissionError as e:
        raise ValueError(
            f"{folder} can't be given to group {group} of TRAINYARD_FS_GROUP ({e.strerror}): "
            f"do it as root, sudo sh -c 'chgrp -R {group} {folder} && chmod -R g+rwX {folder} && chmod g+s {folder}'"
        ) from e


def _whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None


def _share(environ: Mapping[str, str], name: str) -> float:
    text = environ.get(name) or "0"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number from 0 to 1, got {text!r}") from None


def _yes_or_no(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = (environ.get(name) or str(default)).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name} must be yes or no, got {text!r}")

"""Where the embedded platform keeps its things, and how big it is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    `triggerer` adds Airflow's triggerer, for deferrable operators; `without` names components not to start
    ("mlflow", "model-server", "kubelet"), for pipelines that need none of them.
    """

    home: Path
    storage: Path
    repo: Path = REPO
    dags: Path = REPO / "dags"
    namespace: str = "trainyard"
    parallelism: int = 8
    triggerer: bool = False
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _PATHS:
            path = getattr(self, name)
            if not path.is_absolute():
                raise ValueError(f"{name} must be an absolute path, got {str(path)!r}")
        if self.parallelism < 1:
            raise ValueError(f"parallelism must be at least 1, got {self.parallelism}")
        if unknown := set(self.without) - set(_OPTIONAL):
            raise ValueError(
                f"without must name some of {', '.join(_OPTIONAL)}, got {', '.join(sorted(unknown))}"
            )

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
        )

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that `to_json` wrote."""
        values = json.loads(text)
        paths = {name: Path(values.pop(name)) for name in _PATHS}
        return cls(**paths, **{**values, "without": tuple(values["without"])})

    def to_json(self) -> str:
        """One line for a command line; nothing in it is secret."""
        return json.dumps(dataclasses.asdict(self), default=str)

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
        """The kubeconfig that the process kubelet writes for its clients, mode 0600."""
        return self.kubelet_root / "kubeconfig"

    @property
    def model_config(self) -> Path:
        """The model server's configuration file: the truth of what is deployed."""
        return self.storage / "serving" / "models.config"

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
        self.model_config.parent.mkdir(parents=True, exist_ok=True)


def _whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None


def _yes_or_no(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = (environ.get(name) or str(default)).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name} must be yes or no, got {text!r}")

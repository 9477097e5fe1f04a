"""Pods on a Kubernetes cluster that is there already, instead of this machine's process kubelet.

TRAINYARD_KUBECONFIG        a kubeconfig; pods run on the cluster of its current context
TRAINYARD_IMAGE, TRAINYARD_STORAGE_CLAIM, TRAINYARD_SERVICE_ACCOUNT, TRAINYARD_FS_GROUP, TRAINYARD_SCRATCH
                            as for pipelines anywhere (`trainyard.settings`); passed on to Airflow's tasks
TRAINYARD_MLFLOW_HOST       the address of this machine that MLflow listens on ("127.0.0.1"); pods reach it there
TRAINYARD_HOST_FOR_PODS     this machine's name as pods know it, where they know it by another
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.errors import ConfigError, InfraError
from trainyard.platform.ports import HOST

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

__all__ = ["ClusterRefused", "ClusterUnknown", "ExternalCluster", "check_cluster", "core_api_of"]

PASSED_ON = (
    "TRAINYARD_IMAGE",
    "TRAINYARD_STORAGE_CLAIM",
    "TRAINYARD_SERVICE_ACCOUNT",
    "TRAINYARD_FS_GROUP",
    "TRAINYARD_SCRATCH",
)
_TIMEOUT = 10.0  # seconds a request


class ClusterUnknown(ConfigError):
    """Nothing says where pods run, or what says it can't be read."""

    code = "cluster.unknown"


class ClusterRefused(InfraError):
    """The Kubernetes API can't be reached, or refuses."""

    code = "cluster.refused"


@dataclass(frozen=True)
class ExternalCluster:
    """The cluster that pods run on: its kubeconfig, and `pods`, the TRAINYARD_* variables that say what they are like.

    MLflow listens on `mlflow_host` (an address of this machine); `host_for_pods` is what pods call this machine
    where that is another name.
    """

    kubeconfig: Path
    pods: Mapping[str, str] = field(default_factory=dict)
    mlflow_host: str = HOST
    host_for_pods: str = ""

    def __post_init__(self) -> None:
        if not self.kubeconfig.is_absolute():
            raise ValueError(f"kubeconfig must be an absolute path, got {str(self.kubeconfig)!r}")
        if unknown := set(self.pods) - set(PASSED_ON):
            raise ValueError(
                f"pods must name some of {', '.join(PASSED_ON)}, got {', '.join(sorted(unknown))}"
            )
        group = self.pods.get("TRAINYARD_FS_GROUP", "")
        if group and not group.isdecimal():
            raise ValueError(f"TRAINYARD_FS_GROUP must be a group's number, got {group!r}")
        try:
            ipaddress.ip_address(self.mlflow_host)
        except ValueError:
            raise ValueError(
                f"TRAINYARD_MLFLOW_HOST must be an address of this machine, got {self.mlflow_host!r}"
            ) from None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ExternalCluster | None:
        """The cluster of TRAINYARD_KUBECONFIG, or None; ValueError names the variable that is wrong."""
        path = environ.get("TRAINYARD_KUBECONFIG")
        if not path:
            return None
        return cls(
            kubeconfig=Path(path).expanduser().absolute(),
            pods={name: environ[name] for name in PASSED_ON if environ.get(name)},
            mlflow_host=environ.get("TRAINYARD_MLFLOW_HOST") or HOST,
            host_for_pods=environ.get("TRAINYARD_HOST_FOR_PODS", ""),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExternalCluster:
        """The cluster of `dataclasses.asdict`, its path as a string."""
        return cls(**{**data, "kubeconfig": Path(data["kubeconfig"])})

    @property
    def fs_group(self) -> int | None:
        """The group that pods and Airflow's tasks share files by."""
        group = self.pods.get("TRAINYARD_FS_GROUP")
        return int(group) if group else None

    @property
    def mlflow_name(self) -> str:
        """The host by which this machine's programs reach MLflow."""
        address = ipaddress.ip_address(self.mlflow_host)
        if address.is_unspecified:
            return HOST
        return f"[{address}]" if address.version == 6 else str(address)

    @property
    def mlflow_name_for_pods(self) -> str:
        """The host by which pods reach MLflow, "" where they are told no other than this machine's programs."""
        return self.host_for_pods if self.host_for_pods != self.mlflow_name else ""

    def describe(self) -> dict[str, str]:
        """For the state file: the kubeconfig, and its API server as far as it can be read."""
        return {"kubeconfig": str(self.kubeconfig), "server": self._server()}

    def _server(self) -> str:
        import yaml

        try:
            known = yaml.safe_load(self.kubeconfig.read_text())
            contexts = {row["name"]: row["context"] for row in known["contexts"]}
            clusters = {row["name"]: row["cluster"] for row in known["clusters"]}
            return str(clusters[contexts[known["current-context"]]["cluster"]]["server"])
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
            return ""  # `check_cluster` says what is wrong with it

    def warnings(self, *, has_store: bool = False) -> list[str]:
        """What will not work the way it is set up, a sentence each; pods need no claim that have an object store."""
        found = []
        if not has_store and not self.pods.get("TRAINYARD_STORAGE_CLAIM"):
            found.append(
                "TRAINYARD_STORAGE_CLAIM is not set: pods see the storage root only if their overlays mount it"
            )
        if ipaddress.ip_address(self.mlflow_host).is_loopback and not self.host_for_pods:
            found.append(
                "MLflow listens on loopback, where pods don't reach it: metrics arrive when Airflow's tasks deliver "
                "them, and models are not registered; TRAINYARD_MLFLOW_HOST names an address that pods reach"
            )
        return found


def core_api_of(kubeconfig: Path | str) -> CoreV1Api:
    """A client of the cluster of a kubeconfig; ClusterUnknown when there is no such file, or it can't be used."""
    from kubernetes import client, config

    if not Path(kubeconfig).is_file():
        raise ClusterUnknown(
            f"there is no kubeconfig {kubeconfig}", hint="set TRAINYARD_KUBECONFIG to a file of yours"
        )
    try:
        return client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
    except (config.ConfigException, OSError, ValueError, TypeError) as e:
        raise ClusterUnknown(
            f"{kubeconfig} can't be used: {e}", hint=f"see `kubectl --kubeconfig {kubeconfig} get pods`"
        ) from e


def check_cluster(cluster: ExternalCluster, namespace: str) -> str:
    """Ask the cluster whether pods can be had in `namespace`; its Kubernetes version.

    Raises ClusterUnknown for a kubeconfig or namespace that isn't there, ClusterRefused for a cluster that can't
    be reached or that lets nobody in.
    """
    from kubernetes.client import VersionApi
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    api = core_api_of(cluster.kubeconfig)
    where = f"the cluster of {cluster.kubeconfig} ({cluster._server()})"
    # One more try is enough to say that it is away; urllib3 would ask four times.
    api.api_client.rest_client.pool_manager.connection_pool_kw["retries"] = 1
    try:
        version = str(VersionApi(api.api_client).get_code(_request_timeout=_TIMEOUT).git_version)
        _look_into(api, namespace, where)
    except ApiException as e:
        raise ClusterRefused(
            f"{where} refuses: {e.status} {e.reason}",
            hint=f"it must let its user list pods in namespace {namespace}; deploy/kubernetes has such a role",
        ) from e
    except HTTPError as e:
        reason = str(getattr(e, "reason", None) or e)
        raise ClusterRefused(
            f"{where} can't be reached: {reason}", hint="see whether it is up, and `kubectl get nodes`"
        ) from e
    finally:
        api.api_client.close()
    return version


def _look_into(api: CoreV1Api, namespace: str, where: str) -> None:
    """List the namespace's pods; ClusterUnknown when it isn't there, as far as we may know."""
    from kubernetes.client.exceptions import ApiException

    api.list_namespaced_pod(namespace, limit=1, _request_timeout=_TIMEOUT)
    try:
        api.read_namespace(namespace, _request_timeout=_TIMEOUT)
    except ApiException as e:
        if e.status == 404:
            raise ClusterUnknown(
                f"{where} has no namespace {namespace}",
                hint="make it by deploy/kubernetes, or name another by TRAINYARD_NAMESPACE",
            ) from e
        if e.status != 403:  # a role of one namespace doesn't say who may ask for the namespace itself
            raise

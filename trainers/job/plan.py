"""From a job and a cluster to the exact replicas: a plan is printable, comparable and changes nothing.

cluster = Cluster.kubernetes("ml")                 # or Cluster.process(ports=free_ports(n))
plan = make_plan(job, cluster, gang="digits-1a2b3c4d")
print(plan.describe())
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainers.job import labels
from trainers.job.errors import InvalidSpec
from trainers.job.pod_overlay import merge_pod_overlays
from trainers.job.spec import LAUNCHER_COMMAND, Resources, RoleKind, TrainingJob
from trainers.job.tf_config import tf_config
from trainers.job.world import world_env

__all__ = ["Cluster", "Plan", "ReplicaPlan", "make_plan"]

PORT = 2222  # TensorFlow's customary one
_LONGEST = 120  # characters of a command in a table
_ORDER = (RoleKind.PS, RoleKind.WORKER, RoleKind.CHIEF, RoleKind.EVALUATOR)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where replicas run, as far as a plan must know: "kubernetes" has names, "process" has loopback ports."""

    kind: str
    namespace: str = "trainyard"
    ports: tuple[int, ...] = ()
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.kind not in ("kubernetes", "process"):
            raise InvalidSpec("cluster.kind", "be kubernetes or process", self.kind)

    @classmethod
    def kubernetes(cls, namespace: str = "trainyard") -> Cluster:
        """A cluster whose headless Service gives every replica a name."""
        return cls("kubernetes", namespace)

    @classmethod
    def process(cls, ports: Sequence[int], namespace: str = "trainyard", host: str = "127.0.0.1") -> Cluster:
        """This machine: names don't resolve, so every replica gets one of `ports` at `host`."""
        return cls("process", namespace, tuple(ports), host)


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
    """One replica: its pod's name, its address, what it runs and what it is told; `pod` is laid over its pod.

    `command` is the pod's, the launcher; what a launcher of strategy `custom` runs is in the job's role.
    """

    role: RoleKind
    index: int
    name: str
    hostname: str
    subdomain: str
    address: str
    image: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    labels: Mapping[str, str]
    resources: Resources
    tf_config: Mapping[str, Any]
    pod: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def replica(self) -> str:
        """Its short name in the gang, "worker-1"."""
        return f"{self.role}-{self.index}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return data | {
            "role": self.role.value,
            "command": list(self.command),
            "env": dict(self.env),
            "labels": dict(self.labels),
            "resources": self.resources.to_dict(),
            "tf_config": dict(self.tf_config),
            "pod": dict(self.pod),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReplicaPlan:
        """The replica of `to_dict`."""
        return cls(
            **{
                **data,
                "role": RoleKind(data["role"]),
                "command": tuple(data["command"]),
                "resources": Resources.from_dict(data["resources"]),
            }
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """All replicas of one job, parameter servers first, and the name of their headless Service.

    The replicas of the roles in `indexed` are the pods of one Indexed Job a role, the others are a pod each.
    """

    job: TrainingJob
    gang: str
    namespace: str
    cluster: str
    replicas: tuple[ReplicaPlan, ...]
    indexed: tuple[RoleKind, ...] = ()

    def job_name(self, kind: RoleKind) -> str:
        """The name of the Indexed Job of a role in `indexed`."""
        return f"{self.gang}-{kind}"

    def role(self, kind: RoleKind) -> tuple[ReplicaPlan, ...]:
        """The replicas of one kind, in order of index."""
        return tuple(replica for replica in self.replicas if replica.role is kind)

    def replica(self, kind: RoleKind, index: int) -> ReplicaPlan:
        """One replica; InvalidSpec when the plan has no such one."""
        for replica in self.role(kind):
            if replica.index == index:
                return replica
        raise InvalidSpec("replica", f"be one of {[r.replica for r in self.replicas]}", f"{kind}-{index}")

    def service(self) -> dict[str, Any]:
        """The headless Service's manifest: names resolve before the replicas are ready, so that they can meet."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": self.gang,
                "namespace": self.namespace,
                "labels": {labels.LABEL_MANAGED_BY: labels.MANAGED_BY, labels.LABEL_GANG: self.gang},
                "annotations": {labels.ANNOTATION_JOB: self.job.output},
            },
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {labels.LABEL_GANG: self.gang},
                "ports": [{"name": "grpc", "port": PORT}],
            },
        }

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "job": self.job.to_dict(),
            "gang": self.gang,
            "namespace": self.namespace,
            "cluster": self.cluster,
            "replicas": [replica.to_dict() for replica in self.replicas],
            **({"indexed": [kind.value for kind in self.indexed]} if self.indexed else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan of `to_dict`."""
        return cls(
            TrainingJob.from_dict(data["job"]),
            data["gang"],
            data["namespace"],
            data["cluster"],
            tuple(ReplicaPlan.from_dict(replica) for replica in data["replicas"]),
            tuple(RoleKind(kind) for kind in data.get("indexed", ())),
        )

    def describe(self) -> str:
        """A table for people: a line a replica."""
        rows = [("REPLICA", "ADDRESS", "CPU", "MEMORY", "GPU", "COMMAND")]
        for r in self.replicas:
            role = self.job.role(r.role)
            rows.append(
                (
                    r.replica,
                    r.address,
                    f"{r.resources.cpu:g}",
                    r.resources.memory,
                    str(r.resources.gpu),
                    _one_line((role.command if role else ()) or r.command),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        where = f"gang {self.gang} in namespace {self.namespace} ({self.cluster})"
        head = f"job {self.job.name}: {self.job.strategy.kind}, {where}"
        jobs = [
            f"{kind}-0 to {kind}-{len(self.role(kind)) - 1} are the pods of the Indexed Job {self.job_name(kind)}"
            for kind in self.indexed
        ]
        return "\n".join([head, *table, *jobs])


def _one_line(command: Sequence[str]) -> str:
    """A command as a shell would take it, its line breaks shown; long ones cut."""
    text = shlex.join(command).replace("\n", "\\n")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def make_plan(
    job: TrainingJob,
    cluster: Cluster,
    *,
    gang: str,
    env: Mapping[str, str] | None = None,
    extra_labels: Mapping[str, str] | None = None,
    image: str = "",
    indexed_above: int = 0,
) -> Plan:
    """The plan of `job` on `cluster`.

    `gang` names the Service and stems the pods' names; `env` goes to every replica (no secrets: a plan is
    printed and stored); `image` serves roles that name none. A role of more than `indexed_above` replicas is one
    Indexed Job, which the cluster must have (0: none is). Raises InvalidSpec when the cluster has too few ports or
    the gang's name is no DNS label.
    """
    if labels.dns_label(gang, limit=40) != gang:
        raise InvalidSpec("gang", "be a DNS label of at most 40 characters", gang)
    wanted = [(kind, index) for kind in _ORDER for index in range(job.replicas(kind))]
    indexed = tuple(kind for kind in _ORDER if 0 < indexed_above < job.replicas(kind))
    names = {(kind, index): f"{gang}-{kind}-{index}" for kind, index in wanted}
    # An Indexed Job calls its pods' hosts by its own name.
    hosts = {k: names[k] if k[0] in indexed else f"{k[0]}-{k[1]}" for k in wanted}
    if cluster.kind == "process" and len(cluster.ports) < len(wanted):
        raise InvalidSpec("cluster.ports", f"be {len(wanted)} or more", list(cluster.ports))
    where = {}
    for number, (kind, index) in enumerate(wanted):
        if cluster.kind == "process":
            where[kind, index] = f"{cluster.host}:{cluster.ports[number]}"
        else:
            where[kind, index] = f"{hosts[kind, index]}.{gang}.{cluster.namespace}.svc:{PORT}"
    addresses = {kind: [where[k, i] for k, i in wanted if k is kind] for kind in _ORDER}
    # Kueue knows a Job as a whole, and the other pods of the gang as a group.
    alone, in_jobs = job.placement, dataclasses.replace(job.placement, queue="")
    grouped = sum(kind not in indexed for kind, _ in wanted)
    replicas = []
    for kind, index in wanted:
        placement = in_jobs if kind in indexed else alone
        role = job.role(kind)
        assert role is not None
        replicas.append(
            ReplicaPlan(
                role=kind,
                index=index,
                name=names[kind, index],
                hostname=hosts[kind, index],
                subdomain=gang,
                address=where[kind, index],
                image=role.image or image,
                command=LAUNCHER_COMMAND,
                env={
                    **(env or {}),
                    **world_env(job, kind, index, addresses),
                    **role.env,
                    labels.ENV_JOB: job.output,
                    labels.ENV_ROLE: kind.value,
                    labels.ENV_INDEX: str(index),
                },
                labels={
                    **(extra_labels or {}),
                    **placement.labels(gang),
                    labels.LABEL_MANAGED_BY: labels.MANAGED_BY,
                    labels.LABEL_GANG: gang,
                    labels.LABEL_ROLE: kind.value,
                    labels.LABEL_INDEX: str(index),
                },
                resources=role.resources,
                tf_config=tf_config(job, kind, index, addresses),
                pod=merge_pod_overlays(placement.overlay(gang, grouped), role.pod),
            )
        )
    return Plan(job, gang, cluster.namespace, cluster.kind, tuple(replicas), indexed)

"""From a job and a cluster to the exact replicas: a plan is printable, comparable and changes nothing.

cluster = Cluster.kubernetes("ml")                 # or Cluster.process(ports=free_ports(n))
plan = make_plan(job, cluster, gang="digits-1a2b3c4d")
print(plan.describe())
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainers.job import labels
from trainers.job.errors import InvalidSpec
from trainers.job.spec import Resources, RoleKind, TrainingJob
from trainers.job.tf_config import tf_config

__all__ = ["Cluster", "Plan", "ReplicaPlan", "make_plan"]

PORT = 2222  # TensorFlow's customary one
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
    """One replica: its pod's name, its address, what it runs and what it is told."""

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
    """All replicas of one job, parameter servers first, and the name of their headless Service."""

    job: TrainingJob
    gang: str
    namespace: str
    cluster: str
    replicas: tuple[ReplicaPlan, ...]

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
        )

    def describe(self) -> str:
        """A table for people: a line a replica."""
        rows = [("REPLICA", "ADDRESS", "CPU", "MEMORY", "GPU", "COMMAND")]
        for r in self.replicas:
            rows.append(
                (
                    r.replica,
                    r.address,
                    f"{r.resources.cpu:g}",
                    r.resources.memory,
                    str(r.resources.gpu),
                    " ".join(r.command),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        where = f"gang {self.gang} in namespace {self.namespace} ({self.cluster})"
        head = f"job {self.job.name}: {self.job.strategy.kind}, {where}"
        return "\n".join([head, *table])


def make_plan(
    job: TrainingJob,
    cluster: Cluster,
    *,
    gang: str,
    env: Mapping[str, str] | None = None,
    extra_labels: Mapping[str, str] | None = None,
    image: str = "",
) -> Plan:
    """The plan of `job` on `cluster`.

    `gang` names the Service and stems the pods' names; `env` goes to every replica (no secrets: a plan is
    printed and stored); `image` serves roles that name none. Raises InvalidSpec when the cluster has too few
    ports or the gang's name is no DNS label.
    """
    if labels.dns_label(gang, limit=40) != gang:
        raise InvalidSpec("gang", "be a DNS label of at most 40 characters", gang)
    wanted = [(kind, index) for kind in _ORDER for index in range(job.replicas(kind))]
    if cluster.kind == "process" and len(cluster.ports) < len(wanted):
        raise InvalidSpec("cluster.ports", f"be {len(wanted)} or more", list(cluster.ports))
    where = {}
    for number, (kind, index) in enumerate(wanted):
        if cluster.kind == "process":
            where[kind, index] = f"{cluster.host}:{cluster.ports[number]}"
        else:
            where[kind, index] = f"{kind}-{index}.{gang}.{cluster.namespace}.svc:{PORT}"
    addresses = {kind: [where[k, i] for k, i in wanted if k is kind] for kind in _ORDER}
    replicas = []
    for kind, index in wanted:
        role = job.role(kind)
        assert role is not None
        replicas.append(
            ReplicaPlan(
                role=kind,
                index=index,
                name=f"{gang}-{kind}-{index}",
                hostname=f"{kind}-{index}",
                subdomain=gang,
                address=where[kind, index],
                image=role.image or image,
                command=role.command,
                env={
                    **(env or {}),
                    **role.env,
                    labels.ENV_JOB: job.output,
                    labels.ENV_ROLE: kind.value,
                    labels.ENV_INDEX: str(index),
                },
                labels={
                    **(extra_labels or {}),
                    labels.LABEL_MANAGED_BY: labels.MANAGED_BY,
                    labels.LABEL_GANG: gang,
                    labels.LABEL_ROLE: kind.value,
                    labels.LABEL_INDEX: str(index),
                },
                resources=role.resources,
                tf_config=tf_config(job, kind, index, addresses),
            )
        )
    return Plan(job, gang, cluster.namespace, cluster.kind, tuple(replicas))

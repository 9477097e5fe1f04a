"""TF_CONFIG of one replica: one pure function.

The rules (TensorFlow's `TFConfigClusterResolver`, and TF1's `RunConfig` before it): the cluster names every
replica that takes part in training, by role, in order of index; the task is this replica; an evaluator is not
part of the cluster, only its own task says what it is; a job of one replica needs no cluster at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainers.job.errors import InvalidSpec
from trainers.job.spec import RoleKind, StrategyKind, TrainingJob

__all__ = ["cluster_spec", "tf_config"]

Addresses = Mapping[RoleKind, Sequence[str]]


def cluster_spec(job: TrainingJob, addresses: Addresses) -> dict[str, list[str]]:
    """The "cluster" part: role -> "host:port" by index, without the evaluator; {} for a job of one replica."""
    if job.strategy.kind in (StrategyKind.LOCAL, StrategyKind.MIRRORED):
        return {}
    cluster = {}
    for kind in (RoleKind.CHIEF, RoleKind.PS, RoleKind.WORKER):
        wanted = job.replicas(kind)
        if not wanted:
            continue
        got = list(addresses.get(kind, ()))
        if len(got) != wanted:
            raise InvalidSpec(f"addresses.{kind}", f"be {wanted} of host:port", got)
        cluster[kind.value] = got
    return cluster


def tf_config(job: TrainingJob, role: RoleKind, index: int, addresses: Addresses) -> dict[str, Any]:
    """TF_CONFIG of replica `role`-`index` as a JSON value.

    `addresses` maps a role to its replicas' "host:port" in order of index. Raises InvalidSpec for a replica
    that the job does not have, or when addresses and replica counts differ.
    """
    if not 0 <= index < job.replicas(role):
        raise InvalidSpec(f"{role}.index", f"be from 0 to {job.replicas(role) - 1}", index)
    cluster = cluster_spec(job, addresses)
    task = {"type": role.value, "index": index}
    return {"cluster": cluster, "task": task} if cluster else {"task": task}

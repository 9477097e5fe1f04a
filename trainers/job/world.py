"""What a command of strategy `custom` is told of its gang, under the names that frameworks read.

The *world* is the chief and the workers, ranked: chief-0 is 0, worker-i is i + 1. Parameter servers are beside it:
they know where the world's first is, and have no rank. One replica is one process of the world; a launcher like
torchrun, which starts several, reads the PET_ names and gives its processes ranks of their own.

    MASTER_ADDR, MASTER_PORT                  where rank 0 listens (PyTorch, and whoever does like it)
    WORLD_SIZE, RANK                          replicas of the world, and which of them this is
    NODE_RANK, LOCAL_RANK, LOCAL_WORLD_SIZE   RANK, 0 and 1: one process a replica
    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT
                                              what torchrun takes for its arguments; processes a node: its GPUs, or 1
    DMLC_TRACKER_URI, DMLC_TRACKER_PORT, DMLC_NUM_WORKER, DMLC_TASK_ID
                                              XGBoost's collective; the task ids sort as the ranks do
    TRAINYARD_ADDRESS                         "host:port" that is this replica's own

What the launcher adds when it starts the command is in `trainers.runtime.command`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainers.job import labels
from trainers.job.spec import RoleKind, TrainingJob

__all__ = ["rank_of", "world_env", "world_size"]


def world_size(job: TrainingJob) -> int:
    """How many replicas have a rank."""
    return job.replicas(RoleKind.CHIEF) + job.replicas(RoleKind.WORKER)


def rank_of(role: RoleKind, index: int) -> int | None:
    """The rank of a replica, the same for as long as the job lives; None for one beside the world.

    >>> rank_of(RoleKind.CHIEF, 0), rank_of(RoleKind.WORKER, 2), rank_of(RoleKind.PS, 0)
    (0, 3, None)
    """
    if role is RoleKind.CHIEF:
        return 0
    return index + 1 if role is RoleKind.WORKER else None


def world_env(
    job: TrainingJob, role: RoleKind, index: int, addresses: Mapping[RoleKind, Sequence[str]]
) -> dict[str, str]:
    """The variables of one replica of a `custom` job; {} for other strategies, whose trainers read TF_CONFIG.

    `addresses` maps a role to its replicas' "host:port" in order of index.
    """
    if not job.is_custom:
        return {}
    host, _, port = addresses[RoleKind.CHIEF][0].rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    size, rank = str(world_size(job)), rank_of(role, index)
    env = {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": size,
        "DMLC_TRACKER_URI": host,
        "DMLC_TRACKER_PORT": port,
        "DMLC_NUM_WORKER": size,
        labels.ENV_ADDRESS: addresses[role][index],
    }
    if rank is None:
        return env
    found = job.role(role)
    gpus = found.resources.gpu if found else 0
    return env | {
        "RANK": str(rank),
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PET_NNODES": size,
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": str(max(1, gpus)),
        "PET_MASTER_ADDR": host,
        "PET_MASTER_PORT": port,
        "DMLC_TASK_ID": f"{rank:05d}",  # XGBoost's tracker sorts them as text
    }

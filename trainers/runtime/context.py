"""What user code may know of the job it runs in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainers.job.checks import check
from trainers.job.spec import RoleKind, StrategyKind, TrainingJob
from trainers.job.training_args import SCALINGS

__all__ = ["DEFAULT_STEPS", "TrainerContext", "context_of", "worker_context"]

DEFAULT_STEPS = 1000

_SYNCHRONOUS = frozenset({StrategyKind.LOCAL, StrategyKind.MIRRORED, StrategyKind.MULTI_WORKER})


@dataclasses.dataclass(frozen=True)
class TrainerContext:
    """The job as one replica sees it; `make_dataset(records, ctx)` gets one.

    `batch_size` is of one step of one replica (one device's, where a replica has several). `shard` is the
    (index, count) share of the data that this replica must read: workers of an asynchronous parameter server
    each read all of it, in orders of their own; with `sync`, worker i of n has (i, n). `replicas` maps each role
    to its count. `steps` are those of the whole job; training begins at `start_step`, above 0 after a restart;
    each of the `devices` of this process takes a batch a step. `records` is the URI of the records' manifest.
    """

    job: str
    hparams: Mapping[str, Any]
    strategy: str
    role: str
    index: int
    replicas: Mapping[str, int]
    batch_size: int
    synchronous_replicas: int = 1
    seed: int | None = None
    shard: tuple[int, int] = (0, 1)
    steps: int = DEFAULT_STEPS
    start_step: int = 0
    sync: bool = False
    devices: int = 1
    records: str = ""

    def __post_init__(self) -> None:
        check(self.batch_size >= 1, "batch_size", "be a whole number of 1 or more", self.batch_size)
        scaling = self.hparams.get("learning_rate_scaling", "none")
        check(scaling in SCALINGS, "learning_rate_scaling", f"be one of {', '.join(SCALINGS)}", scaling)

    @property
    def is_chief(self) -> bool:
        """Whether this replica leads: it writes the checkpoints and ends the job."""
        return self.role == RoleKind.CHIEF.value

    @property
    def global_batch(self) -> int:
        """Examples that one update of the weights has seen: batch size times the replicas that step together."""
        return self.batch_size * self.synchronous_replicas

    @property
    def learning_rate(self) -> float:
        """The job's `learning_rate`, scaled by `learning_rate_scaling` for the replicas that step together.

        "none" (the default) leaves it, "linear" multiplies by their number (Goyal et al. 2017), "sqrt" by its
        root (Krizhevsky 2014). Asynchronous replicas do not step together: nothing is scaled.
        """
        rate = float(self.hparams.get("learning_rate", 0.001))
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.hparams.get("learning_rate_scaling", "none")]
        return rate * float(self.synchronous_replicas) ** power

    @property
    def draws_seeds(self) -> bool:
        """Whether each replica shuffles by a seed that it draws for itself, so that no two read the same order."""
        return self.strategy == StrategyKind.PARAMETER_SERVER.value and not self.sync

    def shuffle_seed(self) -> Any:
        """The seed for shuffling: the job's, or one of chance.

        Workers of an asynchronous parameter server run one traced function; there it is a tensor that each
        draws for itself, or all would train on the same batches in the same order.
        """
        if self.draws_seeds:
            import tensorflow as tf

            # Seeds of 0 and 0 mean chance, whatever the global seed.
            return tf.raw_ops.RandomUniformInt(
                shape=tf.constant([], tf.int32),
                minval=tf.constant(0, tf.int64),
                maxval=tf.constant(2**31 - 1, tf.int64),
                seed=0,
                seed2=0,
            )
        return self.seed


def context_of(job: TrainingJob, role: RoleKind, index: int, *, devices: int = 1) -> TrainerContext:
    """The context of one replica of a job whose process uses `devices` devices."""
    kind = job.strategy.kind
    peers = 1
    shard = (0, 1)
    if kind is StrategyKind.MULTI_WORKER:
        peers = job.replicas(RoleKind.CHIEF) + job.replicas(RoleKind.WORKER)
        shard = (0 if role is RoleKind.CHIEF else index + job.replicas(RoleKind.CHIEF), peers)
    if job.strategy.sync:
        peers = job.replicas(RoleKind.WORKER) - job.strategy.backup_workers
        shard = (index, job.replicas(RoleKind.WORKER)) if role is RoleKind.WORKER else shard
    return TrainerContext(
        job=job.name,
        hparams=job.args,
        strategy=kind.value,
        role=role.value,
        index=index,
        replicas={r.kind.value: r.replicas for r in job.roles},
        batch_size=int(job.args.get("batch_size", 32)),
        synchronous_replicas=peers * devices if kind in _SYNCHRONOUS or job.strategy.sync else 1,
        seed=job.args.get("seed"),
        steps=int(job.args.get("steps", DEFAULT_STEPS)),
        devices=devices,
        shard=shard,
        sync=job.strategy.sync,
        records=job.inputs.get("records", ""),
    )


def worker_context(chief: TrainerContext, index: int, workers: int) -> TrainerContext:
    """The context of worker `index` of `workers`, for a chief that makes the workers' datasets.

    `workers` are those that take part: when one is left out, the others read its share too.
    """
    return dataclasses.replace(chief, role=RoleKind.WORKER.value, index=index, shard=(index, workers))

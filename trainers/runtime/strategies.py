"""Which strategies there are, and how each is set up in the process that drives it.

Nothing here imports TensorFlow until `set_up`: the launcher and the trigger form ask `check_supported` first.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from trainers.job.errors import ConfigError, PeerLostError
from trainers.job.plan import Plan, ReplicaPlan
from trainers.job.spec import RoleKind, StrategyKind, TrainingJob
from trainers.runtime.success import given_up, steppable_workers

__all__ = [
    "SUPPORTED",
    "SetUp",
    "UnsupportedJob",
    "check_supported",
    "drives_steps",
    "set_up",
    "thread_counts",
    "wait_for_servers",
]

log = logging.getLogger(__name__)

# Names of the strategies of our own trainer, for a form to offer.
SUPPORTED: tuple[str, ...] = tuple(kind.value for kind in StrategyKind if kind is not StrategyKind.CUSTOM)

_PACK_BYTES = 8 << 20  # gradients that are all-reduced at once
_SHARD_BYTES = 256 << 10  # variables above this are cut over the parameter servers


class UnsupportedJob(ConfigError):
    """The job asks for something that this version does not do."""

    code = "runtime.unsupported"


def check_supported(job: TrainingJob) -> None:
    """Raise UnsupportedJob for a job that could be written down but not run."""
    success = job.success
    if job.is_custom and success.rule == "fraction" and success.fraction < 1:
        raise UnsupportedJob(
            f"success rule fraction {success.fraction:g} can't be kept with commands of one's own: "
            "all replicas of such a job begin again when one is lost",
            hint="use rule chief or all_workers",
        )
    if job.strategy.kind is StrategyKind.MULTI_WORKER and success.rule == "fraction" and success.fraction < 1:
        raise UnsupportedJob(
            f"success rule fraction {success.fraction:g} can't be kept under multi_worker: "
            "every all-reduce step needs every peer",
            hint="use rule all_workers, or strategy parameter_server",
        )


def drives_steps(job: TrainingJob, role: RoleKind) -> bool:
    """Whether a replica of this role runs the loop; others are passive servers, or the evaluator."""
    kinds = (StrategyKind.MULTI_WORKER, StrategyKind.CUSTOM)
    peers = job.strategy.kind in kinds and role is RoleKind.WORKER
    return role is RoleKind.CHIEF or peers


@dataclasses.dataclass(frozen=True)
class SetUp:
    """A strategy, ready to build variables under.

    `devices` of this process take part; `workers` compute steps, `worker_names` ("worker-0") say which;
    `coordinator` is None for in-graph strategies; `io_device` is where checkpoints are written.
    """

    strategy: Any
    devices: int = 1
    workers: int = 1
    worker_names: tuple[str, ...] = ()
    coordinator: Any = None
    io_device: str | None = None


def set_up(
    plan: Plan,
    me: ReplicaPlan,
    *,
    met_before: bool = False,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SetUp:
    """Set up the strategy of `plan` in this process; parameter servers and workers are waited for.

    `met_before` says that the gang was complete once: then missing workers are soon left out. Raises
    PeerLostError when servers do not answer within the start budget.
    """
    import tensorflow as tf

    job = plan.job
    intra, inter = thread_counts(me)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(intra)
        tf.config.threading.set_inter_op_parallelism_threads(inter)
    except RuntimeError:
        log.info("tensorflow has run in this process before: its thread pools stay as they are")
    kind = job.strategy.kind
    if kind is StrategyKind.LOCAL:
        return SetUp(tf.distribute.get_strategy())
    if kind is StrategyKind.MIRRORED:
        return _mirrored(tf, job)
    if kind is StrategyKind.MULTI_WORKER:
        # Small gradients travel together: a collective costs more than they do.
        packed = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=_PACK_BYTES)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=packed)
        return SetUp(strategy, devices=len(strategy.extended.worker_devices))
    return _parameter_server(tf, plan, me, met_before, stop or threading.Event(), clock)


def thread_counts(me: ReplicaPlan) -> tuple[int, int]:
    """TensorFlow's threads within and between operations, for the cores that a replica has asked for."""
    threads = max(1, math.ceil(me.resources.cpu))
    # At least two: with one, an op that waits for a peer could keep the one waited for from running.
    return threads, max(2, threads)


def _mirrored(tf: Any, job: TrainingJob) -> SetUp:
    wanted = job.args.get("devices")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        names = [f"GPU:{i}" for i in range(len(gpus) if wanted is None else wanted)]
        if len(names) > len(gpus):
            raise UnsupportedJob(
                f"devices must be at most the {len(gpus)} GPUs of this replica, got {wanted}"
            )
    else:
        names = [f"CPU:{i}" for i in range(wanted or 1)]
        if len(names) > 1:
            # Without GPUs, the CPU is cut into as many logical devices: for trying things out, not for speed.
            (cpu,) = tf.config.list_physical_devices("CPU")
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * len(names)
            )
    return SetUp(tf.distribute.MirroredStrategy(names), devices=len(names))


def _parameter_server(
    tf: Any,
    plan: Plan,
    me: ReplicaPlan,
    met_before: bool,
    stop: threading.Event,
    clock: Callable[[], float],
) -> SetUp:
    cluster = me.tf_config["cluster"]
    workers = wait_for_servers(
        cluster["ps"],
        cluster["worker"],
        needed_workers=_needed_workers(plan.job, met_before),
        budget=plan.job.budgets.start,
        grace=5.0 if met_before else 20.0,
        stop=stop,
        clock=clock,
        gone=lambda: [cluster["worker"][index] for index in given_up(plan.job.output)],
    )
    spec = tf.train.ClusterSpec({"chief": cluster["chief"], "ps": cluster["ps"], "worker": list(workers)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=_SHARD_BYTES, max_shards=len(cluster["ps"])
    )
    if plan.job.strategy.sync:
        from trainers.runtime.server_strategy import make_server_strategy

        strategy = make_server_strategy(resolver, partitioner)
    else:
        strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    return SetUp(
        strategy,
        workers=len(workers),
        worker_names=tuple(f"worker-{cluster['worker'].index(address)}" for address in workers),
        coordinator=tf.distribute.coordinator.ClusterCoordinator(strategy),
        io_device="/job:chief/replica:0/task:0/device:CPU:0",
    )


def _needed_workers(job: TrainingJob, met_before: bool) -> int:
    role = job.role(RoleKind.WORKER)
    assert role is not None
    if role.min_replicas is None and not met_before:
        return role.replicas
    return steppable_workers(job)


def wait_for_servers(
    ps: Sequence[str],
    workers: Sequence[str],
    *,
    needed_workers: int,
    budget: float,
    grace: float,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
    answers: Callable[[str], bool] | None = None,
    gone: Callable[[], Collection[str]] = tuple,
) -> Sequence[str]:
    """The workers that answer, once all parameter servers do and enough workers.

    TensorFlow itself would wait without end for one that is missing. Those beyond `needed_workers` get `grace`
    seconds more; for workers that are `gone`, given up by now, nobody waits. Raises PeerLostError after `budget`
    seconds, naming who is missing, or when `stop` is set.
    """
    answers = answers or _answers
    begin = clock()
    while True:
        missing = [address for address in ps if not answers(address)]
        without = set(gone())
        expected = [address for address in workers if address not in without]
        there = [address for address in expected if answers(address)]
        waited = clock() - begin
        all_there = len(there) == len(expected) > 0
        if not missing and (all_there or (len(there) >= needed_workers and waited >= grace)):
            return there
        if waited >= budget:
            missing += [address for address in expected if address not in there]
            raise PeerLostError(
                f"no answer from {', '.join(missing)} within {budget:g} s",
                hint="look at the logs of these replicas; raise budgets.start if they are just slow",
            )
        if stop.wait(0.1):
            raise PeerLostError("was asked to leave while it waited for its peers")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
    except OSError:
        return False
    return True

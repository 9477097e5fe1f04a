"""A run of the loop, from the strategy to the last checkpoint: what chief and all-reduce peers do."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from trainers.job.errors import ConfigError
from trainers.job.plan import Plan, ReplicaPlan
from trainers.job.ports import wait_until_free
from trainers.job.record import Heartbeat, JobRecord, JobState
from trainers.job.spec import RoleKind, StrategyKind, TrainingJob
from trainers.job.times import Marks, time_split
from trainers.runtime.async_servers import locate, train_on_servers
from trainers.runtime.building import Training, build_training, explain_jit
from trainers.runtime.checkpoints import Checkpoints, checkpoint_folder, restore_newest, saved_weights
from trainers.runtime.context import DEFAULT_STEPS, TrainerContext, context_of, worker_context
from trainers.runtime.curve import LossCurve
from trainers.runtime.datasets import explain_end, make_dataset, open_records
from trainers.runtime.heartbeat import Progress, Pulse
from trainers.runtime.lean import import_tensorflow
from trainers.runtime.loop import CheckpointEvery, Loop, train_in_graph
from trainers.runtime.loopback import bind_loopback_only, check_listeners
from trainers.runtime.module import TrainerModule, load_module
from trainers.runtime.replica import ENV_ATTEMPT, ENV_GENERATION
from trainers.runtime.steps import make_run, trainable_parts
from trainers.runtime.stragglers import Stragglers
from trainers.runtime.strategies import SetUp, check_supported, set_up
from trainers.runtime.summaries import train_summaries
from trainers.runtime.sync_loop import train_in_turns
from trainers.runtime.sync_servers import SyncServers
from trainers.runtime.tracking import Spool

__all__ = ["Phases", "train"]

log = logging.getLogger("trainyard")

# A coordinator's destructor asks all servers to clean up and waits for them, for seconds, or for ever when one is
# gone. The process ends without it.
_kept: list[object] = []


class Phases:
    """Seconds of the run by phase; a phase ends where the next one begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase = ""
        self._since = clock()
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        now = self._clock()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now


def train(record: JobRecord, plan: Plan, me: ReplicaPlan) -> None:
    """Train as chief or as an all-reduce peer, to the end; the chief writes the record's outcome."""
    check_supported(plan.job)
    run = _Run(record, plan, me)
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: run.stop.set()) if in_main else None
    spool = Spool(record.folder) if run.is_chief else None
    pulse = Pulse(record, run.progress, _heartbeat(me), spool=spool)
    pulse.start()
    try:
        step, metrics = run.train(spool)
    finally:
        run.progress.enter("ended")
        pulse.stop()
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    seconds = {name: round(value, 3) for name, value in run.phases.seconds.items()}
    if run.is_chief:
        record.finish(JobState.SUCCEEDED, step=step, metrics=metrics, seconds=time_split(record))
    else:
        # The chief still writes the last checkpoint, and would take a peer that leaves now for a lost one.
        while record.outcome() is None and not run.stop.wait(0.1):
            continue
    shown = {**metrics, **{f"{name}_s": value for name, value in seconds.items()}}
    log.info("%s is done: %s", me.replica, ", ".join(f"{k} {v:.4g}" for k, v in shown.items()))


def _heartbeat(me: ReplicaPlan) -> Heartbeat:
    return Heartbeat(
        role=me.role.value,
        index=me.index,
        generation=int(os.environ.get(ENV_GENERATION, "1")),
        attempt=int(os.environ.get(ENV_ATTEMPT, "1")),
        pid=os.getpid(),
    )


class _Run:
    """One run of the loop; `stop` asks to save and leave, `save_now` for a checkpoint."""

    def __init__(self, record: JobRecord, plan: Plan, me: ReplicaPlan) -> None:
        self.record = record
        self.plan = plan
        self.job: TrainingJob = plan.job
        self.me = me
        self.is_chief = me.role is RoleKind.CHIEF
        self.stop = threading.Event()
        self.save_now = threading.Event()
        self.phases = Phases()
        self.marks = Marks(record.folder, _heartbeat(me).attempt) if self.is_chief else None
        target = int(self.job.args.get("steps", DEFAULT_STEPS))
        self.progress = Progress(target, context_of(self.job, me.role, me.index).global_batch)

    def train(self, spool: Spool | None) -> tuple[int, dict[str, float]]:
        """Train to the target; finished steps and summary figures."""
        self._enter("importing", "import")
        import_tensorflow()
        module = load_module(self.job.trainer)
        if self.marks is not None:
            self.marks.imported()

        self._enter("connecting", "connect")
        if self.me.tf_config.get("cluster"):
            wait_until_free(self.me.address)
            bind_loopback_only(self.me.address)
        self._seed()
        met_before = self.record.state in (JobState.RUNNING, JobState.RESTARTING)
        connected = set_up(self.plan, self.me, met_before=met_before, stop=self.stop)
        if threading.current_thread() is threading.main_thread():
            # TensorFlow's coordination service has set a handler of its own, below Python, which keeps it to itself.
            signal.signal(signal.SIGTERM, lambda _number, _frame: self.stop.set())
        if self.me.tf_config.get("cluster"):
            check_listeners(self.me.address)

        self._enter("building", "build")
        ctx = context_of(self.job, self.me.role, self.me.index, devices=connected.devices)
        self.progress.examples_per_step = ctx.global_batch
        self.progress.workers.batch_size = ctx.batch_size
        records = open_records(self.job)
        if spool is not None:
            _describe(spool, self.record, self.job, records)
        loop, step, iterator = self._build(module, connected, ctx, records)
        if connected.coordinator is not None:
            _kept.append((connected, iterator))
        self._watch_for_leaving_servers()
        assert loop.summaries is not None
        try:
            step = _run_loop(loop, connected, iterator, step)
            loop.summaries.close(step)
        except Exception as e:
            loop.summaries.close()
            _look_for_damage(records, e)
            explain_end(e, module, self.progress)
            explain_jit(e, ctx)
            raise
        self.phases.enter("")
        seconds = self.phases.seconds
        whole = seconds.get("train", 0.0)
        seconds["checkpoint"] = loop.checkpoint_seconds
        seconds["train"] = max(0.0, whole - loop.checkpoint_seconds)
        return step, self._metrics(step, ctx, whole)

    def _enter(self, phase: str, timed_as: str) -> None:
        self.phases.enter(timed_as)
        self.progress.enter(phase)

    def _seed(self) -> None:
        seed = self.job.args.get("seed")
        if seed is None:
            return
        import keras

        keras.utils.set_random_seed(seed)

    def _build(
        self, module: TrainerModule, connected: SetUp, ctx: TrainerContext, records: Any
    ) -> tuple[Loop, int, Any]:
        """Model, optimizer, data and checkpoint: the loop, the step that it begins at, and the batches."""
        training = build_training(
            module, connected.strategy, ctx, lambda model: make_dataset(module, model, records, ctx)
        )
        model = training.model
        checkpoints = Checkpoints(
            self.record.folder,
            model,
            training.optimizer,
            more=training.saved(),
            io_device=connected.io_device,
        )
        step = checkpoints.restore()
        if step == 0 and self.job.warm_start:
            _warm_start(training, self.job.warm_start)
        loss_every = self.job.args.get("loss_every")
        every = CheckpointEvery(self.job.args.get("checkpoint_every"), loss_every=loss_every)
        every.saved(step)
        if loss_every is not None and self.is_chief:
            self.progress.curve = LossCurve(self.record.folder)
        self.progress.begin_at(step)
        ctx = dataclasses.replace(ctx, start_step=step)
        replicas = ctx.synchronous_replicas
        run = make_run(connected.strategy, training.step(replicas), replicas=replicas)
        on_servers = connected.coordinator is not None
        if on_servers:
            checkpoints.trace()
        loop = Loop(
            run=locate(run) if on_servers else run,
            target=self.progress.target,
            progress=self.progress,
            every=every,
            checkpoints=checkpoints if self.is_chief else None,
            stop=self.stop,
            save_now=self.save_now,
            started=self._started,
            stragglers=Stragglers(self.record.folder, connected.worker_names) if on_servers else None,
            saved=self.marks.kept if self.marks is not None else None,
            summaries=train_summaries(
                self.job, self.record.folder, self.progress, model, training.optimizer, writes=self.is_chief
            ),
        )
        log.info(
            "%s trains %s from step %s to %s: %s, %s parameters, batch %s of %s, process %s",
            self.me.replica,
            module.name,
            step,
            self.progress.target,
            ctx.strategy,
            f"{sum(int(_size(v)) for v in model.trainable_variables):,}",
            ctx.batch_size,
            ctx.global_batch,
            os.environ.get(ENV_ATTEMPT, "1"),
        )

        import tensorflow as tf

        def data_of(ctx: TrainerContext) -> Any:
            return make_dataset(module, model, records, ctx)

        def data() -> Any:  # without an argument: a coordinator traces it, and can't trace a context
            return data_of(ctx)

        if module.make_dataset is None:
            data = tf.autograph.experimental.do_not_convert(data)
            data_of = tf.autograph.experimental.do_not_convert(data_of)

        if self.job.strategy.sync:
            # Each worker reads a share of its own, so each has a dataset of its own.
            shares = [
                functools.partial(data_of, worker_context(ctx, i, connected.workers))
                for i in range(connected.workers)
            ]
            servers = SyncServers(
                connected,
                trainable_parts(model),
                training.gradients,
                training.apply,
                shares,
                count=ctx.synchronous_replicas,
            )
            return loop, step, servers
        return loop, step, _batches(connected, self.job.strategy.kind, data)

    def _started(self) -> None:
        """The first call is done: tracing and compiling are over."""
        self._enter("training", "train")
        if self.marks is not None:
            self.marks.stepped()
        split = ", ".join(f"{name} {value:.1f} s" for name, value in self.phases.seconds.items())
        log.info("%s has made its first step: %s", self.me.replica, split)
        if self.is_chief and self.record.outcome() is None:
            if self.record.state is JobState.PLANNED:  # run by hand, without a launcher
                self.record.set_state(JobState.STARTING)
            self.record.set_state(JobState.RUNNING)

    def _watch_for_leaving_servers(self) -> None:
        """Save when a parameter server is asked to leave: it waits for that, within its grace time."""
        servers = self.plan.role(RoleKind.PS)
        if not servers:
            return

        def watch() -> None:
            asked: set[int] = set()
            while not self.stop.wait(0.5):
                for server in servers:
                    beat = self.record.heartbeat(server.role, server.index)
                    if beat is None or beat.phase != "leaving":
                        asked.discard(server.index)
                    elif server.index not in asked:
                        asked.add(server.index)
                        log.info("%s is asked to leave: saving a checkpoint", server.replica)
                        self.save_now.set()

        threading.Thread(target=watch, name="trainyard-leaving", daemon=True).start()

    def _metrics(self, step: int, ctx: TrainerContext, train_seconds: float) -> dict[str, float]:
        metrics = {"steps": float(step)}
        if self.progress.loss is not None:
            metrics["loss"] = self.progress.loss
        for name in ("gradients_used", "gradients_dropped"):
            if (count := getattr(self.progress, name)) is not None:
                metrics[name] = float(count)
        if self.progress.trained_steps and train_seconds > 0:
            metrics["examples_per_s"] = round(
                self.progress.trained_steps * ctx.global_batch / train_seconds, 1
            )
        return metrics


def _run_loop(loop: Loop, connected: SetUp, iterator: Any, step: int) -> int:
    if step >= loop.target:
        return step  # it was done but for saying so
    if isinstance(iterator, SyncServers):
        return train_in_turns(loop, iterator, step)
    if connected.coordinator is not None:
        return train_on_servers(loop, connected, iterator, step)
    return train_in_graph(loop, iterator, step)


def _look_for_damage(records: Any, error: Exception) -> None:
    """Raise what is wrong with the records, file and byte, when that is why the loop failed."""
    import tensorflow as tf

    suspects = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError)
    damage = records.damage() if records is not None and isinstance(error, suspects) else None
    if damage is not None:
        raise damage from error


def _size(variable: Any) -> int:
    size = 1
    for length in variable.shape:
        size *= length
    return size


def _batches(connected: SetUp, kind: StrategyKind, data: Callable[[], Any]) -> Any:
    """The iterator that the loop's function takes its batches from."""
    if connected.coordinator is not None:
        return iter(connected.coordinator.create_per_worker_dataset(data))
    if kind is StrategyKind.LOCAL:
        return iter(data())
    # Each device gets a batch of its own; shares of the data were made when it was read.
    return iter(connected.strategy.distribute_datasets_from_function(lambda _: data()))


def _warm_start(training: Training, job_folder: str) -> None:
    import tensorflow as tf

    folder = checkpoint_folder(job_folder)
    weights = tf.train.Checkpoint(**saved_weights(training.model, folder))
    path = restore_newest(weights, folder, partial=True)
    if path is None:
        raise ConfigError(f"warm_start: no checkpoint in {folder}", hint="name a trained job")
    if training.averages is not None:
        training.averages.restart()
    log.info("weights taken from %s", path)


def _describe(spool: Spool, record: JobRecord, job: TrainingJob, records: Any) -> None:
    """What MLflow shall know of the job from its start."""
    spool.params(
        {**job.args, "strategy": job.strategy.kind.value}
        | {f"{role.kind}_replicas": role.replicas for role in job.roles}
    )
    tags = {"trainyard.job": job.name, "trainyard.folder": record.folder, "trainyard.trainer": job.trainer}
    if records is not None:
        tags["trainyard.records_digest"] = records.manifest.digest
        tags["trainyard.code_version"] = records.manifest.code_version
    spool.tags(tags)

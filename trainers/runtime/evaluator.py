"""The evaluator beside training: it looks at the job's checkpoints on held-out records while they come.

It stands outside the cluster and reads the job's folder alone, so nothing that becomes of it touches training. It
takes the newest checkpoint each time and passes over those that came meanwhile; one that is deleted while it is
read is a reason to look again. It ends after the last checkpoint of a job that has succeeded.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainers.job.observations import Evaluation, add_evaluation, evaluations
from trainers.job.plan import Plan, ReplicaPlan
from trainers.job.record import Heartbeat, JobRecord, JobState
from trainers.runtime.replica import ENV_ATTEMPT, ENV_GENERATION
from trainers.runtime.strategies import thread_counts
from trainers.runtime.summaries import EventWriter, SummarySettings, summary_folder

__all__ = ["Evaluator", "follow"]

log = logging.getLogger("trainyard")

SPLIT = "eval"
BATCH = 512
_TRIES = 3  # looks at a checkpoint that can't be read, before the next one is waited for
_NICE = 10  # training goes first where both share cores


class Beats:
    """The evaluator's signs of life: at most one a second unless something has changed."""

    def __init__(self, record: JobRecord, base: Heartbeat, clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock
        self._last = -1e9
        self.now = base

    def __call__(self, phase: str, **values: Any) -> None:
        changed = dataclasses.replace(self.now, phase=phase, **values)
        if changed == self.now and self._clock() - self._last < 1.0:
            return
        self.now, self._last = changed, self._clock()
        try:
            self._record.beat(changed)
        except OSError as e:
            log.warning("could not write the heartbeat: %s", e)


class Evaluator:
    """Evaluates one checkpoint after the other; `sleep` waits between looks for a new one."""

    def __init__(
        self,
        record: JobRecord,
        plan: Plan,
        me: ReplicaPlan,
        *,
        poll: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._record = record
        self._job = plan.job
        self._me = me
        self._poll = poll
        self._clock = clock
        self._sleep = sleep
        self._predict: Any = None
        self._events: EventWriter | None = None
        self.beat = Beats(
            record,
            Heartbeat(
                role=me.role.value,
                index=me.index,
                generation=int(os.environ.get(ENV_GENERATION, "1")),
                attempt=int(os.environ.get(ENV_ATTEMPT, "1")),
                pid=os.getpid(),
                target=plan.job.args.get("steps"),
            ),
            clock,
        )

    def run(self) -> None:
        """Until the job is over, and its last checkpoint evaluated if it has succeeded."""
        self.beat("importing")
        self._import()
        from trainers.runtime.restore import Restorable

        known = Restorable(self._record.folder)
        before = evaluations(self._record.folder)
        done = {evaluation.step for evaluation in before}
        for evaluation in before[-1:]:
            # A life that was killed between record and event file has left one out.
            self._draw(evaluation.step, evaluation.metrics)
        tries: collections.Counter[int] = collections.Counter()
        while True:
            # The outcome first: what is newest after it is the last.
            outcome = self._record.outcome()
            if outcome is not None and outcome.state is not JobState.SUCCEEDED:
                break
            newest = _newest_step(known.folder)
            if newest is not None and newest not in done and tries[newest] < _TRIES:
                tries[newest] += 1  # it may be deleted while it is read, or be broken
                self.beat("restoring")
                trained = known.newest()
                if trained is not None and trained.step not in done:
                    self._evaluate(trained)
                    done.add(trained.step)
                    continue
            elif outcome is not None:
                break
            self.beat("waiting")
            self._sleep(self._poll)
        if self._events is not None:
            self._events.close()
        self.beat("ended")

    def _draw(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation to the event files, in the place of what an earlier life wrote from its step on."""
        if not SummarySettings.of(self._job).on:
            return
        if self._events is None:
            self._events = EventWriter(summary_folder(self._record.folder, "eval"), begin=step - 1)
        self._events.scalars(step, metrics)

    def _import(self) -> None:
        from trainers.runtime.lean import import_tensorflow

        tf = import_tensorflow()
        intra, inter = thread_counts(self._me)
        try:
            tf.config.threading.set_intra_op_parallelism_threads(intra)
            tf.config.threading.set_inter_op_parallelism_threads(inter)
        except RuntimeError:
            log.info("tensorflow has run in this process before: its thread pools stay as they are")

    def _evaluate(self, trained: Any) -> None:
        import tensorflow as tf

        from trainers.evaluate import eval_batches, predictor, scorer
        from trainers.evaluation.summary import means
        from trainers.runtime.datasets import NoRecords, open_records
        from trainers.task import Task

        began = self._clock()
        records = open_records(self._job)
        if records is None:
            raise NoRecords(
                f"job {self._job.name} has no records to evaluate on",
                hint='set inputs["records"] to a manifest, or leave the evaluator out',
            )
        task = Task.of(trained.module, self._job.args)
        if self._predict is None:  # one model, whatever its weights: traced once
            self._predict = tf.function(predictor(trained, records), reduce_retracing=True, autograph=False)
        scores = scorer(trained, task, self._predict)
        for features, labels in eval_batches(trained, records, SPLIT, BATCH):
            scores.update(features, labels)
            self.beat("evaluating")
        found = scores.finish()
        seconds = self._clock() - began
        metrics: Mapping[str, float] = {k: v for k, v in means(found, task).items() if v is not None}
        add_evaluation(
            self._record.folder,
            Evaluation(trained.step, metrics, found.examples, round(seconds, 3)),
        )
        self._draw(trained.step, metrics)
        rate = round(found.examples / seconds, 1) if seconds > 0 else None
        self.beat("evaluating", step=trained.step, loss=metrics.get("loss"), examples_per_s=rate)
        log.info(
            "%s: step %s on %s examples in %.1f s: %s",
            self._me.replica,
            trained.step,
            f"{found.examples:,}",
            seconds,
            ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()),
        )


def _newest_step(folder: Any) -> int | None:
    """The step of the newest checkpoint by its name, None without one."""
    import tensorflow as tf

    path = tf.train.latest_checkpoint(str(folder))
    step = path.rpartition("-")[2] if path else ""
    return int(step) if step.isdigit() else None


def follow(record: JobRecord, plan: Plan, me: ReplicaPlan) -> None:
    """Be the evaluator of a job until it is over."""
    os.nice(_NICE)
    Evaluator(record, plan, me).run()

"""Synchronous training on parameter servers, with backup workers.

As SyncReplicasOptimizer did it for TensorFlow 1 (Chen et al. 2016): in each turn every worker works out one gradient
from the present weights; the mean of the first N of N + B is applied on the servers, and late ones are dropped. With
B = 0 that is training on one device with N-fold batches.

    worker i, one closure for its whole life        servers, K turns a call of the chief
    wait for a token in its own queue               take N gradients of this turn from each accumulator
    read the turn, then the weights                 apply the mean with the optimizer
    gradient of its next batch                      next turn; a token into every queue
    push, stamped with the turn read

Nobody asks the chief between turns, so that a turn costs no call. The stamp is read before the weights: a worker
that is overtaken while it reads gives a gradient that is dropped, never a wrong one. A worker's second gradient in
one turn counts as late.

A worker that is lost is missed by nobody while it is a spare one (B >= 1). When more are lost than are spare, or the
chief or a server is, all begin again from the last checkpoint as a new generation: TensorFlow takes a worker back only
when no function runs for the chief, and here they run all the time (`Launcher._ends_it`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from trainers.runtime.aggregation import Gradients
from trainers.runtime.strategies import SetUp

__all__ = ["Board", "SyncServers", "Turns"]

_SERVER = "/job:ps/replica:0/task:0/device:CPU:0"  # where turns are counted and queues are
_FOREVER = 1 << 30
_TOKENS = 64  # kept for a worker that does not come for them
_lives = itertools.count()


@dataclasses.dataclass(frozen=True)
class Board:
    """What the servers know of the workers: `turn` is the present one; the rest one entry a worker.

    `last` is the turn of the last gradient pushed (-1: none), `pushed` how many, `seconds` what the last one took.
    """

    turn: int
    last: Sequence[int]
    pushed: Sequence[int]
    seconds: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Turns:
    """What a call of `SyncServers.run` did.

    `done` turns with a mean `loss`, in which a worker waited `waited` seconds for data; `used` gradients of each
    worker.
    """

    done: int
    loss: float
    waited: float
    used: Sequence[int]


class SyncServers:
    """The functions of a synchronous step, and what they share on the servers.

    `gradients` and `apply` are those of `steps`, for the variables `parts`; `datasets` make each worker's batches,
    one function a worker, traced here; `count` gradients make a step.
    """

    def __init__(
        self,
        set_up: SetUp,
        parts: Sequence[Any],
        gradients: Callable[[Any], tuple[Any, list[Any]]],
        apply: Callable[[list[Any]], None],
        datasets: Sequence[Callable[[], Any]],
        *,
        count: int,
    ) -> None:
        import tensorflow as tf
        from tensorflow.python.eager import executor

        self.count = count
        self._executor = executor.new_executor(enable_async=False)
        self.workers = len(datasets)
        self._set_up = set_up
        self._strategy = set_up.strategy
        # The chief applies gradients itself, which TensorFlow would warn of: here that is the point.
        self._strategy.extended._allow_run_without_coordinator = True
        self._gradients_of = gradients
        self._apply = apply
        self._life = f"trainyard-{os.getpid()}-{time.time_ns():x}-{next(_lives)}"
        with tf.device(_SERVER):
            # Made by hand: the strategy would place them in turns, which is not where the queues are.
            self._turn = tf.Variable(0, dtype=tf.int64, trainable=False, name="turn")
            self._begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="begun")
            self._pause = tf.Variable(False, trainable=False, name="pause")
            self._board = tf.Variable(
                [[-1.0, 0.0, 0.0]] * self.workers, dtype=tf.float64, trainable=False, name="board"
            )
            self._figures = tf.compat.v1.ConditionalAccumulator(
                tf.float32, [self.workers + 2], shared_name=f"{self._life}-figures"
            )
        self._gradients = Gradients(parts, self._life)
        self._incarnations = itertools.count()
        self._queues = [self._new_queue(worker) for worker in range(self.workers)]
        self._handed = [False] * self.workers
        self._datasets = [tf.function(make, autograph=False).get_concrete_function() for make in datasets]
        self._work = tf.function(self._work_as_worker, autograph=False)
        self._turns = tf.function(self._turns_on_servers, autograph=False)

    def start(self) -> None:
        """Give every worker its closure; it runs until the job ends, and again when its worker is back."""
        import tensorflow as tf

        coordinator = self._set_up.coordinator
        specs = (
            tf.data.IteratorSpec(self._datasets[0].structured_outputs.element_spec),
            tf.TensorSpec([], tf.resource),
            tf.TensorSpec([], tf.int32),
        )
        makers = (lambda i: iter(self._datasets[i]()), self._queue_of, lambda i: tf.constant(i, tf.int32))
        self._resources = tuple(
            _per_worker(coordinator, make, spec) for make, spec in zip(makers, specs, strict=True)
        )
        self._closures = [
            coordinator.schedule(self._work, args=(*self._resources, tf.constant(_FOREVER)))
            for _ in range(self.workers)
        ]

    def raise_errors(self) -> None:
        """Raise what a worker's closure raised, if one did."""
        self._set_up.coordinator.done()

    def run(self, turns: int) -> Turns:
        """Make so many turns, or fewer after `pause`."""
        import tensorflow as tf
        from tensorflow.python.eager import context

        self._pause.assign(False)
        # An executor of its own: others wait for the common one to be idle, above all the coordinator before it
        # looks after a lost worker, and this call may be waiting for that very worker.
        with context.executor_scope(self._executor), tf.device(_SERVER):
            done, figures = self._turns(tf.constant(turns), list(self._queues))
        waited, loss, *used = figures.numpy().tolist()
        done = int(done)
        return Turns(done, loss / done, waited, [round(each) for each in used])

    def pause(self) -> None:
        """Have the present call of `run` end with its turn."""
        self._pause.assign(True)

    def at_rest(self) -> int | None:
        """Turns finished in this life; None while the weights are being changed."""
        done = int(self._turn.numpy())
        return done if int(self._begun.numpy()) == done else None

    def board(self) -> Board:
        """What the servers know of the workers now."""
        turn = int(self._turn.numpy())
        last, pushed, seconds = self._board.numpy().T.tolist()
        return Board(turn, [int(t) for t in last], [int(n) for n in pushed], seconds)

    def close(self) -> None:
        """End the workers' closures, for a process that goes on: their token queues are closed."""
        import tensorflow as tf

        with tf.device(_SERVER):
            for queue in self._queues:
                tf.raw_ops.QueueCloseV2(handle=queue, cancel_pending_enqueues=True)
        for _ in range(self.workers):  # each of them says so once
            with contextlib.suppress(tf.errors.OutOfRangeError, tf.errors.CancelledError):
                self._set_up.coordinator.join()

    # ---- what runs on workers and servers

    def _new_queue(self, worker: int) -> Any:
        """A token queue for a worker, with a first token in it."""
        import tensorflow as tf

        with tf.device(_SERVER):
            queue = tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int64],
                shapes=[[]],
                capacity=-1,
                container="",
                shared_name=f"{self._life}-tokens-{worker}-{next(self._incarnations)}",
            )
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[tf.constant(0, tf.int64)])
        return queue

    def _queue_of(self, worker: int) -> Any:
        """The queue that a worker shall use: a new one whenever it comes back.

        Half of a dead worker's function goes on waiting on the server, and would take its successor's tokens.
        """
        if self._handed[worker]:
            self._queues[worker] = self._new_queue(worker)
            self.pause()  # the present call knows the old one
        self._handed[worker] = True
        return self._queues[worker]

    def _work_as_worker(self, iterator: Any, queue: Any, worker: Any, steps: Any) -> Any:
        import tensorflow as tf

        return tf.while_loop(
            lambda done: done < steps,
            lambda done: [self._one_gradient(iterator, queue, worker, done)],
            [tf.constant(0)],
            parallel_iterations=1,
        )[0]

    def _one_gradient(self, iterator: Any, queue: Any, worker: Any, done: Any) -> Any:
        import tensorflow as tf

        before = tf.timestamp()
        with tf.control_dependencies([before]):
            batch = next(iterator)  # read while it waits for the token
        tensors = tf.nest.flatten(batch, expand_composites=True)
        with tf.control_dependencies(tensors):
            waited = tf.cast(tf.timestamp() - before, tf.float32)
        with tf.device(_SERVER):
            # All tokens there are: a worker that was late goes on with the present turn.
            tokens = tf.raw_ops.QueueDequeueManyV2(
                handle=queue,
                n=tf.maximum(tf.raw_ops.QueueSizeV2(handle=queue), 1),
                component_types=[tf.int64],
            )
            with tf.control_dependencies(tokens):
                turn = self._turn.read_value()
                row = tf.gather(self._board.read_value(), worker)
                fresh = tf.cast(turn, tf.float64) > row[0]
                stamp = tf.where(fresh, turn, tf.constant(-1, tf.int64))
        with tf.control_dependencies([stamp, *tensors]):
            began = tf.timestamp()

        def replica(batch: Any) -> Any:
            with tf.control_dependencies([began]):
                value, gradients = self._gradients_of(batch)
            with tf.control_dependencies([g for g in gradients if g is not None]):
                figures = tf.stack(
                    [waited, tf.cast(value, tf.float32), tf.cast(tf.timestamp() - began, tf.float32)]
                )
            pushed = self._gradients.push(gradients, stamp)
            with tf.device(_SERVER):
                mine = tf.one_hot(worker, self.workers, dtype=tf.float32)
                pushed.append(self._figures.apply_grad(tf.concat([figures[:2], mine], 0), local_step=stamp))
                with tf.control_dependencies(pushed):
                    now = tf.stack([tf.cast(turn, tf.float64), row[1] + 1.0, tf.cast(figures[2], tf.float64)])
                    self._board.scatter_nd_update([[worker]], [now])
            return value

        value = self._strategy.run(replica, args=(batch,))
        with tf.control_dependencies([value]):
            return done + 1

    def _turns_on_servers(self, turns: Any, queues: list[Any]) -> Any:
        import tensorflow as tf

        def more(done: Any, _figures: Any) -> Any:
            return (done == 0) | ((done < turns) & ~self._pause.read_value())

        return tf.while_loop(
            more,
            lambda done, figures: (done + 1, figures + self._one_turn(queues)),
            (tf.constant(0), tf.zeros([self.workers + 2])),
            parallel_iterations=1,
        )

    def _one_turn(self, queues: list[Any]) -> Any:
        import tensorflow as tf

        figures = self._figures.take_grad(self.count)
        with tf.control_dependencies([figures]):
            gradients = self._gradients.take(self.count)
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        with tf.control_dependencies([g for g in gradients if g is not None]):
            begun = self._begun.assign_add(1, read_value=True)
        with tf.control_dependencies([begun]):
            self._strategy.run(self._apply, args=(gradients,))
        effects = [op for op in graph.get_operations()[known:] if op.op_def.is_stateful]
        with tf.control_dependencies(effects):
            turn = self._turn.assign_add(1, read_value=True)
        for queue in queues:
            # None for a worker that has left many lie: enqueuing nothing does nothing.
            room = tf.cast(tf.raw_ops.QueueSizeV2(handle=queue) < _TOKENS, tf.int32)
            with tf.control_dependencies([turn]):
                tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[tf.fill([room], turn)])
        # The mean of ones for each worker that took part: who did, whatever their number.
        return tf.concat([figures[:2], tf.cast(figures[2:] > 0, tf.float32)], 0)


def _per_worker(coordinator: Any, make: Callable[[int], Any], spec: Any) -> Any:
    """A value for each worker, `make(i)` called again whenever worker i comes back.

    TensorFlow has this for datasets alone, and with one function for all workers.
    """
    import tensorflow as tf

    values = []
    for worker in coordinator._cluster.workers:
        value = worker.create_resource(lambda i=worker.worker_index: make(i))
        value._type_spec = spec
        values.append(value)
    return tf.distribute.experimental.coordinator.PerWorkerValues(values)

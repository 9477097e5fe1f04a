"""Fifty steps of small trainers with all kinds of settings, under one strategy after the other.

    python -m tests.runtime.equal_cases local mirrored servers > losses.json
    python -m tests.runtime.equal_cases sync_servers
    TF_CONFIG=... python -m tests.runtime.equal_cases multi_worker

prints {"strategy/case": {"losses": [50], "weights": [...], "averages": [...]}} as JSON: a process can be set up once
for logical devices and servers, so tests run this one beside them. Every case sees the same 64 examples a step,
in the order of their rows, whoever computes them.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from trainers.job.spec import RoleKind, Strategy, TrainingJob, standard_roles
from trainers.runtime.context import TrainerContext, context_of
from trainers.runtime.module import TrainerModule

STEPS, GLOBAL_BATCH, WORDS = 50, 64, 20
KEPT: list[Any] = []  # servers end with the last reference to them


def rows() -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    n = STEPS * GLOBAL_BATCH
    x = random.normal(size=(n, 8)).astype("float32")
    words = random.integers(0, WORDS, (n, 3))
    target = (x[:, :1] * 2 + words.sum(axis=1, keepdims=True) / WORDS).astype("float32")
    return {"x": x, "words": words, "target": target, "weight": random.uniform(0.5, 1.5, n).astype("float32")}


def make_dataset(records: Any, ctx: TrainerContext) -> Any:
    """Batches in the order of the rows; of several processes, each the batches of its turn."""
    import tensorflow as tf

    every = rows()
    index, count = ctx.shard
    features = {"x": every["x"], "words": every["words"]}
    data = tf.data.Dataset.from_tensor_slices((features, every["target"], every["weight"]))
    return data.batch(ctx.batch_size, drop_remainder=True).shard(count, index)


def functional(hparams: Mapping[str, Any]) -> Any:
    import keras

    x, words = keras.Input((8,), name="x"), keras.Input((3,), dtype="int64", name="words")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(WORDS, 4, name="embedding")(words))
    h = keras.layers.Concatenate()([x, embedded])
    # Large enough to be cut over two parameter servers.
    h = keras.layers.Dense(4096, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-4))(h)
    return keras.Model([x, words], keras.layers.Dense(1)(h))


def with_state(hparams: Mapping[str, Any]) -> Any:
    import keras

    x = keras.Input((8,), name="x")
    h = keras.layers.Dense(16, activation="relu")(keras.layers.BatchNormalization()(x))
    return keras.Model(x, keras.layers.Dense(1)(keras.layers.Dropout(0.5, seed=7)(h)))


def subclassed(hparams: Mapping[str, Any]) -> Any:
    import keras

    class Subclass(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(16, activation="tanh")
            self.out = keras.layers.Dense(1)

        def call(self, features: Mapping[str, Any], training: bool = False) -> dict[str, Any]:
            hidden = self.hidden(features["x"])
            return {"logits": self.out(hidden), "hidden": hidden}

    return Subclass()


def plain_module(hparams: Mapping[str, Any]) -> Any:
    import tensorflow as tf

    class Linear(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = tf.Variable(tf.zeros([WORDS, 4096]), name="words")  # cut over two parameter servers
            self.steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="steps")
            self.out = tf.Variable(tf.random.stateless_normal([4096 + 8, 1], [1, 2]) * 0.02, name="out")

        def __call__(self, features: Mapping[str, Any]) -> Any:
            looked = tf.reduce_sum(tf.nn.embedding_lookup(self.words, features["words"]), axis=1)
            return tf.concat([looked, features["x"]], axis=1) @ self.out

    return Linear()


def optimizer(name: str) -> Callable[..., Any]:
    def make(hparams: Mapping[str, Any], learning_rate: Any) -> Any:
        import keras

        if name == "momentum":
            return keras.optimizers.SGD(learning_rate, momentum=0.9)
        return keras.optimizers.get({"class_name": name, "config": {"learning_rate": learning_rate}})

    return make


CASES: Mapping[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "clip_norm_cosine_ema": (
        functional,
        "momentum",
        {
            "learning_rate": 0.02,
            "gradient_clip_norm": 0.5,
            "ema_momentum": 0.9,
            "learning_rate_schedule": {"name": "cosine", "warmup_steps": 10},
        },
    ),
    "module_clip_value": (
        plain_module,
        "adam",
        {
            "learning_rate": 0.01,
            "gradient_clip_value": 0.01,
            "ema_momentum": 0.9,
            "learning_rate_schedule": {"name": "piecewise", "boundaries": [20], "factors": [1.0, 0.1]},
        },
    ),
    "float16": (
        functional,
        "sgd",
        {
            "learning_rate": 0.02,
            "mixed_precision": "float16",
            "learning_rate_schedule": {"name": "exponential", "decay_steps": 10, "decay_rate": 0.9},
        },
    ),
    "bfloat16_subclassed": (subclassed, "sgd", {"learning_rate": 0.02, "mixed_precision": "bfloat16"}),
    "jit": (functional, "adam", {"learning_rate": 0.01, "jit_compile": True, "ema_momentum": 0.99}),
    "state": (with_state, "adamw", {"learning_rate": 0.01}),
}


def job_of(strategy: str, case: str) -> TrainingJob:
    names = {"servers": "parameter_server", "sync_servers": {"kind": "parameter_server", "sync": True}}
    kind = Strategy.from_dict(names.get(strategy, strategy))
    replicas = 2 if strategy in ("mirrored", "multi_worker", "sync_servers") else 1
    args = {"steps": STEPS, "seed": 1, "batch_size": GLOBAL_BATCH // replicas, **CASES[case][2]}
    workers = {"servers": 1, "sync_servers": 2, "multi_worker": 1}.get(strategy, 0)
    roles = standard_roles(kind, workers=workers, ps=2 if "servers" in strategy else 0)
    return TrainingJob("equal", "cases", args=args, roles=roles, strategy=kind, output="/nowhere")


def train(strategy: str, case: str, set_up: Any, role: RoleKind) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    from trainers.runtime.building import build_training
    from trainers.runtime.context import worker_context
    from trainers.runtime.steps import make_run, trainable_parts
    from trainers.runtime.sync_servers import SyncServers
    from trainers.runtime.variables import is_trainable, model_variables

    job = job_of(strategy, case)
    ctx = context_of(job, role, 0, devices=set_up.devices if strategy != "multi_worker" else 1)
    build_model, name, _ = CASES[case]
    text = types.ModuleType("cases")
    text.build_model = build_model  # type: ignore[attr-defined]
    text.optimizer = optimizer(name)  # type: ignore[attr-defined]
    text.loss = lambda hparams: keras.losses.MeanSquaredError()  # type: ignore[attr-defined]
    module = TrainerModule(text)
    keras.utils.set_random_seed(1)
    training = build_training(module, set_up.strategy, ctx, lambda model: make_dataset(None, ctx))
    replicas = ctx.synchronous_replicas
    run = make_run(set_up.strategy, training.step(replicas), replicas=replicas)
    one, losses = tf.constant(1), []
    if strategy == "sync_servers":
        shares = [
            lambda i=i: make_dataset(None, worker_context(ctx, i, 2))  # type: ignore[misc]
            for i in range(2)
        ]
        together = SyncServers(
            set_up,
            trainable_parts(training.model),
            training.gradients,
            training.apply,
            shares,
            count=replicas,
        )
        together.start()
        KEPT.append(together)
        turns = [together.run(1) for _ in range(STEPS)]
        assert all(turn.done == 1 and list(turn.used) == [1, 1] for turn in turns)
        losses = [turn.loss for turn in turns]
        together.close()  # or they would hold up the next case
    elif set_up.coordinator is not None:
        data = iter(set_up.coordinator.create_per_worker_dataset(lambda: make_dataset(None, ctx)))
        for _ in range(STEPS):
            remote = set_up.coordinator.schedule(run, args=(data, one, tf.zeros([0])))
            losses.append(float(remote.fetch()[0]))
    else:
        data = make_dataset(None, ctx)
        if strategy != "local":
            data = set_up.strategy.distribute_datasets_from_function(lambda _: make_dataset(None, ctx))
        iterator = iter(data)
        losses = [float(run(iterator, one)[0]) for _ in range(STEPS)]

    def numbers(variables: Mapping[str, Any]) -> list[float]:
        return [
            float(tf.reduce_sum(tf.abs(tf.cast(tf.convert_to_tensor(v), tf.float64))))
            for v in variables.values()
        ]

    found = model_variables(training.model)
    return {
        "losses": losses,
        "weights": numbers({n: v for n, v in found.items() if is_trainable(v)}),
        "state": numbers({n: v for n, v in found.items() if not is_trainable(v)}),
        "averages": numbers(training.averages.saved()) if training.averages else [],
        "iterations": int(tf.convert_to_tensor(training.optimizer.iterations)),
        "cut": sum(1 for v in found.values() if len(getattr(v, "variables", [])) == 2),
    }


def servers(*, workers: int = 1) -> Any:
    """Two parameter servers and workers in this process, with variables cut over the two."""
    import tensorflow as tf

    from trainers.job.ports import free_ports
    from trainers.runtime.loopback import bind_loopback_only
    from trainers.runtime.server_strategy import make_server_strategy
    from trainers.runtime.strategies import SetUp

    addresses = [f"127.0.0.1:{port}" for port in free_ports(3 + workers)]
    bind_loopback_only(addresses[0])
    cluster = {"ps": addresses[:2], "worker": addresses[3:]}
    spec = tf.train.ClusterSpec(cluster)
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=8)
    kept = [
        tf.distribute.Server(spec, job_name=role, task_index=index, protocol="grpc", config=threads)
        for role, tasks in cluster.items()
        for index in range(len(tasks))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({**cluster, "chief": addresses[2:3]}),
        task_type="chief",
        task_id=0,
        rpc_layer="grpc",
    )
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=64 << 10, max_shards=2
    )
    if workers == 1:
        strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    else:
        strategy = make_server_strategy(resolver, partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    KEPT.extend(kept)
    return SetUp(strategy, workers=workers, coordinator=coordinator)


def main(strategies: list[str]) -> int:
    import os

    from trainers.lean import import_tensorflow

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cases = [case for case in CASES if case in strategies] or list(CASES)
    tf = import_tensorflow()
    from trainers.runtime.strategies import SetUp

    # Servers in one process share its threads, and each worker's function holds one for as long as it runs.
    tf.config.threading.set_inter_op_parallelism_threads(8)
    (cpu,) = tf.config.list_physical_devices("CPU")
    role = RoleKind.CHIEF
    if "mirrored" in strategies:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    found = {}
    for strategy in strategies:
        if strategy in CASES:
            continue
        if strategy == "local":
            set_up = SetUp(tf.distribute.get_strategy())
        elif strategy == "mirrored":
            set_up = SetUp(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), devices=2)
        elif strategy == "servers":
            set_up = servers()
        elif strategy == "sync_servers":
            set_up = servers(workers=2)
        else:
            task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
            role = RoleKind(task)
            set_up = SetUp(tf.distribute.MultiWorkerMirroredStrategy())
        for case in cases:
            try:
                found[f"{strategy}/{case}"] = train(strategy, case, set_up, role)
            except Exception as e:
                if "--raise" in strategies:
                    raise
                found[f"{strategy}/{case}"] = {"error": f"{type(e).__name__}: {e}"[:2000]}
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # a coordinator's destructor waits for servers


if __name__ == "__main__":
    main(sys.argv[1:])

"""The limit of benchmarks/serving.py: a model's function called in one process, without a server.

    serving_calls.py FOLDER ROUNDS SECONDS

By as many threads as the servers have clients, arrays in and arrays out, in two ways: the session's callable that our
server uses, and the signature of tf.saved_model.load, which is what Python code usually calls. Prints JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from serving.server.flags import Options
from serving.server.runtime import load_runtime
from serving.server.servable import Servable
from serving.stubs import predict_pb2
from serving.tensors import from_proto


def measure(call: Callable[[], Any], threads: int, seconds: float) -> dict[str, float]:
    """Calls a second and CPU seconds a call of threads that call without a pause."""
    counts = [0] * threads
    call()
    until = time.perf_counter() + seconds

    def work(number: int) -> None:
        while not counts[number] or time.perf_counter() < until:
            call()
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    start, used = time.perf_counter(), cpu()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took, used = time.perf_counter() - start, cpu() - used
    return {"rate": sum(counts) / took, "cpu": used / sum(counts)}


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    folder, rounds, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    roads: dict[str, tuple[Callable[[], Any], int]] = {}
    for model in ("mlp", "cnn"):
        path = folder / "models" / model / "1"
        servable = Servable(model, 1, path, load_runtime(), Options(model_base_path=str(path)))
        signature = servable.signature("")
        eager = tf.saved_model.load(str(path)).signatures["serving_default"]
        for batch in (1, 32):
            body = (folder / "requests" / f"{model}-{batch}.grpc").read_bytes()
            images = np.array(from_proto(predict_pb2.PredictRequest.FromString(body).inputs["image"]))
            for threads in (1, 4, 16):
                key = f"{model} | {batch} | {threads}"
                roads[f"session | {key}"] = (lambda s=signature, x=images: s.run({"image": x})), threads
                roads[f"signature | {key}"] = (
                    (lambda s=eager, x=images: s(image=tf.constant(x))["probabilities"].numpy()), threads
                )  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {road: [] for road in roads}
    for _ in range(rounds):
        for road, (call, threads) in roads.items():
            found[road].append(measure(call, threads, seconds))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

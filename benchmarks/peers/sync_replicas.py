"""The classic of TF1: SyncReplicasOptimizer, one parameter server and two workers. Prints a JSON line.

Written as the TensorFlow 1 guides had it: replica_device_setter, MonitoredTrainingSession with the optimizer's
hook, a tf.data input in the graph of each worker. Every replica is a process of its own on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from peer_options import peer_parser


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--ports", default="")
    parser.add_argument("--role", default="")
    options = parser.parse_args()
    if options.role:
        replica(options)
        return
    from trainers.job.ports import free_ports

    ports = ",".join(map(str, free_ports(3)))
    command = [sys.executable, __file__, *sys.argv[1:], "--ports", ports, "--role"]
    others = [
        subprocess.Popen([*command, role], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for role in ("ps-0", "worker-1")
    ]
    try:
        chief = subprocess.Popen([*command, "worker-0"], stdout=subprocess.PIPE, text=True)
        watch([chief, *others], chief)
    finally:
        for process in others:
            process.kill()
            process.wait()


def watch(processes: list[subprocess.Popen], chief: subprocess.Popen) -> None:
    """Take the chief's marks and what CPU all three have used by then."""
    import psutil

    marks, loss = [], float("nan")
    assert chief.stdout is not None
    for line in chief.stdout:
        if line.startswith("mark"):
            _, step, at = line.split()
            used = [psutil.Process(p.pid).cpu_times() for p in processes]
            marks.append((int(step), float(at), sum(t.user + t.system for t in used)))
        if line.startswith("loss"):
            loss = float(line.split()[1])
    if chief.wait() or not marks:
        raise SystemExit(f"the chief left with {chief.returncode}")
    print(json.dumps({"marks": marks, "loss": loss}))


def replica(options: argparse.Namespace) -> None:
    import tensorflow as tf
    import training_models as models

    from trainers.records.read import Dataset
    from trainers.runtime.loopback import bind_loopback_only

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    kind, _, index = options.role.partition("-")
    ps, *workers = [f"127.0.0.1:{port}" for port in options.ports.split(",")]
    cluster = tf.train.ClusterSpec({"ps": [ps], "worker": workers})
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    bind_loopback_only(ps if kind == "ps" else workers[int(index)])
    server = v1.train.Server(cluster, job_name=kind, task_index=int(index), config=config)
    if kind == "ps":
        server.join()
    chief = index == "0"
    with v1.device(
        v1.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")
    ):
        step = v1.train.get_or_create_global_step()
        with v1.device("/cpu:0"):
            data = Dataset.open(options.manifest).dataset(
                "train", options.batch, shuffle=True, seed=int(index), repeat=True, drop_remainder=True,
                cache=True,
            )  # fmt: skip
            iterator = v1.data.make_initializable_iterator(data)
            v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
            batch = iterator.get_next()
        values = models.weights(options.model, tf)
        found = models.logits(options.model, values, batch["image"], tf)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch["label"], logits=found)
        )
        optimizer = v1.train.SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(models.LEARNING_RATE),
            replicas_to_aggregate=2,
            total_num_replicas=2,
        )
        train = optimizer.minimize(loss, global_step=step)
    hook = optimizer.make_session_run_hook(chief)
    with v1.train.MonitoredTrainingSession(
        master=server.target, is_chief=chief, hooks=[hook], config=v1.ConfigProto()
    ) as session:
        session.run([train, step])
        seen, began, marks, value = 0, None, 0, 0.0
        while not chief or marks <= options.windows:
            _, number, value = session.run([train, step, loss])
            now = time.perf_counter()
            if not chief:
                continue
            seen += 1
            if (seen >= 20 and began is None) or (began is not None and now - began >= options.seconds):
                began, marks = now, marks + 1
                print("mark", number, now, flush=True)
        print("loss", value, flush=True)
        sys.stdout.flush()
        os._exit(0)  # the other worker waits for a step that will not come


if __name__ == "__main__":
    main()

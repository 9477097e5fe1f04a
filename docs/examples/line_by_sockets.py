"""A trainer without any framework: replicas that fit a line together, and add their gradients over sockets.

Every rank makes rows of its own. Each step, the others send rank 0 their gradients, which adds its own and answers
with the sum; all make the same step. Rank 0 saves a checkpoint now and then, from which all go on after a restart.
It needs nothing but Python: `trainers.job.reporting` is in the trainer package, which the launcher needs anyway.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path

from trainers.job import reporting

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MASTER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
STEPS = int(os.environ.get("TRAINYARD_ARG_STEPS", "200"))
PAUSE = float(os.environ.get("TRAINYARD_ARG_PAUSE", "0"))  # seconds a step, to have something to watch
CHECKPOINT = Path(os.environ["TRAINYARD_CHECKPOINTS"], "line.json")
RATE, ROWS, SAVE_EVERY = 0.5, 500, 10


def connect() -> list[socket.socket]:
    """Rank 0: the connections of all others. The others: the one to rank 0, which may take a moment to listen."""
    if RANK == 0:
        with socket.create_server(MASTER, family=socket.getaddrinfo(*MASTER)[0][0]) as server:
            return [server.accept()[0] for _ in range(WORLD - 1)]
    deadline = time.monotonic() + 60
    while True:
        try:
            return [socket.create_connection(MASTER)]
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def all_reduce(values: list[float], lines: list[tuple]) -> list[float]:
    """The sums over all ranks."""
    if RANK == 0:
        rows = [values, *(json.loads(reads.readline()) for reads, _ in lines)]
        values = [sum(column) for column in zip(*rows, strict=True)]
    for reads, writes in lines:
        writes.write(json.dumps(values) + "\n")
        writes.flush()
        if RANK != 0:
            values = json.loads(reads.readline())
    return values


def main() -> None:
    """Fit y = 3 x + 2."""
    rows = random.Random(RANK)
    data = [(x, 3 * x + 2 + rows.gauss(0, 0.01)) for x in (rows.uniform(-1, 1) for _ in range(ROWS))]
    state = json.loads(CHECKPOINT.read_text()) if CHECKPOINT.exists() else {"step": 0, "w": 0.0, "b": 0.0}
    step, w, b = state["step"], state["w"], state["b"]
    print(f"rank {RANK} of {WORLD} goes on from step {step}", flush=True)
    lines = [(c.makefile("r"), c.makefile("w")) for c in connect()]
    loss = 0.0
    while step < STEPS:
        errors = [(w * x + b - y, x) for x, y in data]
        sums = [sum(e * x for e, x in errors), sum(e for e, _ in errors), sum(e * e for e, _ in errors)]
        of_w, of_b, squares = (value / (ROWS * WORLD) for value in all_reduce(sums, lines))
        w, b, loss, step = w - RATE * of_w, b - RATE * of_b, squares, step + 1
        saved = None
        if RANK == 0 and step % SAVE_EVERY == 0:
            temp = CHECKPOINT.with_suffix(".tmp")
            temp.write_text(json.dumps({"step": step, "w": w, "b": b}))
            temp.replace(CHECKPOINT)  # whoever reads it never sees half of one
            saved = step
        reporting.progress(step, target=STEPS, loss=loss, saved_step=saved)
        time.sleep(PAUSE)
    reporting.result({"loss": loss, "w": w, "b": b}, step=step)
    print(f"rank {RANK} is done: y = {w:.3f} x + {b:.3f}", flush=True)


if __name__ == "__main__":
    main()

"""A PyTorch DDP trainer as any other, but for what it does when it is started again, or told to leave.

torchrun -m ddp_train --steps 1000         # or: python -m ddp_train, one process a replica
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainers.job import reporting

CHECKPOINT = Path(os.environ.get("TRAINYARD_CHECKPOINTS", "."), "model.pt")


def main() -> None:
    """Train to the asked steps, from the last checkpoint on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.1)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")  # by MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    leave: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: leave.append(number))

    model = DistributedDataParallel(torch.nn.Linear(64, 10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate)
    step = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    loss = torch.zeros(())
    while step < options.steps:
        x = torch.randn(256, 64, device=device)  # your records here: $TRAINYARD_RECORDS is their manifest
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        saved = None
        # All ranks must agree on when to leave: some were told so, and the others go with them.
        asked = torch.tensor(len(leave), device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        if dist.get_rank() == 0 and (step % 100 == 0 or asked):
            temp = CHECKPOINT.with_suffix(".tmp")
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temp
            )
            temp.replace(CHECKPOINT)
            saved = step
        if int(os.environ["LOCAL_RANK"]) == 0:
            reporting.progress(step, target=options.steps, loss=float(loss), saved_step=saved)
        if asked:
            raise SystemExit(88)  # PREEMPTED: not done, and nobody's fault
    if dist.get_rank() == 0:
        reporting.result({"loss": float(loss)}, step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

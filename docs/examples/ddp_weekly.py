"""PyTorch DDP: a chief and workers with two GPUs each, torchrun in each of them."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import dag
from trainyard import Budgets, Placement, Resources, Success, form, prepare, train


@dag(
    schedule="@weekly",
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    catchup=False,
    params=form(strategy="custom", workers=3, steps=10_000, batch_size=256, learning_rate=0.1),
)
def ddp_weekly() -> None:
    """Make records, train on them."""
    records = prepare("storage://raw/digits", name="digits", label="label")
    train(
        name="digits-ddp",
        records=records,
        # torchrun finds the gang by its PET_ variables: how many nodes, which one this is, where rank 0 listens.
        command=[
            "torchrun",
            "-m",
            "ddp_train",
            "--steps=$(TRAINYARD_ARG_STEPS)",
            "--rate=$(TRAINYARD_ARG_LEARNING_RATE)",
        ],
        image="registry.example/ddp:1",
        resources={"default": Resources(8, "32Gi", gpu=2, gpu_type="A100")},
        placement=Placement(nodes="spread"),
        success=Success("all_workers"),
        budgets=Budgets(stall=900),
    )


ddp_weekly()

"""Retrain the digits classifier every week and serve it if it is good enough."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import dag, task
from trainyard import (
    Resources,
    check_form,
    evaluate,
    form,
    gate,
    prepare,
    release,
    storage_path,
    train,
)

NAME = "digits"
SMALL = Resources(cpu=0.25, memory="2Gi")
GANG = {"strategy": "parameter_server", "workers": 2, "ps": 1}


@dag(
    schedule="@weekly",
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    tags=["trainyard", "training", "serving"],
    params=form(
        # Of 364 held-out digits one is 0.003, and two good trainings differ by up to 0.015.
        **GANG,
        steps=800,
        batch_size=64,
        learning_rate=0.003,
        min_accuracy=0.95,
        max_drop=0.03,
    ),
    doc_md="""
    ### From raw digits to a served model

    `ingest` writes scikit-learn's 1,797 handwritten digits as PNG files. `prepare` turns them into TFRecords with
    a manifest, split by hash into train and eval. `train` runs a gang of chief, workers and parameter servers,
    each a pod. `evaluate` compares with the champion on the same held-out digits, and `gate` decides. `release`
    exports, registers, publishes, deploys, verifies and promotes.

    **When it fails**, the failed task's log ends with a card that says what, where and what to do. Nothing
    reaches the server before `promote`. **To go on** after a failure in `train`, clear the group: training
    resumes from its last checkpoint.
    """,
)
def digits_retrain() -> None:
    """Ingest, prepare, train, evaluate, gate, release."""

    @task
    def ingest() -> str:
        from trainers.models.digits_raw import write_raw

        return write_raw(storage_path("raw/digits"))["source"]

    raw = ingest()
    check_form() >> raw
    records = prepare(raw, name=NAME, label="label", eval_fraction=0.2, resources=SMALL)
    trained = train(
        trainer="trainers.models.digits", records=records, name=NAME, resources={"default": SMALL}
    )
    evaluation = evaluate(trained, records, name=NAME, slices=["label"], resources=SMALL)
    verdict = gate(evaluation)
    release(trained, records, evaluation, verdict, name=NAME, resources=SMALL)


digits_retrain()

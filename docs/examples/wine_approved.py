"""Slices in the evaluation, limits of slices in the gate, and a person who approves the release."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import dag, task
from trainyard import Bins, Cross, Quantiles, evaluate, form, gate, prepare, release, storage_path, train

NAME = "wine"


@task
def fetch() -> str:
    """Write the raw table; return where it is."""
    from sklearn.datasets import load_wine

    table = load_wine(as_frame=True).frame.rename(
        columns={"target": "cultivar", "od280/od315_of_diluted_wines": "od280_od315"}
    )
    path = storage_path("raw/wine/wine.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path)
    return str(path)


@dag(schedule=None, params=form(steps=300, batch_size=32, learning_rate=0.01, min_examples=30))
def wine_approved() -> None:
    """Fetch, prepare, train, evaluate by slices, gate, ask, release."""
    records = prepare(fetch(), name=NAME, label="cultivar", eval_fraction=0.3)
    trained = train(trainer="wine_model", records=records, name=NAME, strategy="local")
    slices = [
        "cultivar",
        Bins("alcohol", [12.5, 13.5]),
        Cross(Quantiles("hue", 2), Quantiles("proline", 2)),
    ]
    evaluation = evaluate(trained, records, name=NAME, slices=slices, slice_min_examples=10)
    verdict = gate(
        evaluation,
        max_drop=0.02,
        drop_test="significantly_worse",
        slice_min=0.8,
        slice_min_examples=10,
        also={"ece": {"max": 0.2}},
        approval=True,
        approval_timeout=timedelta(hours=8),
    )
    release(trained, records, evaluation, verdict, name=NAME)


wine_approved()

"""Plain tasks of one's own between the stages of a pipeline."""

from __future__ import annotations

from typing import Any

from airflow.sdk import dag, task
from trainyard import evaluate, explained, form, gate, prepare, storage_path, train

from trainers.job.errors import DataError

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


@task
@explained
def enough(records: dict[str, Any], least: int) -> dict[str, Any]:
    """Between `prepare` and `train`: go on only with enough rows, and hand the records on."""
    counts = records["counts"]
    if counts["train"] < least:
        raise DataError(f"{counts['train']} rows to train on are too few", hint=f"collect {least} or more")
    return records


@task
def tell(name: str, verdict: dict[str, Any]) -> str:
    """After the gate, so on a pass only: tell somebody."""
    message = f"{name} is good enough: {'; '.join(verdict['reasons'])}"
    print(message)
    return message


@dag(schedule=None, params=form(steps=300, batch_size=32, learning_rate=0.01, min_examples=30))
def wine_checked() -> None:
    """Fetch, prepare, check, train on one machine, evaluate, gate, tell."""
    records = enough(prepare(fetch(), name=NAME, label="cultivar", eval_fraction=0.3), least=100)
    trained = train(trainer="wine_model", records=records, name=NAME, strategy="local")
    verdict = gate(evaluate(trained, records, name=NAME))
    tell(NAME, verdict)


wine_checked()

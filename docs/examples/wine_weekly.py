"""A whole pipeline of one's own: a table in, a served model out, every week."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import dag, task
from trainyard import check_form, evaluate, form, gate, prepare, release, storage_path, train

NAME = "wine"


@dag(
    schedule="@weekly",
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    catchup=False,
    max_active_runs=1,
    params=form(workers=2, ps=1, steps=300, batch_size=32, learning_rate=0.01, min_examples=30),
)
def wine_weekly() -> None:
    """Fetch, prepare, train, evaluate, gate, release."""

    @task
    def fetch() -> str:
        from sklearn.datasets import load_wine  # heavy: inside the task, not at the top of the file

        table = load_wine(as_frame=True).frame.rename(
            columns={"target": "cultivar", "od280/od315_of_diluted_wines": "od280_od315"}
        )
        path = storage_path("raw/wine/wine.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path)
        return str(path)

    raw = fetch()
    check_form() >> raw
    records = prepare(raw, name=NAME, label="cultivar", eval_fraction=0.3)
    trained = train(trainer="wine_model", records=records, name=NAME)
    evaluation = evaluate(trained, records, name=NAME)
    verdict = gate(evaluation)
    release(trained, records, evaluation, verdict, name=NAME)


wine_weekly()

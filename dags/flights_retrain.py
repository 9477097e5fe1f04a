"""Retrain the flight delay model every month on the last three months, and serve it if it is good enough."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import CronDataIntervalTimetable, Param, dag, task
from trainyard import Resources, check_form, evaluate, form, gate, prepare_spans, release, storage_path, train

NAME = "flights"
MONTHS = 3
SMALL = Resources(cpu=0.25, memory="2Gi")
LAST_WEEK = {"by": "time", "column": "day", "eval_from": 24}


@dag(
    schedule=CronDataIntervalTimetable("@monthly", timezone="UTC"),
    start_date=dt.datetime(2013, 1, 1, tzinfo=dt.timezone.utc),
    end_date=dt.datetime(2013, 12, 31, tzinfo=dt.timezone.utc),
    catchup=False,
    max_active_runs=1,  # the champion of one month is there before the next is compared with it
    is_paused_upon_creation=True,
    tags=["trainyard", "training", "serving"],
    params={
        **form(
            # Months differ: the error is 9 to 17 minutes, with the weather. The champion is judged on the same rows.
            **{"metric": "mae", "max_error": 20.0, "max_drop": 0.5},
            **{"strategy": "local", "workers": 0, "ps": 0},
            **{"steps": 1500, "batch_size": 256, "learning_rate": 0.003},
        ),
        "month": Param(
            "",
            type="string",
            pattern="^(2013-(0[1-9]|1[0-2]))?$",
            title="Month",
            description_md="The newest month, like 2013-03. Empty: the run's own, or December for a run without one.",
        ),
    },
    doc_md="""
    ### From real flights to a served model, month by month

    336,776 flights left New York City in 2013. What is known when a flight leaves the gate says by how many minutes
    it will arrive late. `months` writes each month's flights as Parquet; `prepare` encodes each month once, and
    makes a window of the newest three. The last week of the newest month is held out: evaluation is on flights
    later than any that was trained on. `gate` judges by the mean absolute error in minutes.

    **Backfill**: `airflow backfill create --dag-id flights_retrain --from-date 2013-01-01 --to-date 2013-03-01`
    makes a run a month. Months that are prepared are not prepared again.
    """,
)
def flights_retrain() -> None:
    """List the months, prepare, train, evaluate, gate, release."""

    @task
    def months(data_interval_start: dt.datetime | None = None, **context: object) -> list[dict[str, str]]:
        from trainers.models.flights_raw import MONTHS as YEAR
        from trainers.models.flights_raw import months_until, write_months

        own = f"{data_interval_start:%Y-%m}" if data_interval_start else YEAR[-1]
        newest = context["params"]["month"] or own
        return write_months(storage_path("raw/flights"), months_until(newest, MONTHS))

    parts = months()
    check_form() >> parts
    options = {"name": NAME, "label": "arr_delay", "split": LAST_WEEK}
    newest = {"held_out": "newest", "baseline": "previous"}
    records = prepare_spans(parts, **options, **newest, resources=SMALL)
    trained = train(
        trainer="trainers.models.flights", records=records, name=NAME, resources={"default": SMALL}
    )
    slices = ["carrier", "origin*distance[500,1000]"]
    evaluation = evaluate(trained, records, name=NAME, slices=slices, resources=SMALL)
    verdict = gate(evaluation)
    release(trained, records, evaluation, verdict, name=NAME, resources=SMALL)


flights_retrain()

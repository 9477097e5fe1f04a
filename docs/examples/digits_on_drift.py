"""Train the digits again when what the model is asked has drifted from what it was trained on."""

from __future__ import annotations

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import dag
from trainyard import on_drift


@dag(schedule=on_drift("digits"), catchup=False, max_active_runs=1, is_paused_upon_creation=True)
def digits_on_drift() -> None:
    """Start a run of the pipeline that there is."""
    TriggerDagRunOperator(task_id="retrain", trigger_dag_id="digits_retrain")


digits_on_drift()

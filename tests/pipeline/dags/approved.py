"""Pipelines that ask a person: an evaluation by hand, the gate, the question, and what comes after."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import Param, dag, task
from trainyard import FromForm, form, gate, storage_path

ACCURACY = Param(0.97, type="number", description="What the evaluation says.")


@task(multiple_outputs=True)
def evaluation(**context: Any) -> dict[str, Any]:
    """An evaluation of no model, in the folder of a job."""
    from trainers.job.files import write_json
    from trainers.job.labels import run_slug

    name = f"jobs/{context['dag'].dag_id}/{run_slug(context['run_id'])}"
    folder = storage_path(name)
    (folder / "evaluation").mkdir(parents=True)
    (folder / "evaluation" / "report.html").write_text("<p>plots</p>")
    found = {"metrics": {"accuracy": context["params"]["accuracy"]}, "examples": 360, "champion": None}
    write_json(folder / "evaluation.json", {**found, "intervals": {}, "slices": []})
    paths = {"evaluation": folder / "evaluation.json", "report": folder / "evaluation" / "report.html"}
    return {**found, **{key: str(path) for key, path in paths.items()}}


@task
def released(decision: dict[str, Any]) -> dict[str, Any]:
    """What a release is told."""
    return decision


@dag(schedule=None, params={**form(approval=True), "accuracy": ACCURACY})
def approved() -> None:
    """Ask, unless the form says not to."""
    released(gate(evaluation(), approval=FromForm("approval")))


@dag(schedule=None, params={**form(), "accuracy": ACCURACY})
def unanswered() -> None:
    """Ask, and don't wait for long."""
    released(gate(evaluation(), approval=True, approval_timeout=timedelta(seconds=2)))


approved()
unanswered()

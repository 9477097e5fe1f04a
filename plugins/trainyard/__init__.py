"""Trainyard's face for DAG files: the stages of a pipeline and the trigger form.

    from trainyard import form, prepare, train, evaluate, gate, release

    extract_sql    a database's rows to raw data
    prepare   raw data to sharded records; prepare_spans the same for a window of months, say
    records_asset, announced_records    to schedule a pipeline on new records, and to take them
    train     a gang of chief, workers and parameter servers
    evaluate  a trained model against the champion
    gate      release, or not, and who approves
    Values, Bins, Quantiles, Cross    slices of an evaluation
    release   export, register, publish, deploy, verify, promote, prune; Canary for a share of the requests first
    batch_score    a dataset or tables scored with a released version, in pods
    monitor   compares logged requests with what was trained on; drift_asset, on_drift to schedule on what it finds
    form      the trigger form; check_form refuses one whose fields don't agree
    StepOperator, storage_path, explained, RetryByClass    for steps and tasks of your own

Names are loaded when they are used: a DAG file pays for what it takes. Beside these, the package holds the
platform of one machine (`trainyard.platform`) and the process kubelet (`trainyard.kubelet`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.release.canary import Canary
    from trainers.evaluation.slices import Bins, Cross, Quantiles, Values
    from trainers.job.placement import Placement
    from trainers.job.policies import Budgets, RestartPolicy, Success
    from trainers.job.resources import Resources
    from trainyard.assets import drift_asset, on_drift, records_asset
    from trainyard.failing import RetryByClass, explained
    from trainyard.groups.batch_score import batch_score
    from trainyard.groups.evaluate import evaluate
    from trainyard.groups.extract import extract_sql
    from trainyard.groups.gate import gate
    from trainyard.groups.monitor import monitor
    from trainyard.groups.prepare import announced_records, prepare, prepare_spans
    from trainyard.groups.release import release
    from trainyard.groups.train import train
    from trainyard.operators.replica import ReplicaOperator
    from trainyard.operators.step import StepOperator
    from trainyard.settings import storage_path
    from trainyard.trigger_form import FromForm, check_form, form

_HOMES = {
    "Bins": "trainers.evaluation.slices",
    "Budgets": "trainers.job.policies",
    "Canary": "serving.release.canary",
    "Cross": "trainers.evaluation.slices",
    "FromForm": "trainyard.trigger_form",
    "Placement": "trainers.job.placement",
    "Quantiles": "trainers.evaluation.slices",
    "ReplicaOperator": "trainyard.operators.replica",
    "Resources": "trainers.job.resources",
    "RestartPolicy": "trainers.job.policies",
    "RetryByClass": "trainyard.failing",
    "StepOperator": "trainyard.operators.step",
    "Success": "trainers.job.policies",
    "Values": "trainers.evaluation.slices",
    "announced_records": "trainyard.groups.prepare",
    "batch_score": "trainyard.groups.batch_score",
    "check_form": "trainyard.trigger_form",
    "drift_asset": "trainyard.assets",
    "evaluate": "trainyard.groups.evaluate",
    "explained": "trainyard.failing",
    "extract_sql": "trainyard.groups.extract",
    "form": "trainyard.trigger_form",
    "gate": "trainyard.groups.gate",
    "monitor": "trainyard.groups.monitor",
    "on_drift": "trainyard.assets",
    "prepare": "trainyard.groups.prepare",
    "prepare_spans": "trainyard.groups.prepare",
    "records_asset": "trainyard.assets",
    "release": "trainyard.groups.release",
    "storage_path": "trainyard.settings",
    "train": "trainyard.groups.train",
}

__all__ = [
    "Bins",
    "Budgets",
    "Canary",
    "Cross",
    "FromForm",
    "Placement",
    "Quantiles",
    "ReplicaOperator",
    "Resources",
    "RestartPolicy",
    "RetryByClass",
    "StepOperator",
    "Success",
    "Values",
    "announced_records",
    "batch_score",
    "check_form",
    "drift_asset",
    "evaluate",
    "explained",
    "extract_sql",
    "form",
    "gate",
    "monitor",
    "on_drift",
    "prepare",
    "prepare_spans",
    "records_asset",
    "release",
    "storage_path",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Trainyard's face for DAG files: the stages of a pipeline and the trigger form.

    from trainyard import form, prepare, train, evaluate, gate, release

    extract_sql    a database's rows to raw data
    prepare   raw data to sharded records; prepare_spans the same for a window of months, say
    records_asset, announced_records    to schedule a pipeline on new records, and to take them
    train     a gang of chief, workers and parameter servers
    evaluate  a trained model against the champion
    gate      release, or not
    release   export, register, publish, deploy, verify, promote
    form      the trigger form; check_form refuses one whose fields don't agree
    StepOperator, storage_path, explained, RetryByClass    for steps and tasks of your own

Names are loaded when they are used: a DAG file pays for what it takes. Beside these, the package holds the
platform of one machine (`trainyard.platform`) and the process kubelet (`trainyard.kubelet`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.job.policies import Budgets, RestartPolicy, Success
    from trainers.job.spec import Resources
    from trainyard.assets import records_asset
    from trainyard.failing import RetryByClass, explained
    from trainyard.groups.evaluate import evaluate
    from trainyard.groups.extract import extract_sql
    from trainyard.groups.gate import gate
    from trainyard.groups.prepare import announced_records, prepare, prepare_spans
    from trainyard.groups.release import release
    from trainyard.groups.train import train
    from trainyard.operators.replica import ReplicaOperator
    from trainyard.operators.step import StepOperator
    from trainyard.settings import storage_path
    from trainyard.trigger_form import FromForm, check_form, form

_HOMES = {
    "Budgets": "trainers.job.policies",
    "FromForm": "trainyard.trigger_form",
    "ReplicaOperator": "trainyard.operators.replica",
    "Resources": "trainers.job.spec",
    "RestartPolicy": "trainers.job.policies",
    "RetryByClass": "trainyard.failing",
    "StepOperator": "trainyard.operators.step",
    "Success": "trainers.job.policies",
    "announced_records": "trainyard.groups.prepare",
    "check_form": "trainyard.trigger_form",
    "evaluate": "trainyard.groups.evaluate",
    "explained": "trainyard.failing",
    "extract_sql": "trainyard.groups.extract",
    "form": "trainyard.trigger_form",
    "gate": "trainyard.groups.gate",
    "prepare": "trainyard.groups.prepare",
    "prepare_spans": "trainyard.groups.prepare",
    "records_asset": "trainyard.assets",
    "release": "trainyard.groups.release",
    "storage_path": "trainyard.settings",
    "train": "trainyard.groups.train",
}

__all__ = [
    "Budgets",
    "FromForm",
    "ReplicaOperator",
    "Resources",
    "RestartPolicy",
    "RetryByClass",
    "StepOperator",
    "Success",
    "announced_records",
    "check_form",
    "evaluate",
    "explained",
    "extract_sql",
    "form",
    "gate",
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

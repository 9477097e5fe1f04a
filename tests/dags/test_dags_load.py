"""Every DAG loads, cheaply, with the shape that its page promises."""

from __future__ import annotations

import copy
import datetime as dt
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
DAGS = sorted((REPO / "dags").glob("*.py"))

# Airflow 3.3 asks the library that reads .airflowignore for a class by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

_PARSE = """
import json, sys, time
import airflow.sdk, airflow.sdk.definitions.decorators, airflow.sdk.definitions.timetables.trigger
import airflow.providers.cncf.kubernetes.operators.pod, airflow.providers.standard.operators.branch
from airflow.dag_processing.importers import python_importer
known = set(sys.modules)
began = time.process_time()
import importlib.util
spec = importlib.util.spec_from_file_location("the_dag", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
seconds = time.process_time() - began
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - known)}))
"""
# What costs seconds or hundreds of MB in every task, if a DAG file imports it.
_HEAVY = {
    "tensorflow",
    "keras",
    "mlflow",
    "pyarrow",
    "pandas",
    "sklearn",
    "grpc",
    "tensorflow_serving",
    "PIL",
}


def test_all_dags_load_without_an_error(dag_bag: Any) -> None:
    assert dag_bag.import_errors == {}
    assert "digits_retrain" in dag_bag.dags


@pytest.mark.parametrize("path", DAGS, ids=lambda path: path.name)
def test_a_dag_file_is_short_and_uses_public_names_only(path: Path) -> None:
    import ast

    import trainyard

    text = path.read_text()
    assert len(text.splitlines()) < 80
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainyard":
            assert node.module == "trainyard"
            assert {alias.name for alias in node.names} <= set(trainyard.__all__)


@pytest.mark.parametrize("path", DAGS, ids=lambda path: path.name)
def test_a_dag_file_parses_within_its_budget(path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PARSE, str(path)], capture_output=True, text=True, check=True
    )
    result = json.loads(run.stdout.splitlines()[-1])
    print(f"{path.name}: {result['seconds']:.3f} CPU-s over importing airflow and the pod operator")
    loaded = {name.split(".")[0] for name in result["modules"]}
    assert loaded & _HEAVY == set()
    assert result["seconds"] < 1.0  # meant: 0.1; a busy machine counts more


def test_digits_retrain_has_the_promised_shape(dag_bag: Any) -> None:
    dag = dag_bag.dags["digits_retrain"]
    assert dag.max_active_runs == 1
    assert dag.catchup is False
    assert dag.is_paused_upon_creation is True
    assert dag.schedule == "@weekly"
    assert dag.doc_md
    shape = {
        task.task_id: (type(task).__name__, task.trigger_rule.value, sorted(task.upstream_task_ids))
        for task in dag.tasks
    }
    step, plain = "StepOperator", "_PythonDecoratedOperator"
    assert shape == {
        "check_form": (plain, "all_success", []),
        "ingest": (plain, "all_success", ["check_form"]),
        "prepare": ("RecordsOperator", "all_success", ["ingest"]),
        "train.plan": ("PlanOperator", "all_success", ["prepare"]),
        "train.admit": ("AdmitOperator", "all_success", ["train.plan"]),
        "train.service": ("ServiceOperator", "all_success", ["train.admit"]),
        "train.replica": ("MappedOperator", "all_success", ["train.plan", "train.service"]),
        "train.verdict": ("VerdictOperator", "all_done", ["train.replica"]),
        "train.cleanup": (
            "CleanupOperator",
            "all_done_setup_success",
            ["train.service", "train.verdict"],
        ),
        "champion": (plain, "all_success", ["prepare"]),
        "evaluate": ("EvaluateOperator", "all_success", ["champion", "prepare", "train.verdict"]),
        "gate": ("GateOperator", "all_success", ["evaluate"]),
        "not_released": (plain, "all_success", ["gate"]),
        "release.export": (step, "all_success", ["gate", "prepare", "train.verdict"]),
        "release.register": (
            "RegisterOperator",
            "all_success",
            ["evaluate", "prepare", "release.export", "train.verdict"],
        ),
        "release.publish": (plain, "all_success", ["release.export", "release.register"]),
        "release.deploy": (plain, "all_success", ["release.publish"]),
        "release.verify": (plain, "all_success", ["release.deploy", "release.publish"]),
        "release.promote": ("PromoteOperator", "all_success", ["gate", "release.publish", "release.verify"]),
        "release.prune": (plain, "all_success", ["release.promote"]),
    }
    assert dag.get_task("train.service").is_setup
    assert dag.get_task("train.cleanup").is_teardown


def test_flights_retrain_runs_by_the_month_and_judges_minutes(dag_bag: Any) -> None:
    dag = dag_bag.dags["flights_retrain"]
    assert dag.max_active_runs == 1
    assert dag.catchup is False
    assert (dag.start_date.year, dag.end_date.year) == (2013, 2013)
    upstream = {task.task_id: sorted(task.upstream_task_ids) for task in dag.tasks}
    assert upstream["months"] == ["check_form"]
    assert upstream["prepare.plan"] == ["months"]
    assert upstream["prepare.encode"] == ["prepare.plan"]
    assert upstream["prepare.window"] == ["prepare.encode", "prepare.plan"]
    assert upstream["train.plan"] == ["prepare.window"]
    assert {asset.uri for task in dag.tasks for asset in task.outlets} == {"storage://records/flights"}
    assert (dag.params["metric"], dag.params["max_error"], dag.params["month"]) == ("mae", 20.0, "")
    assert "min_accuracy" not in dag.params
    assert {name: dag.get_task(name).retries for name in ("prepare.encode", "prepare.window")} == {
        "prepare.encode": 10,
        "prepare.window": 10,
    }


@pytest.mark.parametrize(
    ("interval", "month", "expected"),
    [
        ("2013-01-01", "", ["2013-01"]),
        ("2013-05-01", "", ["2013-03", "2013-04", "2013-05"]),
        (None, "", ["2013-10", "2013-11", "2013-12"]),
        ("2013-05-01", "2013-02", ["2013-01", "2013-02"]),
    ],
)
def test_a_run_takes_its_month_and_the_two_before(
    dag_bag: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interval: str | None,
    month: str,
    expected: list[str],
) -> None:
    monkeypatch.setenv("TRAINYARD_STORAGE", str(tmp_path))
    start = dt.datetime.fromisoformat(interval) if interval else None
    months = dag_bag.dags["flights_retrain"].get_task("months").python_callable
    parts = months(data_interval_start=start, params={"month": month})
    assert [part["span"] for part in parts] == expected
    assert all(Path(part["source"]).is_file() for part in parts)


def test_what_runs_in_a_pod_is_retried_by_its_failures_class(dag_bag: Any) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    dag = DagSerialization.from_dict(DagSerialization.to_dict(dag_bag.dags["digits_retrain"]))
    pods = ["prepare", "train.replica", "evaluate", "release.export", "release.register"]
    # As the scheduler sees them: a mapped task's retries are not those that its operator sets when it is made.
    assert {
        name: (dag.get_task(name).retries, dag.get_task(name).has_retry_policy) for name in pods
    } == dict.fromkeys(pods, (10, True))


def test_only_steps_and_replicas_run_pods_and_tasks_have_links(dag_bag: Any) -> None:
    dag = dag_bag.dags["digits_retrain"]
    links = {task.task_id: [link.name for link in task.operator_extra_links] for task in dag.tasks}
    assert {name: found for name, found in links.items() if found} == {
        "prepare": ["Records report"],
        "train.replica": ["MLflow run"],
        "train.verdict": ["MLflow run"],
        "evaluate": ["Evaluation report"],
        "gate": ["Evaluation report"],
        "release.register": ["MLflow run", "Model"],
        "release.promote": ["Model"],
    }


def test_a_dag_serializes_the_same_way_each_time(dag_bag: Any) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    dag = dag_bag.dags["digits_retrain"]
    first = json.dumps(DagSerialization.serialize_dag(dag), default=str, sort_keys=True)
    assert "object at 0x" not in first  # a new version of the DAG at every parse
    assert str(REPO / ".trainyard") not in first


def test_pods_hold_no_secret_and_no_right_they_do_not_need(
    dag_bag: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_STORAGE", "/data")
    monkeypatch.setenv("TRAINYARD_STORAGE_CLAIM", "storage")
    monkeypatch.setenv("TRAINYARD_IMAGE", "registry.example/trainer:1")
    monkeypatch.setenv("TRAINYARD_SERVICE_ACCOUNT", "pipelines")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    monkeypatch.setenv("AIRFLOW_CONN_TRAINYARD_KUBERNETES", '{"password": "hunter2"}')
    from trainyard import StepOperator

    steps = [task for task in dag_bag.dags["digits_retrain"].tasks if isinstance(task, StepOperator)]
    assert len(steps) == 4
    for original in steps:
        step = copy.copy(original)
        step.spec = {"job": "/data/jobs/1"}  # as if its tasks' results had come
        pod = step.build_pod_request_obj(dry_run=True)
        container = pod.spec.containers[0]
        names = {row.name for row in container.env}
        assert names == {"PYTHONUNBUFFERED", "TRAINYARD_STORAGE", "MLFLOW_TRACKING_URI"}
        assert "hunter2" not in str(pod.to_dict())
        assert container.command[:2] == ["python", "-m"]
        assert container.image == "registry.example/trainer:1"
        assert container.security_context.run_as_non_root is True
        assert container.security_context.allow_privilege_escalation is False
        assert container.security_context.capabilities.drop == ["ALL"]
        assert pod.spec.automount_service_account_token is False
        assert pod.spec.service_account_name == "pipelines"
        assert pod.spec.restart_policy == "Never"
        assert pod.metadata.labels["app.kubernetes.io/managed-by"] == "trainyard"
        assert pod.metadata.labels["trainyard.io/pipeline"] == "digits-retrain-65a447b4"
        assert pod.spec.volumes[0].persistent_volume_claim.claim_name == "storage"
        assert container.volume_mounts[0].mount_path == "/data"
        assert container.resources.limits == {"memory": "2Gi"}
        assert len(pod.metadata.name) <= 63


def test_the_plugin_file_is_all_that_airflow_loads() -> None:
    from airflow._shared.module_loading.file_discovery import find_path_from_directory

    found = find_path_from_directory(str(REPO / "plugins"), ".airflowignore")
    files = [Path(path).relative_to(REPO / "plugins") for path in found if path.endswith(".py")]
    assert files == [Path("trainyard_plugin.py")]
    spec = importlib.util.spec_from_file_location("trainyard_plugin", REPO / "plugins" / files[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    links = {link.name for link in module.TrainyardPlugin.operator_extra_links}
    assert links == {"MLflow run", "Model", "Records report", "Evaluation report", "Drift report"}

"""Tasks and pods that share no folder but an object store: steps, a gang's life, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from kubernetes.client import ApiClient
from trainyard.cluster import core_api
from trainyard.failing import StepFailed
from trainyard.operators.gang import (
    CleanupOperator,
    JobTemplate,
    PlanOperator,
    ServiceOperator,
    VerdictOperator,
)
from trainyard.operators.replica import ReplicaOperator
from trainyard.operators.step import StepOperator
from trainyard.reaper import find_orphans
from trainyard.settings import PipelineSettings
from trainyard.shared_files import bring, job_files
from trainyard.trigger_form import DEFAULTS

from tests.plugins.pod_security import violations
from tests.s3_server import SECRET, credentials, make_bucket, running_moto
from trainers.job.failures import FailureClass
from trainers.job.record import JobRecord, JobState
from trainers.job.spec import Resources
from trainers.storage.objects import ObjectStore

FORM = {**DEFAULTS, "workers": 1, "ps": 1}
TEMPLATE = JobTemplate("digits", "a_trainer", resources={"default": Resources(0.1, "256Mi")})


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a running S3 server."""
    with running_moto(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture
def storage(
    moto: int, pipelines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, ObjectStore]:
    """Airflow's own storage root, and the store; pods have the credentials by a file, as if it were mounted."""
    for name, value in credentials(moto).items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id = tests\naws_secret_access_key = {SECRET}\n")
    file.chmod(0o600)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    url = make_bucket()
    monkeypatch.setenv("TRAINYARD_STORE", url)
    return pipelines, ObjectStore(url)


def gone(root: Path) -> None:
    """Another machine: nothing is here."""
    shutil.rmtree(root)
    root.mkdir()


def test_a_step_reads_and_writes_the_store(step: Any, storage: Any, context_of: Any) -> None:
    root, store = storage
    (root / "raw" / "digits").mkdir(parents=True)
    (root / "raw" / "digits" / "a.csv").write_text("1\n")  # by a task of Airflow's, just now
    source = """
    from pathlib import Path
    here = Path(os.environ["TRAINYARD_STORAGE"])
    print("key in sight:", any("not-for-any" in value for value in os.environ.values()))
    text = (Path(spec["raw"]) / "a.csv").read_text()
    out = Path(spec["out"])
    out.mkdir(parents=True)
    (out / "b.json").write_text('{"of": "%s/raw/digits"}' % here)
    return {"out": str(out / "b.json"), "text": text, "root": str(here)}
    """
    spec = {"raw": "storage://raw/digits", "out": "storage://made/here"}
    operator = step(source, spec)
    result = operator.execute(context_of(operator))
    assert result["text"] == "1\n"
    assert result["root"] == str(root) != ""  # a path of its own there, of this machine here
    assert store.read("made/here/b.json") == b'{"of": "storage://raw/digits"}'
    assert not (root / "made").exists()
    bring(result["out"])
    assert json.loads(Path(result["out"]).read_text()) == {"of": str(root / "raw" / "digits")}
    (root / "raw" / "digits" / "a.csv").write_text("2\n")
    operator = step(source.replace("mkdir(parents=True)", "mkdir(parents=True, exist_ok=True)"), spec)
    assert operator.execute(context_of(operator))["text"] == "2\n"


def test_a_step_that_fails_has_written_nothing(step: Any, storage: Any, context_of: Any) -> None:
    _, store = storage
    source = """
    from pathlib import Path
    Path(spec["out"]).mkdir(parents=True)
    (Path(spec["out"]) / "half").write_text("x")
    raise errors.DataError("no", hint="look")
    """
    operator = step(source, {"out": "storage://made"})
    with pytest.raises(StepFailed) as e:
        operator.execute(context_of(operator))
    assert e.value.failure.failure_class is FailureClass.DATA
    assert store.find("made") == {}


LAUNCHER = """
import os, time
from trainers.job.record import Heartbeat, JobRecord, JobState
record = JobRecord.open(os.environ["TRAINYARD_JOB"])
role, index = os.environ["TRAINYARD_ROLE"], int(os.environ["TRAINYARD_INDEX"])
record.beat(Heartbeat(role, index, phase="here"))
if role == "chief":
    while len(record.heartbeats()) < 2:
        time.sleep(0.05)
    record.finish(JobState.SUCCEEDED, step=7, metrics={"accuracy": 0.5})
while record.outcome() is None:
    time.sleep(0.05)
"""


def _gang_task(kind: Any, **options: Any) -> Any:
    with DAG("pipeline", max_active_tasks=8):
        return kind(group="train", **options)


def test_a_gang_lives_by_the_store_alone(storage: Any, context_of: Any) -> None:
    """Chief and worker in pods with roots of their own; every light task on a machine that has seen nothing."""
    import threading

    root, store = storage
    plan = _gang_task(
        PlanOperator, task_id="plan", template=TEMPLATE, records={"manifest": "storage://records/m"}
    )
    context = context_of(plan, params=FORM)
    rows = plan.execute(context)
    folder = Path(context["ti"].xcom["job"])
    key = folder.relative_to(root).as_posix()
    kept = store.read(f"{key}/plan.json")
    assert kept is not None
    assert str(root).encode() not in kept
    gone(root)

    failures: list[BaseException] = []

    def run(row: dict[str, Any]) -> None:
        with DAG("pipeline"):
            operator = ReplicaOperator(task_id="replica", **{**row, "cmds": [sys.executable, "-c", LAUNCHER]})
        try:
            operator.execute(context_of(operator))
        except BaseException as e:  # noqa: BLE001 - of a thread
            failures.append(e)

    threads = [
        threading.Thread(target=run, args=(row,))
        for row in rows
        if row["hostname"] in ("chief-0", "worker-0")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gone(root)
    verdict = _gang_task(VerdictOperator, task_id="verdict", replica_task="replica")
    result = verdict.execute(context_of(verdict))
    assert result["step"] == 7
    assert result["job"] == str(folder)
    gone(root)
    with DAG("pipeline"):  # a replica that comes late finds that all is done
        late = ReplicaOperator(task_id="replica", **rows[0])
    late.execute(context_of(late))
    cleanup = _gang_task(CleanupOperator, task_id="cleanup")
    cleanup.execute(context_of(cleanup))
    with job_files(folder, writes=False):
        outcome = JobRecord.open(folder).outcome()
    assert outcome is not None
    assert outcome.state is JobState.SUCCEEDED


def test_the_reaper_asks_the_store(storage: Any, context_of: Any) -> None:
    root, _ = storage
    plan = _gang_task(PlanOperator, task_id="plan", template=TEMPLATE, records="storage://records/m")
    context = context_of(plan, params=FORM)
    plan.execute(context)
    folder = Path(context["ti"].xcom["job"])
    service = _gang_task(ServiceOperator, task_id="service")
    service.execute(context_of(service))
    cleanup = _gang_task(CleanupOperator, task_id="cleanup")
    gang = cleanup.gang(context_of(cleanup))

    def orphans() -> list[str]:
        gone(root)
        (root / "jobs" / "pipeline").mkdir(parents=True)  # this machine knows other jobs
        return [o.why for o in find_orphans(core_api(), "trainyard", grace=-60.0) if o.gang == gang]

    assert orphans() == []
    with job_files(folder):
        JobRecord.open(folder).finish(JobState.CANCELLED)
    assert orphans() == ["its job has cancelled"]
    cleanup.execute(context_of(cleanup))


def test_a_failed_job_is_opened_again_in_the_store(storage: Any, context_of: Any) -> None:
    root, store = storage

    def plan() -> Path:
        operator = _gang_task(
            PlanOperator, task_id="plan", template=TEMPLATE, records={"manifest": "storage://records/m"}
        )
        context = context_of(operator, params=FORM)
        operator.execute(context)
        return Path(context["ti"].xcom["job"])

    for times in (1, 2):
        folder = plan()
        key = folder.relative_to(root).as_posix()
        assert store.read(f"{key}/outcome.json") is None
        gone(root)
        with job_files(folder):
            JobRecord.open(folder).finish(JobState.CANCELLED)
        gone(root)
        with job_files(folder):  # the first to say so wins, wherever the second is
            assert JobRecord.open(folder).finish(JobState.SUCCEEDED).state is JobState.CANCELLED
        gone(root)
        assert (store.read(f"{key}/history/{times - 1:04d}/outcome.json") is not None) == (times > 1)


def test_the_pods_of_a_store(storage: Any, context_of: Any) -> None:
    root, store = storage
    operator = StepOperator(task_id="step", module="a_step", spec={"at": "storage://x"})
    pod = ApiClient().sanitize_for_serialization(
        operator.build_pod_request_obj(context_of(operator), dry_run=True)
    )
    base = pod["spec"]["containers"][0]
    assert base["command"] == ["python", "-m", "trainers.storage.pod", "python", "-m", "a_step"]
    assert {"name": "trainyard-storage", "mountPath": str(root)} in base["volumeMounts"]
    assert {"name": "trainyard-storage", "emptyDir": {}} in pod["spec"]["volumes"]
    assert {"name": "TRAINYARD_STORE", "value": store.url} in base["env"]
    assert violations(pod) == []
    text = json.dumps(pod)
    assert SECRET not in text
    assert "AWS_SECRET_ACCESS_KEY" not in text


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TRAINYARD_STORE": "s3://"}, "TRAINYARD_STORE must be s3://bucket/prefix or gs://"),
        ({"TRAINYARD_STORE": "ftp://a/b"}, "TRAINYARD_STORE must be s3://bucket/prefix or gs://"),
        (
            {"TRAINYARD_STORE": "s3://key:word@a/b"},
            "must be a bucket and a prefix alone, got 'a URL with more",
        ),
        ({"TRAINYARD_STORE": "s3://a/b?x=word"}, "must be a bucket and a prefix alone, got 'a URL with more"),
        (
            {"TRAINYARD_STORE": "s3://a/b", "TRAINYARD_STORAGE_CLAIM": "c"},
            "TRAINYARD_STORAGE_CLAIM must not be set beside TRAINYARD_STORE",
        ),
    ],
)
def test_settings_that_can_not_be(environ: dict[str, str], words: str) -> None:
    with pytest.raises(Exception, match="must") as e:
        PipelineSettings.from_environment({"TRAINYARD_STORAGE": "/data", **environ})
    assert words in str(e.value)
    assert ":word" not in str(e.value)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"strategy": "multi_worker"}, "strategy must be one whose chief alone restores checkpoints"),
    ],
)
def test_gangs_that_a_store_can_not_hold(
    form: dict[str, Any], words: str, storage: Any, context_of: Any
) -> None:
    plan = _gang_task(PlanOperator, task_id="plan", template=TEMPLATE, records="storage://records/m")
    with pytest.raises(StepFailed) as e:
        plan.execute(context_of(plan, params={**FORM, "ps": 0, **form}))
    assert words in str(e.value)
    assert e.value.failure.failure_class is FailureClass.CONFIG


@pytest.mark.parametrize(
    ("module", "spec"),
    [
        ("trainers.records", {"step": "encode"}),
        ("trainers.score", {"step": "plan"}),
        ("trainers.monitor", {}),
    ],
)
def test_steps_that_a_store_can_not_hold(
    module: str, spec: dict[str, Any], storage: Any, context_of: Any
) -> None:
    operator = StepOperator(task_id="step", module=module, spec=spec)
    with pytest.raises(Exception, match="needs a storage root that pods share"):
        operator.build_pod_request_obj(context_of(operator), dry_run=True)


def test_a_wrong_bucket_is_said_before_any_pod(
    storage: Any, context_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_STORE", "s3://not-there-at-all/x")
    plan = _gang_task(PlanOperator, task_id="plan", template=TEMPLATE, records="storage://records/m")
    with pytest.raises(StepFailed) as e:
        plan.execute(context_of(plan, params=FORM))
    assert e.value.failure.failure_class is FailureClass.CONFIG
    assert "NoSuchBucket" in str(e.value)
    assert SECRET not in str(e.value)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET

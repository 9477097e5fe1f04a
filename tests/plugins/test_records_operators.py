"""prepare in one task and in many, with real pods; what is announced, and what is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.execution_time.context import OutletEventAccessors
from trainyard import batch_score, evaluate, monitor, prepare, prepare_spans, records_asset, release
from trainyard.failing import StepFailed
from trainyard.operators.records import PLAN_KEY, RecordsOperator, RecordsPlanOperator
from trainyard.records_page import report_path, report_url

from trainers.job.errors import InvalidSpec
from trainers.records.manifest import Manifest


@pytest.fixture
def raw(pipelines: Path) -> Path:
    """Four CSV files of 50 rows, a month each, under the storage root."""
    for month in range(1, 5):
        path = pipelines / "raw" / "sales" / f"2013-{month:02d}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [f"{month * 100 + i},{i / 7:.3f},{i % 2}" for i in range(50)]
        path.write_text("\n".join(["id,x,y", *rows]) + "\n")
    return pipelines / "raw" / "sales"


@pytest.fixture
def execute(context_of: Any) -> Any:
    """Runs an operator; its result and the extra of its asset event, None where there is no event."""

    def run(operator: Any, **options: Any) -> tuple[Any, dict[str, Any] | None, Any]:
        context = context_of(operator, **options)
        context["outlet_events"] = OutletEventAccessors()
        result = operator.execute(context)
        events = [context["outlet_events"][asset].extra for asset in operator.outlets]
        return result, (events[0] if events else None), context

    return run


SPEC = {"name": "sales", "label": "y", "key": "id", "output": "storage://records/sales", "shards": 4}


def _whole(**more: Any) -> RecordsOperator:
    spec = {**SPEC, "source": "storage://raw/sales", **more}
    return RecordsOperator(task_id="prepare", announces="sales", spec=spec)


def test_something_new_is_announced_and_nothing_new_is_not(raw: Path, execute: Any) -> None:
    result, event, _ = execute(_whole())
    assert event == {key: result[key] for key in ("manifest", "digest", "counts")}
    assert not result["reused"]
    again, event, _ = execute(_whole())
    assert again == {**result, "reused": True}
    assert event is None
    # A first try may have published and died before Airflow knew: the second announces what it finds.
    _, event, _ = execute(_whole(), try_number=2)
    assert event is not None
    assert event["digest"] == result["digest"]


def test_mapped_slices_make_the_records_of_one_task(raw: Path, execute: Any, pipelines: Path) -> None:
    whole, _, _ = execute(_whole())
    sliced = {**SPEC, "output": "storage://records/sliced", "source": "storage://raw/sales"}
    plan = RecordsPlanOperator(task_id="plan", spec={"step": "plan", "slices": 2, **sliced})
    rows, _, context = execute(plan)
    assert [row["part"] for row in rows] == ["2013-01.csv and 1 more", "2013-02.csv and 1 more"]
    path = context["ti"].xcom[PLAN_KEY]
    assert len(json.dumps(rows)) < 1000

    def publish() -> Any:
        return execute(
            RecordsOperator(task_id="publish", announces="sales", spec={"step": "publish", "plan": path})
        )

    execute(RecordsOperator(task_id="encode", **rows[1]))
    with pytest.raises(StepFailed, match=r"1 of 2 slices .* slice 0 \(2013-01.csv and 1 more\)") as caught:
        publish()
    assert caught.value.failure.failure_class.value == "DATA"
    execute(RecordsOperator(task_id="encode", **rows[0]))
    result, event, _ = publish()
    assert result["digest"] == whole["digest"]
    assert event["manifest"] == result["manifest"]

    again = RecordsPlanOperator(task_id="plan", spec={"step": "plan", "slices": 2, **sliced})
    rows, _, context = execute(again)
    assert rows == []
    assert context["ti"].xcom[PLAN_KEY] == path
    assert publish()[1] is None


def test_the_report_is_linked_where_there_is_one(
    raw: Path, execute: Any, pipelines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = _whole()
    result, _, _ = execute(operator)
    manifest = Path(result["manifest"])
    (manifest.parent / "report.html").write_text("<p>statistics</p>")
    operator = _whole()
    execute(operator)
    expected = f"/trainyard/records/sales/{manifest.parent.name}/report.html"
    assert operator.report_url.endswith(expected)
    (link,) = operator.operator_extra_links
    assert link.get_link(operator, ti_key=None).endswith(expected)
    assert report_url("/elsewhere/manifest.json") == ""


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("sales", ".."),
        ("..", "0123456789abcdef"),
        ("sales", "0123456789abcdeg"),
        ("sales/x", "0123456789abcdef"),
        ("", "0123456789abcdef"),
        ("sales", "fedcba9876543210"),  # a link that leads out
        ("sales", "00000000000000aa"),  # nothing there
    ],
)
def test_no_other_file_is_ever_served(tmp_path: Path, name: str, dataset: str) -> None:
    storage = tmp_path / "storage"
    good = storage / "records" / "sales" / "0123456789abcdef" / "report.html"
    good.parent.mkdir(parents=True)
    good.write_text("good")
    (tmp_path / "secret").write_text("secret")
    out = storage / "records" / "sales" / "fedcba9876543210"
    out.mkdir()
    (out / "report.html").symlink_to(tmp_path / "secret")
    assert report_path(storage, "sales", "0123456789abcdef") == good
    assert report_path(storage, name, dataset) is None


def test_the_shapes_of_the_groups() -> None:
    with DAG("pipeline", schedule=[records_asset("other")]) as dag:
        prepare("storage://raw", name="one")
        prepare("storage://raw", name="many", slices=4, task_id="many")
        prepare_spans([{"span": "2013-01", "source": "x"}], name="spans", task_id="spans", label="y")
    shape = {t.task_id: sorted(t.upstream_task_ids) for t in dag.tasks}
    assert shape == {
        "prepare": [],
        "many.plan": [],
        "many.encode": ["many.plan"],
        "many.publish": ["many.encode", "many.plan"],
        "spans.plan": [],
        "spans.encode": ["spans.plan"],
        "spans.window": ["spans.encode", "spans.plan"],
    }
    outlets = {t.task_id: [asset.uri for asset in t.outlets] for t in dag.tasks if t.outlets}
    assert outlets == {
        "prepare": ["storage://records/one"],
        "many.publish": ["storage://records/many"],
        "spans.window": ["storage://records/spans"],
    }
    assert dag.get_task("many.plan").spec["shards"] == 4, "a slice needs a shard of its own"
    assert dag.get_task("many.publish").trigger_rule == "none_failed"
    for name in ("many.encode", "spans.encode"):
        assert dag.get_task(name).retries == 10


def test_what_groups_are_told_of_pods_reaches_each_of_their_pods(tmp_path: Path) -> None:
    reader = {"spec": {"serviceAccountName": "reader"}}
    template = tmp_path / "pod.yaml"
    template.write_text("kind: Pod\nspec: {priorityClassName: batch}\n")
    with DAG("pipeline", default_args={"pod": {"spec": {"serviceAccountName": "all"}}}) as dag:
        told = prepare("storage://raw", name="told", task_id="told", pod=reader)
        prepare("storage://raw", name="many", slices=2, task_id="many", pod=str(template))
        prepare_spans([{"span": "1", "source": "x"}], name="spans", task_id="spans", pod=reader)
        prepare("storage://raw", name="untold", task_id="untold")
        scored = batch_score(told, name="model", pod=reader)
        evaluation = evaluate(scored, told, name="model", pod=reader)
        release(scored, told, evaluation, scored, name="model", pod=reader)
        monitor("model", pod=reader)

    def overlay(task: Any) -> Any:
        return task.partial_kwargs["pod"] if task.is_mapped else task.pod_overlay

    found = {
        task.task_id: overlay(task) for task in dag.tasks if hasattr(task, "pod_resources") or task.is_mapped
    }
    batch = {"spec": {"priorityClassName": "batch"}}
    assert found == {
        "told": reader,
        "many.plan": batch,
        "many.encode": str(template),
        "many.publish": batch,
        "spans.encode": reader,
        "spans.window": reader,
        "untold": {"spec": {"serviceAccountName": "all"}},
        "batch_score.plan": reader,
        "batch_score.score": reader,
        "batch_score.publish": reader,
        "evaluate": reader,
        "release.export": reader,
        "release.register": reader,
        "monitor": reader,
    }
    with DAG("refused"), pytest.raises(InvalidSpec, match=r"pod.spec.containers\[base\].image"):
        prepare("storage://raw", name="one", pod={"spec": {"containers": [{"name": "base", "image": "x"}]}})


def test_spans_are_planned_by_name_and_make_a_window(
    raw: Path, execute: Any, context_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        {"span": path.stem, "source": f"storage://raw/sales/{path.name}"} for path in sorted(raw.iterdir())
    ]
    with DAG("pipeline") as dag:
        prepare_spans(parts, name="sales", label="y", key="id", task_id="spans")
    plan = dag.get_task("spans.plan")
    monkeypatch.setattr("airflow.sdk.get_current_context", lambda: context_of(plan))
    rows = plan.python_callable(*plan.op_args)
    assert [row["part"] for row in rows] == ["2013-01", "2013-02", "2013-03", "2013-04"]
    for row in reversed(rows[1:]):
        execute(RecordsOperator(task_id="encode", **row))
    spec = {"step": "window", "output": "storage://records/sales", "held_out": "newest"}
    names = [row["part"] for row in rows[1:]]
    window = RecordsOperator(task_id="window", announces="sales", spec={**spec, "spans": names})
    result, event, _ = execute(window)
    assert event["spans"] == result["spans"] == names
    assert event["span"] == "2013-04"
    assert sum(Manifest.load(result["manifest"]).counts.values()) == 150
    with pytest.raises(StepFailed, match="must be a list"):
        plan.python_callable([{"span": "a"}], {})

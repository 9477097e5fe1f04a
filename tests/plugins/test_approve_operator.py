"""The question whether to release: what its page says, who answered, and which branch is followed."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import TaskAwaitingInput
from trainyard import FromForm, form, gate
from trainyard.comparison import comparison
from trainyard.operators import approve
from trainyard.trigger_form import DEFAULTS

from trainers.job.files import write_json

WHEN = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)
PASSED = {
    "outcome": "pass",
    "reasons": ["accuracy 0.9700 reaches the minimum 0.9000"],
    "numbers": {"metric": "accuracy", "better": "larger"},
    "override": None,
}
INTERVAL = {"accuracy": {"low": 0.95, "high": 0.99}}
DIFFERENCE = {"accuracy": {"value": 0.01, "low": -0.01, "high": 0.03}}


def _slice(name: str, ours: float, theirs: float) -> dict[str, Any]:
    champion = {"metrics": {"accuracy": theirs}, "intervals": {}, "difference": DIFFERENCE}
    row = {"slice": name, "examples": 80, "enough_examples": True, "metrics": {"accuracy": ours}}
    return {**row, "intervals": INTERVAL, "champion": champion}


EVALUATION = {
    "metrics": {"accuracy": 0.97},
    "intervals": INTERVAL,
    "examples": 360,
    "champion": {"version": 3, "metrics": {"accuracy": 0.96}, "intervals": {}, "difference": DIFFERENCE},
    "slices": [_slice("c=AA", 0.95, 0.94), _slice("c=U|A*", 0.9, 0.95)],
}


def _approve(**options: Any) -> Any:
    with DAG("pipeline", params=form(approval=True)) as dag:

        @task
        def evaluation() -> None: ...

        @task
        def after(verdict: Any) -> None: ...

        verdict = gate(evaluation(), **{"approval": True, **options})
        after(verdict)
    operator = dag.get_task("approve")
    operator.decision, operator.evaluation = PASSED, dict(EVALUATION)
    return operator


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was followed: skipping the others asks Airflow's supervisor."""
    followed: list[list[str]] = []

    def do_branch(self: Any, context: Any, chosen: list[str]) -> list[str]:
        followed.append(chosen)
        return chosen

    monkeypatch.setattr(approve.ApproveOperator, "do_branch", do_branch)
    return followed


def test_the_gate_leads_to_the_question_and_both_to_the_end() -> None:
    operator = _approve()
    dag = operator.dag
    assert dag.get_task("gate").downstream_task_ids == {"approve", "not_released"}
    assert operator.downstream_task_ids == {"after", "not_released"}
    assert dag.get_task("gate").not_released == operator.not_released == "not_released"
    assert dag.get_task("not_released").trigger_rule == "none_failed_min_one_success"
    assert "approve" not in _gate_without().task_ids


def _gate_without() -> Any:
    with DAG("plain") as dag:

        @task
        def evaluation() -> None: ...

        gate(evaluation())
    return dag


def test_asking_shows_the_comparison(
    context_of: Any, branches: list[list[str]], monkeypatch: pytest.MonkeyPatch, pipelines: Path
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "airflow.providers.standard.operators.hitl.upsert_hitl_detail", lambda **k: asked.update(k)
    )
    operator = _approve(approval_timeout=dt.timedelta(minutes=5), approvers=["grace"])
    context = context_of(operator, params=DEFAULTS)
    context["ti"].id = "7"
    context["task_instance"] = context["ti"]
    with pytest.raises(TaskAwaitingInput) as info:
        operator.execute(context)
    assert info.value.timeout == dt.timedelta(minutes=5)
    assert asked["defaults"] == ["Reject"]
    assert asked["options"] == ["Approve", "Reject"]
    assert asked["assigned_users"] == [{"id": "grace", "name": "grace"}]
    assert "pipeline" in asked["subject"]
    assert set(asked["params"]) == {"comment"}, "and none of the form's fields"
    assert "| accuracy | 0.97 (0.95 to 0.99) | 0.96 | +0.01 (-0.01 to +0.03) |" in asked["body"]
    assert branches == []


ANSWERS = [
    (["Approve"], {"id": "1", "name": "grace"}, {"comment": "fine"}, "pass", "grace (1) approves: fine", ["after"]),
    (["Reject"], {"id": "grace", "name": "grace"}, {}, "fail", "grace rejects", ["not_released"]),
    (["Reject"], None, {}, "fail", "nobody answered in time, which is to reject", ["not_released"]),
]  # fmt: skip


@pytest.mark.parametrize(("chosen", "user", "more", "outcome", "words", "branch"), ANSWERS)
def test_the_answer_is_kept_and_followed(
    context_of: Any, branches: list[list[str]], pipelines: Path,
    chosen: list[str], user: Any, more: Any, outcome: str, words: str, branch: list[str],
) -> None:  # fmt: skip
    operator = _approve()
    folder = pipelines / "jobs" / "pipeline" / "run-1"
    folder.mkdir(parents=True)
    write_json(folder / "evaluation.json", EVALUATION)
    operator.evaluation["evaluation"] = str(folder / "evaluation.json")
    event = {
        "chosen_options": chosen, "params_input": more, "responded_at": WHEN, "responded_by_user": user,
        "timedout": user is None,
    }  # fmt: skip
    context = context_of(operator, params=DEFAULTS)
    found = operator.execute_complete(context, event)
    assert context["ti"].xcom["return_value"] == found
    assert found["outcome"] == outcome
    assert found["reasons"] == [words, *PASSED["reasons"]]
    assert found["approval"]["when"] == WHEN.isoformat()
    assert found["approval"]["timed_out"] is (user is None)
    assert branches == [branch]
    assert json.loads((folder / "gate.json").read_text())["approval"] == found["approval"]


def test_a_form_that_does_not_ask(context_of: Any, branches: list[list[str]]) -> None:
    operator = _approve(approval=FromForm("approval"))
    context = context_of(operator, params={**DEFAULTS, "approval": False})
    operator.wanted = operator.wanted.resolve(context)
    assert operator.execute(context) == PASSED
    assert branches == [["after"]]


def test_the_page_names_the_worst_slices_first_and_escapes_them() -> None:
    text = comparison(PASSED, EVALUATION, "http://127.0.0.1/report.html")
    assert text.index(r"c=U\|A\*") < text.index("c=AA")
    assert "[The whole report, with plots](http://127.0.0.1/report.html)" in text
    assert r"\<b\>" in comparison({**PASSED, "reasons": ["<b>\nx"]}, {})
    broken = {**EVALUATION, "champion": {"version": 3, "error": "it takes [pixels]"}, "slices": []}
    assert r"it takes \[pixels\]" in comparison(PASSED, broken)

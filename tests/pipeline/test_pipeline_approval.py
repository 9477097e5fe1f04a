"""A person's approval through a real scheduler, answered through Airflow's REST API; one set of runs at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from trainyard.platform import Platform

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ASKED, UNANSWERED = "approved", "unanswered"


class Api:
    """Airflow's REST API under a user's login."""

    def __init__(self, platform: Platform) -> None:
        user, password = platform.credentials
        self.user = user
        self.http = httpx.Client(base_url=platform.urls["airflow"], trust_env=False, timeout=60)
        token = self.http.post("/auth/token", json={"username": user, "password": password}).json()
        self.headers = {"Authorization": f"Bearer {token['access_token']}"}

    def question(self, run_id: str) -> httpx.Response:
        """The question that a run asks."""
        return self.http.get(self._path(run_id), headers=self.headers)

    def answer(self, run_id: str, option: str, comment: str = "") -> httpx.Response:
        """Answer it."""
        body = {"chosen_options": [option], "params_input": {"comment": comment}}
        return self.http.patch(self._path(run_id), headers=self.headers, json=body)

    @staticmethod
    def _path(run_id: str) -> str:
        return f"/api/v2/dags/{ASKED}/dagRuns/{run_id}/taskInstances/approve/-1/hitlDetails"


def until(reached: Callable[[], Any], what: str, told: Callable[[], str], seconds: float = 240) -> None:
    """Wait; the limit is there for what hangs, and `told` says what did."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: {told()}")
        time.sleep(0.3)


@pytest.fixture(scope="module")
def runs(platform: Platform) -> Iterator[dict[str, str]]:
    """What each run is for -> its id; all have been answered, and are over."""
    client, api, ids = platform.airflow, Api(platform), {}
    for dag_id in (ASKED, UNANSWERED):
        client.wait_for_dag(dag_id)
    wanted: dict[str, dict[str, Any]] = {
        "approved": {},
        "rejected": {},
        "failed": {"accuracy": 0.1},
        "overridden": {"accuracy": 0.1, "override_reason": "a demonstration", "override_author": "grace"},
        "not asked": {"approval": False},
    }
    for name, conf in wanted.items():
        ids[name] = client.trigger(ASKED, conf, run_id=f"run-{name.replace(' ', '-')}").run_id
    ids["unanswered"] = client.trigger(UNANSWERED, run_id="run-unanswered").run_id
    for dag_id in (ASKED, UNANSWERED):
        client.set_paused(dag_id, False)
    answers = {
        "approved": ("Approve", "looks fine"),
        "rejected": ("Reject", "not on a Friday"),
        "overridden": ("Approve", ""),
    }
    for name, run_id in ids.items():
        dag_id = UNANSWERED if name == "unanswered" else ASKED
        told = partial(_explain, platform, dag_id, run_id)
        until(partial(_over, platform, api, dag_id, run_id, answers.get(name)), f"{name} ends", told)
    yield ids
    api.http.close()


def _over(platform: Platform, api: Api, dag_id: str, run_id: str, answer: tuple[str, str] | None) -> bool:
    """Whether a run is over; it is answered whenever it asks.

    An answer that Airflow doesn't take in time, since SQLite has one writer, is given again, as a person would.
    """
    states = _states(platform, run_id, dag_id)
    if (
        answer
        and states.get("approve") == "awaiting_input"
        and not api.question(run_id).json()["response_received"]
    ):
        try:
            given = api.answer(run_id, *answer)
        except httpx.ReadTimeout:
            return False
        assert given.is_success, given.text
        assert api.answer(run_id, *answer).status_code == 409, "a second answer"
    return platform.airflow.run(dag_id, run_id).is_over


def _explain(platform: Platform, dag_id: str, run_id: str) -> str:
    client = platform.airflow
    lines = [f"{dag_id} {run_id} is {client.run(dag_id, run_id).state}"]
    for task in client.tasks(dag_id, run_id):
        lines.append(f"{task.name}: {task.state}")
        if task.state in ("failed", "up_for_retry"):
            lines += [str(row)[:1500] for row in client.task_log(dag_id, run_id, task)[-6:]]
    return "\n".join(lines)


def _states(platform: Platform, run_id: str, dag_id: str = ASKED) -> dict[str, str]:
    return {task.name: task.state for task in platform.airflow.tasks(dag_id, run_id)}


RELEASED, HELD = (
    {"released": "success", "not_released": "skipped"},
    {"released": "skipped", "not_released": "success"},
)


def test_each_answer_leads_to_its_end(runs: dict[str, str], platform: Platform) -> None:
    ends = {
        "approved": {"gate": "success", "approve": "success", **RELEASED},
        "rejected": {"gate": "success", "approve": "success", **HELD},
        "failed": {"gate": "success", "approve": "skipped", **HELD},
        "overridden": {"gate": "success", "approve": "success", **RELEASED},
        "not asked": {"gate": "success", "approve": "success", **RELEASED},
        "unanswered": {"gate": "success", "approve": "success", **HELD},
    }
    for name, wanted in ends.items():
        dag_id = UNANSWERED if name == "unanswered" else ASKED
        assert _states(platform, runs[name], dag_id) == {"evaluation": "success", **wanted}, name
        assert platform.airflow.run(dag_id, runs[name]).state == "success"


def test_who_answered_is_known_to_what_comes_after(runs: dict[str, str], platform: Platform) -> None:
    client, user = platform.airflow, platform.credentials[0]
    told = client.xcom(ASKED, runs["approved"], "released")
    assert told["outcome"] == "pass"
    assert told["approval"]["decision"] == "approve"
    assert user in told["approval"]["by"]
    assert told["approval"]["comment"] == "looks fine"
    held = client.xcom(ASKED, runs["rejected"], "not_released")
    assert held["outcome"] == "fail"
    assert "rejects: not on a Friday" in held["reasons"][0]
    late = client.xcom(UNANSWERED, runs["unanswered"], "not_released")
    assert late["approval"]["timed_out"] is True
    assert "nobody answered in time" in late["reasons"][0]
    bold = client.xcom(ASKED, runs["overridden"], "released")
    assert (bold["override"]["author"], bold["override"]["on_behalf_of"]) == (user, "grace")
    assert "approval" not in client.xcom(ASKED, runs["not asked"], "released")
    kept = [json.loads(path.read_text()) for path in (platform.storage / "jobs" / ASKED).glob("*/gate.json")]
    assert {found["run"]: found["outcome"] for found in kept}[runs["rejected"]] == "fail"


def test_the_question_shows_the_comparison_and_the_report_asks_for_a_login(
    runs: dict[str, str], platform: Platform
) -> None:
    api = Api(platform)
    question = api.question(runs["approved"]).json()
    assert question["responded_by_user"]["name"] or question["responded_by_user"]["id"] == api.user
    body = question["body"]
    assert "| accuracy | 0.97 |" in body
    assert "accuracy 0.9700 reaches the minimum" in body
    url = body.split("](")[1].split(")")[0]
    assert url.startswith(platform.urls["airflow"])
    assert httpx.get(url, trust_env=False).status_code == 401
    page = httpx.get(url, headers=api.headers, trust_env=False)
    assert page.text == "<p>plots</p>"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for other in ("evaluation.json", "evaluation/other.html", "..%2f..%2fsecret"):
        there = url.replace("evaluation/report.html", other)
        assert httpx.get(there, headers=api.headers, trust_env=False).status_code == 404
    api.http.close()

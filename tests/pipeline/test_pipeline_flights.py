"""flights_retrain through a real scheduler: a backfill over three months, windows, events, a report page."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainyard.platform import Platform

from serving.client import PredictClient
from trainers.records.manifest import Manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DAG, CONSUMER = "flights_retrain", "flights_on_new_records"
MONTHS = ["2013-01", "2013-02", "2013-03"]
RANGE = {"from_date": "2013-01-01T00:00:00Z", "to_date": "2013-03-01T00:00:00Z"}


class Api:
    """Airflow's REST API, as its users call it."""

    def __init__(self, platform: Platform) -> None:
        user, password = platform.credentials
        self.url = platform.urls["airflow"]
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)
        token = self.http.post("/auth/token", json={"username": user, "password": password}).json()
        self.headers = {"Authorization": f"Bearer {token['access_token']}"}

    def call(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of a call that must succeed."""
        answer = self.http.request(method, f"/api/v2{path}", headers=self.headers, **options)
        assert answer.is_success, answer.text
        return answer.json()

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """The runs of a DAG, oldest first."""
        return self.call("GET", f"/dags/{dag_id}/dagRuns", params={"order_by": "run_after"})["dag_runs"]

    def events(self) -> list[dict[str, Any]]:
        """The events of assets, oldest first."""
        return self.call("GET", "/assets/events", params={"order_by": "timestamp"})["asset_events"]

    def backfill(self, **more: Any) -> None:
        """Backfill the months one after the other, and wait for the end."""
        conf = {"steps": 60}
        body = {"dag_id": DAG, **RANGE, "max_active_runs": 1, "dag_run_conf": conf, **more}
        number = self._begun(body)
        until(lambda: self.call("GET", f"/backfills/{number}")["completed_at"], "the backfill is over")

    def _begun(self, body: dict[str, Any]) -> int:
        """The number of a new backfill; on SQLite Airflow may not get at its database at once, and says so."""
        for pause in (1, 2, 4, 8, None):
            answer = self.http.request("POST", "/api/v2/backfills", headers=self.headers, json=body)
            if pause is None or "Database is locked" not in answer.text:
                break
            time.sleep(pause)
        assert answer.is_success, answer.text
        return int(answer.json()["id"])


def until(reached: Callable[[], Any], what: str, seconds: float = 500) -> None:
    """Wait; the limit is there for what hangs."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


@pytest.fixture(scope="module")
def api(platform: Platform) -> Iterator[Api]:
    """Both DAGs are known and may run, and the months are backfilled."""
    api = Api(platform)
    for dag_id in (CONSUMER, DAG):
        platform.airflow.wait_for_dag(dag_id)
        platform.airflow.set_paused(dag_id, False)
    begun = time.monotonic()
    with contextlib.closing(api.http):
        api.backfill()
        print(f"backfill of three months: {time.monotonic() - begun:.1f} s")
        yield api


def _window(api: Api, run: dict[str, Any]) -> dict[str, Any]:
    path = f"/dags/{DAG}/dagRuns/{run['dag_run_id']}/taskInstances/prepare.window/xcomEntries/return_value"
    return dict(api.call("GET", path)["value"])


def test_each_month_is_a_run_on_a_window_of_its_own(api: Api, platform: Platform) -> None:
    runs = api.runs(DAG)
    assert [run["data_interval_start"][:7] for run in runs] == MONTHS
    for run in runs:
        tasks = platform.airflow.tasks(DAG, run["dag_run_id"])
        assert run["state"] == "success", {task.name: task.state for task in tasks}
    windows = [_window(api, run) for run in runs]
    assert [window["spans"] for window in windows] == [MONTHS[:1], MONTHS[:2], MONTHS]
    names = {task.name for task in platform.airflow.tasks(DAG, runs[2]["dag_run_id"])}
    assert {f"prepare.encode[{month}]" for month in MONTHS} <= names

    root = platform.storage / "records" / "flights"
    spans = [json.loads(path.read_text()) for path in sorted((root / "spans").iterdir())]
    assert [span["span"] for span in spans] == MONTHS
    alone = [Manifest.load(root / span["folder"]) for span in spans]
    last = Manifest.load(windows[2]["manifest"])
    last.verify()
    # Of the newest month the last week is held out; of the others nothing is.
    assert last.counts["eval"] == alone[2].counts["eval"] > 1000
    assert last.counts["train"] == alone[2].counts["train"] + sum(sum(m.counts.values()) for m in alone[:2])
    assert sum(sum(m.counts.values()) for m in alone) == 26_398 + 23_611 + 27_902, "all that arrived"
    assert len(list(root.glob("*/manifest.json"))) == 3 + 3


def test_each_window_is_announced_and_starts_what_waits_for_it(api: Api, platform: Platform) -> None:
    windows = [_window(api, run) for run in api.runs(DAG)]
    events = [event for event in api.events() if event["uri"] == "storage://records/flights"]
    assert [event["extra"]["manifest"] for event in events] == [window["manifest"] for window in windows]
    assert events[2]["extra"] == {
        key: windows[2][key] for key in ("manifest", "digest", "counts", "span", "spans")
    }
    until(lambda: [r["state"] for r in api.runs(CONSUMER)].count("success") >= 1, "the consumer runs", 120)
    # Airflow may hand two events to one run: the last one that is told is the newest window.
    until(lambda: all(r["state"] == "success" for r in api.runs(CONSUMER)), "the consumers end", 120)
    last = api.runs(CONSUMER)[-1]["dag_run_id"]
    told = platform.airflow.xcom(CONSUMER, last, "tell", "return_value")
    assert told == f"{windows[2]['counts']['train']} flights of {' '.join(MONTHS)}"


def test_a_second_backfill_does_nothing_and_another_run_finds_its_records(
    api: Api, platform: Platform
) -> None:
    from trainyard.platform.pipeline_run import end_early, start_run

    runs, events = api.runs(DAG), len(api.events())
    files = {
        path: path.stat().st_mtime_ns for path in (platform.storage / "records" / "flights").rglob("*.*")
    }
    api.backfill()
    assert [run["dag_run_id"] for run in api.runs(DAG)] == [run["dag_run_id"] for run in runs]
    assert [run["end_date"] for run in api.runs(DAG)] == [run["end_date"] for run in runs]

    run = start_run(platform.airflow, platform.airflow.wait_for_dag(DAG), {"month": "2013-03", "steps": 60})

    def window_ended() -> bool:
        states = {task.name: task.state for task in platform.airflow.tasks(DAG, run.run_id)}
        assert "failed" not in states.values(), states
        return states.get("prepare.window") == "success"

    until(window_ended, "the window is made")
    end_early(platform.airflow, run)
    found = platform.airflow.xcom(DAG, run.run_id, "prepare.window", "return_value")
    assert found == {**_window(api, runs[2]), "reused": True}
    assert len(api.events()) == events, "nothing new is not announced"
    now = {path: path.stat().st_mtime_ns for path in (platform.storage / "records" / "flights").rglob("*.*")}
    assert now == files, "not a file was written"


def test_the_served_model_tells_delays_in_minutes(api: Api, platform: Platform) -> None:
    import numpy as np

    rows = {
        "dep_delay": np.array([-5.0, 60.0, 180.0], np.float32),
        "distance": np.array([1400.0] * 3, np.float32),
        "dep_minute": np.array([315] * 3),
        "arr_minute": np.array([499] * 3),
        "weekday": np.array([1] * 3),
        "carrier": np.array(["UA", "UA", "no such airline"], object),
        "origin": np.array(["EWR"] * 3, object),
        "dest": np.array(["IAH"] * 3, object),
    }
    with PredictClient(platform.urls["model-grpc"], "flights") as client:
        (minutes,) = client.predict(rows).values()
    assert minutes.shape == (3, 1)
    assert minutes[0] < minutes[1] < minutes[2]
    assert abs(minutes[1, 0] - 60) < 60


def test_the_report_is_for_people_who_are_logged_in(api: Api, platform: Platform) -> None:
    root = platform.storage / "records" / "flights"
    folder = root / json.loads((root / "spans" / "2013-01.json").read_text())["folder"]
    report = folder / "report.html"
    if not report.exists():
        report.write_text("<p>statistics</p>")
    url = f"/trainyard/records/flights/{folder.name}/report.html"
    assert api.http.get(url).status_code == 401
    assert api.http.get(url, headers={"Authorization": "Bearer nonsense"}).status_code in (401, 403)
    page = api.http.get(url, headers=api.headers)
    assert page.status_code == 200
    assert page.text == report.read_text()
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for other in ("manifest.json", "..%2f..%2fspans%2f2013-01.json", "%2e%2e/report.html"):
        assert (
            api.http.get(f"/trainyard/records/flights/{folder.name}/{other}", headers=api.headers).status_code
            == 404
        )
    missing = Path("/trainyard/records/flights/0123456789abcdef/report.html")
    assert api.http.get(str(missing), headers=api.headers).status_code == 404

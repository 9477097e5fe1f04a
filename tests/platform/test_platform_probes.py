"""Probes against real sockets, room on the machine, the state file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from trainyard.platform import preflight
from trainyard.platform.probes import airflow_component, all_of, file_written, http_ok
from trainyard.platform.state import Held, hold, is_held, read_state, self_description, write_state

GB = 1024**3


class Server(ThreadingHTTPServer):
    answers: dict[str, tuple[int, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, body = self.server.answers.get(self.path, (404, {}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answers = {}
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize(("status", "answers"), [(200, True), (404, True), (500, False), (503, False)])
def test_http(server: Server, status: int, answers: bool) -> None:
    server.answers["/health?deep=1"] = (status, {})
    assert http_ok(f"{url_of(server)}/health?deep=1")(0.0) is answers


def test_http_of_nobody(server: Server) -> None:
    url = url_of(server)
    server.server_close()
    assert not http_ok(url, timeout=1)(0.0)


def test_http_past_the_proxy_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert http_ok(url_of(server))(0.0)


def test_a_ready_file_of_an_earlier_life_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    assert not file_written(path)(0.0)
    path.touch()
    now = path.stat().st_mtime
    assert file_written(path)(now - 1)
    assert not file_written(path)(now + 1)


@pytest.mark.parametrize(
    ("status", "age", "http", "answers"),
    [
        ("healthy", timedelta(seconds=-1), 200, True),
        ("healthy", timedelta(seconds=20), 200, False),  # a heartbeat of the one before, killed 20 s ago
        ("unhealthy", timedelta(seconds=-1), 200, False),
        ("healthy", timedelta(seconds=-1), 503, False),
        (None, None, 200, False),
    ],
)
def test_airflow_component(
    server: Server, status: str | None, age: timedelta | None, http: int, answers: bool
) -> None:
    started = datetime.now(timezone.utc)
    beat = None if age is None else (started - age).isoformat().replace("+00:00", "Z")
    health = {"scheduler": {"status": status, "latest_scheduler_heartbeat": beat}}
    server.answers["/api/v2/monitor/health"] = (http, health)
    assert airflow_component(url_of(server), "scheduler")(started.timestamp()) is answers
    assert not airflow_component("http://127.0.0.1:1", "scheduler")(0.0)


def test_all_of_asks_each_until_it_answers() -> None:
    asked: list[str] = []

    def probe(name: str, answers: list[bool]) -> Any:
        def ask(_: float) -> bool:
            asked.append(name)
            return answers.pop(0)

        return ask

    both = all_of(probe("a", [False, True, True]), probe("b", [False, True, False]))
    assert [both(1.0) for _ in range(4)] == [False, False, True, True]
    assert asked == ["a", "a", "b", "b"]
    assert not both(2.0), "it was started again and must answer anew"
    assert asked[4:] == ["a", "b"]


@pytest.mark.parametrize(
    ("memory", "disk", "told"),
    [
        (8, 50, []),
        (3.2, 50, ["only 3.2 GB of memory free"]),
        (8, 2, ["only 2.0 GB of disk free at"]),
        (2, 2, ["memory", "disk"]),
    ],
)
def test_room(tmp_path: Path, memory: float, disk: float, told: list[str]) -> None:
    found = preflight.check_room(
        [tmp_path / "home", tmp_path / "storage"],
        memory=lambda: int(memory * GB),
        disk=lambda _: int(disk * GB),
    )
    assert len(found) == len(told), "one disk is told once"
    for text, part in zip(found, told, strict=True):
        assert part in text


@pytest.mark.parametrize(
    ("memory", "disk", "what"), [(0.5, 50, "0.5 GB of memory"), (8, 0.2, "0.2 GB of disk")]
)
def test_no_room(tmp_path: Path, memory: float, disk: float, what: str) -> None:
    with pytest.raises(preflight.NoRoom, match=what) as caught:
        preflight.check_room([tmp_path], memory=lambda: int(memory * GB), disk=lambda _: int(disk * GB))
    assert caught.value.hint


def test_memory_of_a_container(tmp_path: Path) -> None:
    machine = preflight.free_memory(tmp_path)
    assert machine > 0
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert preflight.free_memory(tmp_path) == 300
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.free_memory(tmp_path) > 300


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert preflight.free_disk(tmp_path / "a" / "b") > 0


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    lock = tmp_path / "sub" / "lock"
    assert not is_held(lock)
    with hold(lock):
        assert is_held(lock)
        with pytest.raises(Held), hold(lock):
            pass
    assert not is_held(lock)


def test_state_knows_when_its_supervisor_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "platform.json"
    assert read_state(path) == {}
    write_state(path, {"state": "running", "supervisor": self_description(), "services": [{"name": "x"}]})
    assert read_state(path)["state"] == "running"
    gone = {"pid": 2**22 + 1, "identity": "never"}
    write_state(path, {"state": "running", "supervisor": gone, "services": [{"name": "x"}]})
    assert read_state(path)["state"] == "lost"
    write_state(path, {"state": "starting", "supervisor": gone, "services": []})
    assert read_state(path)["state"] == "stopped"
    path.write_text(json.dumps({"version": 99, "state": "running"}))
    assert read_state(path) == {}, "a file of another version is none"


def test_times_of_airflow() -> None:
    from trainyard.platform.probes import _unix

    assert _unix("2026-01-31T12:00:00.25Z") == _unix("2026-01-31T13:00:00.25+01:00")
    assert _unix("1970-01-01T00:00:01Z") == 1.0
    with pytest.raises(ValueError, match="a time must look like"):
        _unix("yesterday")
    assert time.time() > 0

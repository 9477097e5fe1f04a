"""A platform's life as its clients see it: a real supervisor process with small services."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from trainyard.platform import Platform, Settings
from trainyard.platform.embedded import PlatformBusy, PlatformFailed
from trainyard.platform.host import EXIT_FAILED, Host
from trainyard.platform.ports import PREFERRED
from trainyard.platform.probes import file_written
from trainyard.platform.processes import is_running
from trainyard.platform.services import Service
from trainyard.platform.state import hold, is_held, write_state
from trainyard.platform.template import airflow_version, template_path

HANG_GUARD = 30.0
FAKE_HOST = (sys.executable, str(Path(__file__).with_name("fake_host.py")))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_GUARD
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.05)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Platform]]:
    """Makes clients of the platform in one home; what runs there is stopped at the end."""
    made: list[Platform] = []

    def platform(fakes: Mapping[str, str] | None = None, home: Path = tmp_path / "home") -> Platform:
        home.mkdir(exist_ok=True)
        if fakes is not None:
            (home / "fakes.json").write_text(json.dumps(fakes))
        settings = Settings.from_environment({}, home=home)
        made.append(Platform(settings=settings, host=FAKE_HOST))
        return made[-1]

    yield platform
    for one in made:
        one.stop()


def pids(platform: Platform) -> dict[str, int]:
    return {s["name"]: s["pid"] for s in platform.state["services"] if s["pid"]}


def identities(platform: Platform) -> list[tuple[int, str]]:
    return [(s["pid"], s["identity"]) for s in platform.state["services"]]


def test_up_then_used_by_others_then_down(make: Callable[..., Platform]) -> None:
    platform = make({"one": "", "two": ""})
    seen: list[Any] = []
    assert platform.start(on_progress=seen.append)
    assert platform.is_up
    assert seen[-1]["state"] == "running"
    assert platform.urls["airflow"].startswith("http://127.0.0.1:")
    assert platform.environment()["MLFLOW_TRACKING_URI"] == platform.urls["mlflow"]

    other = make()
    assert other.is_up
    with other.running() as used:
        assert pids(used) == pids(platform)
    assert platform.is_up, "who found it running leaves it running"
    assert not other.start(), "it is up already"

    running = identities(platform)
    assert other.stop(), "anybody may stop it"
    assert not any(is_running(*one) for one in running)
    assert platform.state["state"] == "stopped"
    assert not other.stop(), "there is nothing to stop"


def test_attached_platforms_end_with_the_block_and_remember_ports(make: Callable[..., Platform]) -> None:
    platform = make({"one": ""})
    with contextlib.ExitStack() as stack:  # ports that nobody else is likely to take
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PREFERRED]
        ports = {name: s.getsockname()[1] for name, s in zip(PREFERRED, sockets, strict=True)}
    write_state(platform.settings.state_file, {"state": "stopped", "ports": ports})
    with platform.running():
        assert platform.state["ports"] == ports
        running = identities(platform)
        with pytest.raises(PlatformBusy, match="another run"):
            make().start()
    assert not any(is_running(*one) for one in running)
    with make().running() as again:
        assert again.state["ports"] == ports


def test_an_attached_platform_ends_with_a_killed_parent(
    make: Callable[..., Platform], tmp_path: Path
) -> None:
    platform = make({"one": ""})
    code = (
        "import pathlib, sys, time\n"
        "from trainyard.platform import Platform, Settings\n"
        "settings = Settings.from_environment({}, home=pathlib.Path(sys.argv[1]))\n"
        "with Platform(settings=settings, host=sys.argv[2:]).running():\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(platform.settings.home), *FAKE_HOST]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        running = identities(platform)
        assert all(is_running(*one) for one in running)
        parent.kill()
    wait_for(lambda: not any(is_running(*one) for one in running), "the end of the services")
    wait_for(lambda: platform.state["state"] == "stopped", "the supervisor's last word")


def test_a_killed_supervisor_leaves_nothing(make: Callable[..., Platform]) -> None:
    platform = make({"one": "", "two": ""})
    platform.start()
    running = identities(platform)
    os.kill(platform.state["supervisor"]["pid"], signal.SIGKILL)
    wait_for(lambda: not any(is_running(*one) for one in running), "the leash")
    other = make()
    assert other.state["state"] == "lost"
    other.stop()
    assert other.state["state"] == "stopped"
    with make().running() as again:
        assert again.is_up


def test_leftovers_are_ended_by_pid_and_start_time(make: Callable[..., Platform]) -> None:
    platform = make({"one": "", "two": ""})
    platform.start()
    state = platform.state
    (one, two) = identities(platform)
    supervisor = state["supervisor"]["pid"]
    leash = next(p for p in _children(supervisor) if "leash" in " ".join(p.cmdline()))
    leash.kill()
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: platform.state["state"] == "lost", "the supervisor's end")
    assert is_running(*one)
    # The pid of "two" has meanwhile been given to another process, as far as the file knows.
    state["services"][1]["identity"] = "another boot:1"
    platform.settings.state_file.write_text(json.dumps(state))
    assert platform.stop()
    assert not is_running(*one)
    assert is_running(*two)
    os.kill(two[0], signal.SIGKILL)


def _children(pid: int) -> list[Any]:
    import psutil

    return psutil.Process(pid).children()


def test_a_component_that_does_not_start_is_told(make: Callable[..., Platform]) -> None:
    platform = make({"good": "", "bad": "sys.exit('out of luck')"})
    with pytest.raises(PlatformFailed, match="the bad ended during its start: exit code 1") as caught:
        platform.start()
    assert "out of luck" in caught.value.failure["log_tail"][-1]
    assert caught.value.hint
    state = platform.state
    assert state["state"] == "failed"
    assert [s["state"] for s in state["services"]] == ["stopped", "failed"]
    assert not is_held(platform.settings.lock_file)


def test_ctrl_c_during_the_start_leaves_nothing(make: Callable[..., Platform]) -> None:
    platform = make({"one": "", "slow": "time.sleep(600)"})
    running: list[tuple[int, str]] = []

    def interrupt(state: Mapping[str, Any]) -> None:
        if state["services"] and all(s["pid"] for s in state["services"]):
            running.extend(identities(platform))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        platform.start(on_progress=interrupt)
    assert len(running) == 2
    assert not any(is_running(*one) for one in running)
    assert platform.state["state"] == "stopped"


def test_a_supervisor_that_cannot_even_begin(make: Callable[..., Platform]) -> None:
    platform = make()
    with pytest.raises(PlatformFailed, match="supervisor ended with 1"):
        platform.start()  # no fakes.json


def test_two_starts_at_once_share_one_platform(make: Callable[..., Platform]) -> None:
    first, second = make({"slow": "time.sleep(1)"}), make()
    first._spawn(attached=False)
    wait_for(lambda: is_held(first.settings.lock_file), "the first supervisor")
    assert not second.start()
    assert second.is_up
    assert first.start() is False


def test_a_supervisor_that_comes_second_leaves(make: Callable[..., Platform]) -> None:
    platform = make({"one": ""})
    platform.settings.make_folders()
    with hold(platform.settings.lock_file):
        platform._spawn(attached=False)
        assert platform._host is not None
        assert platform._host.wait(timeout=HANG_GUARD) == 3


def test_a_dead_component_shows(make: Callable[..., Platform]) -> None:
    platform = make({"one": ""})
    platform.start()
    os.kill(pids(platform)["one"], signal.SIGKILL)
    wait_for(lambda: platform.state["services"][0]["restarts"] == 1, "the report of its death")
    assert platform.state["services"][0]["last_exit"] == "killed by SIGKILL"
    wait_for(lambda: platform.state["services"][0]["state"] == "ready", "its restart")


def test_nothing_of_the_platform_is_readable_by_others(make: Callable[..., Platform]) -> None:
    platform = make({"one": ""})
    with platform.running():
        home = platform.settings.home
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "airflow" / "airflow.cfg").stat().st_mode) == 0o600
        secrets = list(platform.settings.secrets.iterdir())
        assert secrets
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)
        user, password = platform.credentials
        assert user == "admin"
        assert len(password) >= 12
        assert password not in (home / "platform.json").read_text()


def fake_services(settings: Settings, ports: Mapping[str, int], **_: Any) -> list[Service]:
    ready = settings.home / "one.ready"
    code = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    return [Service("one", "the one", (sys.executable, "-S", "-c", code), file_written(ready), grace=5.0)]


def broken_services(settings: Settings, ports: Mapping[str, int], **_: Any) -> list[Service]:
    return [Service("one", "the one", (sys.executable, "-S", "-c", "raise SystemExit(4)"), one_shot=True)]


def test_a_host_from_start_to_end(tmp_path: Path) -> None:
    settings = Settings.from_environment({}, home=tmp_path / "home")
    stop = threading.Event()
    codes: list[int] = []
    host = Host(settings, attached=False, make_services=fake_services)
    thread = threading.Thread(target=lambda: codes.append(host.run(stop)))
    thread.start()
    platform = Platform(settings=settings)
    wait_for(lambda: platform.is_up, "the host")
    state = platform.state
    assert state["services"][0]["ready_seconds"] > 0
    assert (settings.airflow_home / "migrated").read_text() == airflow_version()
    assert settings.airflow_database.exists() == template_path().exists()
    assert settings.model_config.exists()
    stop.set()
    thread.join()
    assert codes == [0]
    assert platform.state["state"] == "stopped"
    settings.airflow_database.touch()
    assert Host(settings, attached=False)._database_is_current()
    (settings.airflow_home / "migrated").write_text("2.0")
    assert not Host(settings, attached=False)._database_is_current(), "another Airflow's: it must be migrated"


def test_a_host_whose_component_fails(tmp_path: Path) -> None:
    settings = Settings.from_environment({}, home=tmp_path / "home")
    assert Host(settings, attached=False, make_services=broken_services).run(threading.Event()) == EXIT_FAILED
    state = Platform(settings=settings).state
    assert state["state"] == "failed"
    assert state["failure"]["what"] == "ended during its start: exit code 4"


def test_up_and_run_from_the_command_line(
    make: Callable[..., Platform], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainyard import cli
    from trainyard.commands import platform as platform_commands
    from trainyard.commands import run as run_command

    home = make({"one": "time.sleep(0.3)"}).settings.home
    for module in (platform_commands, run_command):
        monkeypatch.setattr(module, "open_platform", lambda: make(home=home))
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    ran: list[bool] = []

    def pipeline(platform: Platform, *_: Any, was_up: bool) -> int:
        ran.append(platform.is_up)
        return 7

    monkeypatch.setattr(run_command, "_run_pipeline", pipeline)
    assert cli.main(["run", "anything"]) == 7
    shown = capsys.readouterr().out
    assert "the one is up" in shown
    assert "the platform is up after" in shown
    assert "the platform is down" in shown
    assert not make(home=home).is_up

    assert cli.main(["up"]) == 0
    assert "password" in capsys.readouterr().out
    assert cli.main(["run", "anything"]) == 7
    shown = capsys.readouterr().out
    assert "using the platform that is up" in shown
    assert "down" not in shown
    assert make(home=home).is_up, "it is left running"
    assert cli.main(["down"]) == 0
    assert "is down after" in capsys.readouterr().out
    assert ran == [True, True]

"""The supervisor with real processes: order, readiness, death, restart, stop."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from trainyard.platform import supervisor as supervisor_module
from trainyard.platform.probes import file_written
from trainyard.platform.services import Service
from trainyard.platform.supervisor import ComponentFailed, Supervisor

HANG_GUARD = 30.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_GUARD
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.02)


def make_service(folder: Path, name: str, code: str = "", **options: object) -> Service:
    """A process that runs `code`, then writes its ready file and sleeps."""
    ready = folder / f"{name}.ready"
    script = (
        f"import pathlib, signal, sys, time\n{code}\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(600)"
    )
    options = {"grace": 5.0, "start_seconds": 20.0, **options}
    return Service(
        name, name, (sys.executable, "-S", "-c", script), file_written(ready), {"A": "b"}, **options
    )  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    """Makes a supervisor that is stopped at the end, whatever a test did."""
    made: list[Supervisor] = []

    def make(*services: Service, **options: object) -> Supervisor:
        made.append(Supervisor(services, tmp_path / "logs", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "BACK_OFF", (0.05, 0.05))


def pid_of(supervisor: Supervisor, name: str) -> int:
    process = supervisor.components[name].process
    assert process is not None
    return process.pid


def test_starts_in_order_and_stops_all(tmp_path: Path, run: Callable[..., Supervisor]) -> None:
    changes: list[str] = []
    first = make_service(tmp_path, "first")
    second = make_service(tmp_path, "second", needs=("first",), stop_wave=1)
    supervisor = run(second, first, on_change=lambda: changes.append("changed"))
    supervisor.start()
    components = supervisor.components
    assert [components[name].state for name in ("first", "second")] == ["ready", "ready"]
    assert components["second"].started > (tmp_path / "first.ready").stat().st_mtime - 0.05
    assert changes
    pids = [pid_of(supervisor, name) for name in components]
    assert all(os.getpgid(pid) == pid for pid in pids), "each leads a group of its own"
    supervisor.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert {c.state for c in components.values()} == {"stopped"}


def test_a_step_must_succeed_before_those_that_need_it(
    tmp_path: Path, run: Callable[..., Supervisor]
) -> None:
    mark = tmp_path / "mark"
    step = Service("step", "step", (sys.executable, "-S", "-c", f"open({str(mark)!r}, 'w')"), one_shot=True)
    after = make_service(tmp_path, "after", f"assert pathlib.Path({str(mark)!r}).exists()", needs=("step",))
    supervisor = run(step, after)
    supervisor.start()
    assert supervisor.components["step"].state == "done"
    assert supervisor.components["after"].state == "ready"


@pytest.mark.parametrize(
    ("code", "options", "what", "tail", "hint"),
    [
        (
            "print('no good'); sys.exit(3)",
            {},
            "ended during its start: exit code 3",
            "no good",
            "read its log",
        ),
        ("time.sleep(600)", {"start_seconds": 0.3}, "did not answer within 0 s", "", "make clean"),
        (
            "raise SystemExit('Address already in use')",
            {},
            "exit code 1",
            "Address already",
            "a free one is found",
        ),
        ("import no_such_module", {}, "exit code 1", "No module named", "make install"),
    ],
)
def test_a_component_that_does_not_come_up_is_named(
    tmp_path: Path,
    run: Callable[..., Supervisor],
    code: str,
    options: dict[str, float],
    what: str,
    tail: str,
    hint: str,
) -> None:
    supervisor = run(make_service(tmp_path, "good"), make_service(tmp_path, "bad", code, **options))
    with pytest.raises(ComponentFailed, match="bad") as caught:
        supervisor.start()
    card = caught.value.to_dict()
    assert card["component"] == "bad"
    assert what in card["what"]
    assert tail in "\n".join(card["log_tail"])
    assert hint in card["hint"]
    assert supervisor.components["bad"].state == "failed"


def test_a_command_that_is_not_there(tmp_path: Path, run: Callable[..., Supervisor]) -> None:
    supervisor = run(Service("gone", "gone", ("/no/such/program",), file_written(tmp_path / "x")))
    with pytest.raises(ComponentFailed, match="could not be started") as caught:
        supervisor.start()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_stranger_on_its_port_is_not_taken_for_it(tmp_path: Path, run: Callable[..., Supervisor]) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        url = f"http://127.0.0.1:{stranger.getsockname()[1]}"
        supervisor = run(make_service(tmp_path, "web", url=url, start_seconds=1.5))
        with pytest.raises(ComponentFailed, match="did not answer within"):
            supervisor.start()


def test_one_that_listens_itself_is_taken(tmp_path: Path, run: Callable[..., Supervisor]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import socket\ns = socket.socket()\ns.bind(('127.0.0.1', {port}))\ns.listen()"
    supervisor = run(make_service(tmp_path, "web", code, url=f"http://127.0.0.1:{port}"))
    supervisor.start()
    assert supervisor.components["web"].state == "ready"


def test_what_needs_a_failed_one_is_not_started(tmp_path: Path, run: Callable[..., Supervisor]) -> None:
    supervisor = run(
        make_service(tmp_path, "bad", "sys.exit(1)"), make_service(tmp_path, "after", needs=("bad",))
    )
    with pytest.raises(ComponentFailed):
        supervisor.start()
    assert supervisor.components["after"].process is None
    assert supervisor.components["after"].state == "waiting"


def test_a_killed_component_is_started_again(
    tmp_path: Path, run: Callable[..., Supervisor], quick: None
) -> None:
    child = tmp_path / "child"
    code = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(p.pid))"
    supervisor = run(make_service(tmp_path, "one", code))
    supervisor.start()
    component = supervisor.components["one"]
    first, grandchild = pid_of(supervisor, "one"), int(child.read_text())
    stop = threading.Event()
    watcher = threading.Thread(target=supervisor.watch, args=(stop,))
    watcher.start()
    try:
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: component.state == "ready" and pid_of(supervisor, "one") != first, "the restart")
    finally:
        stop.set()
        watcher.join()
    assert component.to_dict()["restarts"] == 1
    assert component.last_exit == "killed by SIGKILL"
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_one_that_dies_again_and_again_is_given_up(
    tmp_path: Path, run: Callable[..., Supervisor], quick: None
) -> None:
    once = tmp_path / "once"
    code = f"p = pathlib.Path({str(once)!r})\nif p.exists(): sys.exit('again')\np.touch()"
    supervisor = run(make_service(tmp_path, "one", code))
    supervisor.start()
    os.kill(pid_of(supervisor, "one"), signal.SIGKILL)
    with pytest.raises(ComponentFailed, match="died 3 times in 10 minutes, last: exit code 1"):
        supervisor.watch(threading.Event())
    assert supervisor.components["one"].state == "failed"


def test_stop_kills_what_does_not_listen_and_its_descendants(
    tmp_path: Path, run: Callable[..., Supervisor]
) -> None:
    child = tmp_path / "child"
    # A child that left the group and the session, as Airflow's tasks do, and a parent that ignores SIGTERM.
    code = (
        "import subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"p = subprocess.Popen(['sleep', '600'], start_new_session=True); open({str(child)!r}, 'w').write(str(p.pid))"
    )
    supervisor = run(make_service(tmp_path, "deaf", code, grace=0.3))
    supervisor.start()
    pid = pid_of(supervisor, "deaf")
    begun = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - begun < 10
    assert not psutil.pid_exists(pid)
    grandchild = int(child.read_text())
    wait_for(
        lambda: (
            not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
        ),
        "the grandchild's end",
    )


def test_a_start_can_be_interrupted(tmp_path: Path, run: Callable[..., Supervisor]) -> None:
    supervisor = run(
        make_service(tmp_path, "slow", "time.sleep(600)"), make_service(tmp_path, "after", needs=("slow",))
    )
    threading.Timer(0.3, supervisor.interrupt).start()
    begun = time.monotonic()
    supervisor.start()
    assert time.monotonic() - begun < 5
    assert supervisor.components["after"].process is None


def test_a_killed_leash_is_replaced(tmp_path: Path, run: Callable[..., Supervisor], quick: None) -> None:
    supervisor = run(make_service(tmp_path, "one"))
    supervisor.start()
    leash = supervisor._leash
    before = leash.pid
    os.kill(before, signal.SIGKILL)
    leash._process.wait()
    leash.note(pid_of(supervisor, "one"))
    leash.note(pid_of(supervisor, "one"))
    assert leash.pid != before

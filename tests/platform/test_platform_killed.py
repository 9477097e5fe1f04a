"""What is left when the supervisor or its parent is killed: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from trainyard.platform import leash as leash_module
from trainyard.platform.processes import identity, is_running

HANG_GUARD = 30.0

DRIVER = """
import pathlib, sys, threading, time
from trainyard.platform.probes import file_written
from trainyard.platform.processes import adopt_orphans
from trainyard.platform.services import Service
from trainyard.platform.supervisor import Supervisor

folder = pathlib.Path(sys.argv[1])
code = '''
import pathlib, subprocess, sys, time
inner = subprocess.Popen(["sleep", "600"], start_new_session=True)
folder = pathlib.Path(sys.argv[1])
(folder / f"pid-{sys.argv[2]}-inner").write_text(str(inner.pid))
(folder / f"ready-{sys.argv[2]}").touch()
time.sleep(600)
'''
services = [
    Service(n, n, (sys.executable, "-S", "-c", code, str(folder), n), file_written(folder / f"ready-{n}"))
    for n in ("a", "b")
]
supervisor = Supervisor(services, folder / "logs", owns_orphans=adopt_orphans())
supervisor.start()
for name, component in supervisor.components.items():
    (folder / f"pid-{name}").write_text(str(component.process.pid))
(folder / "up").touch()
supervisor.watch(threading.Event())
"""


@pytest.fixture
def driver(tmp_path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)])
    deadline = time.monotonic() + HANG_GUARD
    while not (tmp_path / "up").exists():
        assert process.poll() is None, "the driver ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def pids(folder: Path) -> dict[str, int]:
    return {path.name: int(path.read_text()) for path in folder.glob("pid-*")}


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_nothing_outlives_a_killed_supervisor(driver: subprocess.Popen[bytes], tmp_path: Path) -> None:
    found = pids(tmp_path)
    assert len(found) == 4
    assert not any(ended(pid) for pid in found.values())
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + HANG_GUARD
    while left := {name: pid for name, pid in found.items() if not ended(pid)}:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def test_orphans_of_a_killed_component_are_ended(driver: subprocess.Popen[bytes], tmp_path: Path) -> None:
    found = pids(tmp_path)
    os.kill(found["pid-a"], signal.SIGKILL)
    deadline = time.monotonic() + HANG_GUARD
    try:
        while not ended(found["pid-a-inner"]):
            assert time.monotonic() < deadline, "the orphan is still there"
            time.sleep(0.1)
        assert not ended(found["pid-b-inner"]), "what is no orphan is left alone"
    finally:
        driver.kill()
        driver.wait()
    while not all(ended(pid) for pid in pids(tmp_path).values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_leash_ends_what_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = subprocess.Popen(["sleep", "600"], start_new_session=True)
    gone = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait"], start_new_session=True)
    monkeypatch.setattr(leash_module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(leash_module, "GRACE_SECONDS", 0.2)
    try:
        assert leash_module.main([f"+{kept.pid}\n", f"+{gone.pid}\n", f"-{kept.pid}\n"]) == 0  # type: ignore[arg-type]
        assert ended(gone.pid)
        assert kept.poll() is None
    finally:
        for process in (kept, gone):
            process.kill()
            process.wait()


def test_identity_tells_a_process_from_a_later_one() -> None:
    process = subprocess.Popen(["sleep", "600"])
    known = identity(process.pid)
    assert known
    assert is_running(process.pid, known)
    assert not is_running(process.pid, "another boot:1")
    assert not is_running(process.pid, None)
    process.kill()
    process.wait()
    assert not is_running(process.pid, known)
    assert identity(process.pid) is None

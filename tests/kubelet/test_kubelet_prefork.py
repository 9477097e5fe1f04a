"""Forking containers from a warm interpreter: the same to see from outside, and nothing left behind."""

import json
import os
import signal
import sys
import textwrap
import time

import psutil
import pytest
from trainyard.kubelet.prefork_starter import PreforkStarter
from trainyard.kubelet.processes import PopenStarter

MODULE = """
    import decimal, json, os, random, sys, time, warm_library
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "env": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid(),
        "parent": os.getppid(), "session": os.getsid(0), "warm": warm_library.PID != os.getpid(),
        "random": random.random(), "stdin": sys.stdin.read(),
    }), flush=True)
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "sleep":
        time.sleep(60)
    if what == "raise":
        raise ValueError("of the user's own")
    if what.isdigit():
        sys.exit(int(what))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    package = tmp_path / "warmpack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "job.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "warm_library.py").write_text(
        "import os\nPID = os.getpid()\ndef ready():\n    global READY\n    READY = True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def starter(folder):
    warm = PreforkStarter(
        PopenStarter(), packages=["warmpack"], preload=["warm_library:ready"], cwd=str(folder)
    )
    yield warm
    warm.stop()


def run(starter, folder, *arguments, env=None, module="warmpack.job", wait=True):
    out = folder / "out.txt"
    argv = [sys.executable, "-m", module, *arguments]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "COLOR": "blue"} if env is None else env
    handle = starter.start(argv, env, str(folder), out)
    if wait:
        return handle.wait(), out.read_text(), handle
    return handle, out


def test_a_fork_looks_like_a_fresh_python_m(starter, folder):
    code, text, handle = run(starter, folder, "0")
    said = json.loads(text)
    assert code == 0
    assert handle.poll() == 0
    assert said["warm"], "the module was not run in a fork"
    assert said["parent"] == starter.pid
    assert said["name"] == "__main__"
    assert said["argv"] == [str(folder / "warmpack" / "job.py"), "0"]
    assert said["env"] == {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "COLOR": "blue"}
    assert said["cwd"] == str(folder)
    assert said["session"] == said["pid"] == handle.pid
    assert said["stdin"] == ""


@pytest.mark.parametrize(("argument", "code"), [("7", 7), ("raise", 1)])
def test_exit_codes(starter, folder, argument, code):
    got, text, _ = run(starter, folder, argument)
    assert got == code
    if argument == "raise":
        assert text.rstrip().endswith("ValueError: of the user's own")
        assert "prefork.py" not in text, "frames of the server say nothing to the user"


def test_forks_draw_different_random_numbers(starter, folder):
    draws = {json.loads(run(starter, folder)[1])["random"] for _ in range(3)}
    assert len(draws) == 3


def test_a_signal_ends_it_and_is_told(starter, folder):
    handle, _ = run(starter, folder, "sleep", wait=False)
    assert handle.poll() is None
    os.killpg(handle.pid, signal.SIGKILL)
    assert handle.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("module", "env"),
    [
        ("json.tool", None),  # not of the package
        ("warmpack.job", {"PATH": os.environ["PATH"], "PYTHONPATH": "/elsewhere", "LD_PRELOAD": ""}),
    ],
)
def test_what_a_fork_would_change_starts_afresh(starter, folder, module, env):
    code, _, handle = run(starter, folder, "--help", env=env, module=module)
    assert handle.pid > 0
    assert not hasattr(handle, "started"), "it was forked"
    assert code in (0, 1)  # 1: warmpack is not found on that path


def test_children_go_with_the_warm_process_and_containers_start_afresh_then(starter, folder):
    handle, _ = run(starter, folder, "sleep", wait=False)
    child = psutil.Process(handle.pid)
    os.kill(starter.pid, signal.SIGKILL)
    assert handle.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    code, text, _ = run(starter, folder, "0")
    assert code == 0
    assert not json.loads(text)["warm"]


def test_stop_ends_all_children(folder):
    warm = PreforkStarter(PopenStarter(), packages=["warmpack"], preload=["warm_library"], cwd=str(folder))
    handle, _ = run(warm, folder, "sleep", wait=False)
    warm.stop()
    assert handle.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(warm.pid)


def test_a_preload_that_fails_is_said_and_walked_round(folder, caplog):
    warm = PreforkStarter(
        PopenStarter(), packages=["warmpack"], preload=["not_there_at_all"], cwd=str(folder)
    )
    code, text, _ = run(warm, folder, "0")
    warm.stop()
    assert code == 0
    assert not json.loads(text)["warm"]
    assert "not_there_at_all" in caplog.text

"""The standby of a launcher, in a process of its own, which adopts orphans."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

# A trainer that leaves a standby and lives on; what its standby forks is the real one, which ends at once here.
FIRST = """
import os, sys, time
from trainers.runtime.standby import leave_standby
leave_standby(lambda: print("imported", flush=True))
assert "TRAINYARD_STANDBY_FD" not in os.environ
print("first", flush=True)
time.sleep(600)
"""

LAUNCHER = """
import json, os, signal, sys, time
from pathlib import Path
from trainers.runtime import process
from trainers.runtime.standby import Standby

said = {}
def until(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, said
        time.sleep(0.01)

def output(child):
    until(lambda: child.poll() is not None)
    text = b""
    while chunk := os.read(child.output, 65536):
        text += chunk
    return text.decode()

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

process.MODULE = "first"
standby = Standby()
env = {**os.environ, "MARK": "x" * 100_000}
first = standby.start(env)
until(lambda: standby.pid)
kept = standby.pid
said["kept_by_first"] = parent(kept) == first.pid
process.end_group(first)
said["first"] = output(first).split()
until(lambda: parent(kept) == os.getpid())

second = standby.start({**env, "TRAINYARD_LAUNCHER_PID": str(os.getpid())})
said["second_is_ours"] = second.pid not in (first.pid, kept)
said["second"] = "KeyError: 'TRAINYARD_ROLE'" in output(second)
said["code"] = second.poll()
said["same"] = standby.pid == kept

os.kill(kept, signal.SIGSTOP)  # one that does not answer is given up
standby._sock.settimeout(0.5)
third = standby.start(env)
until(lambda: standby.pid not in (None, kept))
said["third_is_new"] = not Path(f"/proc/{kept}").exists()

os.kill(standby.pid, signal.SIGKILL)
stray = os.fork()
if not stray:
    time.sleep(600)
process.end_group(third)
spared = os.fork()
if not spared:
    time.sleep(600)
ended = standby.end_strays(keep=[spared])
said["strays"] = stray in ended and spared not in ended and not Path(f"/proc/{stray}").exists()
fourth = standby.start(env)
until(lambda: standby.pid)
last = standby.pid
process.end_group(fourth)
standby.close()
said["closed"] = not Path(f"/proc/{last}").exists()
os.kill(spared, signal.SIGKILL)
os.waitpid(spared, 0)

anew = Standby(keep=False)
fifth = anew.start(env)
until(lambda: anew.pid is None)
process.end_group(fifth)

orphaned = Standby()
sixth = orphaned.start(env)
until(lambda: orphaned.pid)
said["orphan"] = orphaned.pid
print(json.dumps(said), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are adopted on Linux only")
def test_trainers_are_forked_from_the_standby_and_belong_to_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(FIRST)
    env = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -9, done.stderr
    said = json.loads(done.stdout)
    orphan = said.pop("orphan")
    assert said == {
        "kept_by_first": True,
        "first": ["imported", "first"],
        "second_is_ours": True,
        "second": True,
        "code": 1,
        "same": True,
        "third_is_new": True,
        "strays": True,
        "closed": True,
    }
    # A launcher that is killed leaves no standby behind.
    deadline = time.monotonic() + 30
    while Path(f"/proc/{orphan}").exists() and "Z" not in Path(f"/proc/{orphan}/stat").read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""Exports that are killed: a reader finds the old export whole, or none, or the new one; the next run finishes."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from serving.release.exported import Export
from trainers.exporting import package

# Stages an export of many small files over and over, as the step does, each with contents of its own.
WRITER = """
import sys, itertools
from pathlib import Path
from trainers.exporting import package
target = Path(sys.argv[1])
print("ready", flush=True)
for turn in itertools.count():
    with package.staged(target) as folder:
        (folder / "variables").mkdir()
        for i in range(20):
            (folder / "variables" / f"part-{i}").write_text(f"{sys.argv[2]}-{turn}-{i}" * 50)
        (folder / "saved_model.pb").write_text(f"{sys.argv[2]}-{turn}")
        package.describe(folder, {"job": "j", "turn": turn})
"""


def test_killed_at_random_points(tmp_path):
    """Writers, each killed at a random moment of its staging, digesting or renaming."""
    rng = random.Random(3)
    target, seen = tmp_path / "job" / "export", set()
    target.parent.mkdir()
    for number in range(60):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(target), str(number)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert writer.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.3))
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.communicate()
        if target.exists():  # between two renames there is none for a moment; never half of one
            assert package.complete(target) is not None
            Export.load(target).verify()
            seen.add((target / "saved_model.pb").read_text())
        if number >= 15 and len(seen) >= 4:
            break
    assert len(seen) >= 4  # they did come to something
    # The next run finishes, and what the killed ones left goes.
    left = [path for path in target.parent.iterdir() if path != target]
    assert left, "no writer was killed in the middle"
    for path in left:
        os.utime(path, (0, 0))
    with package.staged(target) as folder:
        (folder / "saved_model.pb").write_text("last")
        package.describe(folder, {"job": "j"})
    assert [path.name for path in target.parent.iterdir()] == ["export"]
    assert (target / "saved_model.pb").read_text() == "last"


@pytest.mark.slow
def test_the_step_killed_in_the_middle(job, tmp_path):
    """The real step as a process: killed once its staging folder is there, then run again."""
    spec = json.dumps({"job": str(job)})
    env = {**os.environ, "TRAINYARD_TERMINATION_LOG": str(tmp_path / "log")}
    command = [sys.executable, "-m", "trainers.export", "--spec", spec]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as step:
        deadline = time.monotonic() + 240
        while not list(job.glob(".export.*.tmp/saved_model.pb")):
            assert step.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        step.kill()
    assert not (job / "export").exists()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    Export.load(job / "export").verify()
    manifest = json.loads((job / "export" / "export.json").read_text())
    assert manifest["lineage"]["job"]["folder"] == str(job)
    assert manifest["code"]["source"] in ("git", "environment", "package")

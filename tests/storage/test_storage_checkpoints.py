"""Checkpoints in an S3 server: whole or not at all, whatever is killed when."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trainers.storage.checkpoints import CheckpointSets, identity_of
from trainers.storage.objects import ObjectStore

KEY = "jobs/p/j/checkpoints"


def save(folder: Path, step: int, size: int = 5000, keep: int = 3) -> None:
    """Write a checkpoint as the trainer does: data, index, then the file that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = hashlib.shake_256(str(step).encode()).digest(size)
    for suffix in ("data-00000-of-00001", "index"):
        path = folder / f"step-{step}.{suffix}"
        path.with_suffix(".tempstate").write_bytes(content + suffix.encode())
        path.with_suffix(".tempstate").replace(path)
    known = (folder / "checkpoint").read_text() if (folder / "checkpoint").exists() else ""
    names = [line.split('"')[1] for line in known.splitlines() if line.startswith("all")]
    names = [*(name for name in names if name != f"step-{step}"), f"step-{step}"][-keep:]
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{n}"' for n in names)]
    (folder / "checkpoint").write_text("\n".join(lines) + "\n")


def is_whole(folder: Path, step: int, size: int = 5000) -> bool:
    """Whether a fetched checkpoint is what `save` wrote."""
    content = hashlib.shake_256(str(step).encode()).digest(size)
    return all(
        (folder / f"step-{step}.{suffix}").read_bytes() == content + suffix.encode()
        for suffix in ("data-00000-of-00001", "index")
    )


def sets(store: ObjectStore, folder: Path, job: str = "j", **options: object) -> CheckpointSets:
    return CheckpointSets(store, KEY, folder, job, **options)  # type: ignore[arg-type]


def test_the_newest_are_kept_and_brought(store: ObjectStore, tmp_path: Path) -> None:
    there = sets(store, tmp_path / "a")
    assert there.fetch() == []
    assert there.publish() is None
    for step in range(10, 60, 10):
        save(tmp_path / "a", step)
        assert there.publish() is not None
        assert there.publish() is None  # once
    assert [saved.step for saved in there.saved()] == [30, 40, 50]
    assert {key.split("/")[4].split(".")[0] for key in store.find(KEY)} == {"step-30", "step-40", "step-50"}
    here = sets(store, tmp_path / "b")
    assert [saved.step for saved in here.fetch(2)] == [40, 50]
    assert is_whole(tmp_path / "b", 50)
    assert is_whole(tmp_path / "b", 40)
    assert (tmp_path / "b" / "checkpoint").read_text() == (
        'model_checkpoint_path: "step-50"\n'
        'all_model_checkpoint_paths: "step-40"\nall_model_checkpoint_paths: "step-50"\n'
    )
    assert here.publish() is None  # what was brought does not go up again
    save(tmp_path / "b", 60)
    assert here.publish() is not None
    assert [saved.step for saved in there.saved()] == [40, 50, 60]


def test_of_damaged_ones_the_one_before_is_taken(store: ObjectStore, tmp_path: Path) -> None:
    there = sets(store, tmp_path / "a")
    for step in (10, 20, 30):
        save(tmp_path / "a", step)
        there.publish()
    first, second, third = (saved.prefix for saved in there.saved())
    store.write(f"{third}/step-30.index", b"other bytes")
    store.remove([f"{second}/step-20.data-00000-of-00001"])
    assert [saved.prefix for saved in sets(store, tmp_path / "b").fetch(2)] == [first]
    assert not (tmp_path / "b" / "step-30.index").exists()


def test_another_jobs_are_left_alone(store: ObjectStore, tmp_path: Path) -> None:
    save(tmp_path / "a", 10)
    sets(store, tmp_path / "a", "one").publish()
    assert sets(store, tmp_path / "b", "other").fetch() == []
    save(tmp_path / "b", 10)
    sets(store, tmp_path / "b", "other").publish()
    assert len(store.find(KEY)) == 6
    assert len(sets(store, tmp_path / "c", "one").fetch()) == 1


def test_a_job_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    for root in (tmp_path / "a", tmp_path / "b"):
        (root / "jobs" / "j").mkdir(parents=True)
        plan = {
            "job": {"name": "j", "output": f"{root}/jobs/j", "inputs": {"records": f"{root}/records/m.json"}}
        }
        (root / "jobs" / "j" / "plan.json").write_text(json.dumps(plan))
    one, other = (identity_of(tmp_path / name / "jobs" / "j", tmp_path / name) for name in "ab")
    assert one == other != ""
    assert identity_of(tmp_path, tmp_path) == ""


def test_what_killed_uploads_left_goes(store: ObjectStore, tmp_path: Path) -> None:
    now = 1_800_000_000.0
    store.write(f"{KEY}/step-10.{int(now - 7200):08x}-abcdef/step-10.index", b"x")
    store.write(f"{KEY}/step-20.{int(now - 60):08x}-abcdef/step-20.index", b"x")
    save(tmp_path, 30)
    there = sets(store, tmp_path, now=lambda: now)
    there.publish()
    there.sweep()
    assert {key.split("/")[4].split(".")[0] for key in store.find(KEY)} == {"step-20", "step-30"}
    there.sweep(everything=True)
    assert {key.split("/")[4].split(".")[0] for key in store.find(KEY)} == {"step-30"}


UPLOADER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.storage.test_storage_checkpoints import save, sets
from trainers.storage.objects import ObjectStore
store, folder = ObjectStore(sys.argv[1]), Path(sys.argv[2])
there = sets(store, folder)
step = there.fetch()[-1].step if there.saved() else 0
print("ready", flush=True)
while True:
    step += 10
    save(folder, step, size={size})
    print("saved", flush=True)
    there.publish()
"""


@pytest.mark.timeout(900)
def test_kills_in_the_middle_of_uploads_leave_whole_ones(
    store: ObjectStore, tmp_path: Path, bucket: str
) -> None:
    """Uploads of 3 MB, one after the other, killed in halves and where chance says: what can be fetched is whole."""
    size, seed = 3 << 20, random.randrange(1 << 32)
    chance = random.Random(seed)
    here = str(Path(__file__).parents[2])
    script = textwrap.dedent(UPLOADER).format(here=here, size=size)
    last, halves = 0, 0
    for round_ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", script, bucket, str(tmp_path / f"chief-{round_}")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": here},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(chance.randint(2, 5)):
            assert process.stdout.readline() == b"saved\n"
        half = stop_in_a_half(store, process) if round_ % 2 else ""
        if not half:
            time.sleep(chance.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        uploads = files_of_uploads(store)
        assert not half or "complete.json" not in uploads[half], f"seed {seed}"
        halves = sum("complete.json" not in files for files in uploads.values())
        found = sets(store, tmp_path / f"look-{round_}").fetch()
        step = found[-1].step if found else 0
        assert step >= last, f"seed {seed}: a checkpoint was lost"
        assert not found or is_whole(tmp_path / f"look-{round_}", step, size), f"seed {seed}"
        last = step
    print(f"seed {seed}: {halves} half uploads, the last whole checkpoint is of step {last}")
    assert last > 0
    assert halves >= 3


def files_of_uploads(store: ObjectStore) -> dict[str, set[str]]:
    """What is there of each upload, by its place."""
    uploads: dict[str, set[str]] = {}
    for key in store.find(KEY):
        place, _, file = key.rpartition("/")
        uploads.setdefault(place, set()).add(file)
    return uploads


def stop_in_a_half(store: ObjectStore, uploader: subprocess.Popen[bytes]) -> str:
    """Stop the uploader with one file of two in the store, so that no request on its way makes it whole; its place."""
    left = {place for place, files in files_of_uploads(store).items() if len(files) == 1}
    while uploader.poll() is None:
        # Stopped first and looked at then: what is a half in this listing stays one.
        uploader.send_signal(signal.SIGSTOP)
        uploads = files_of_uploads(store)
        half = [place for place, files in uploads.items() if len(files) == 1 and place not in left]
        if half:
            return half[0]
        uploader.send_signal(signal.SIGCONT)
        time.sleep(random.uniform(0.0, 0.05))
    raise AssertionError(f"the uploader ended with {uploader.returncode}")


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"name": 1}'])
def test_a_damaged_word_of_completeness_is_no_checkpoint(
    store: ObjectStore, tmp_path: Path, broken: bytes
) -> None:
    save(tmp_path / "a", 10)
    sets(store, tmp_path / "a").publish()
    save(tmp_path / "a", 20)
    saved = sets(store, tmp_path / "a").publish()
    assert saved is not None
    store.write(f"{saved.prefix}/complete.json", broken)
    assert [found.step for found in sets(store, tmp_path / "b").fetch()] == [10]

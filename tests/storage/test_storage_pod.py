"""Process 1 of a pod with an object store: what it brings, sends, says and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import SECRET, Door, credentials, running_moto
from trainers.job import labels
from trainers.job.failures import FailureClass, exit_code_of
from trainers.job.record import JobRecord
from trainers.job.termination import Termination, parse
from trainers.storage.mirror import Mirror
from trainers.storage.objects import ObjectStore

STEP = """
import os, sys, json
from pathlib import Path
from trainers.job.termination import run_step
def main(spec):
{body}
sys.exit(run_step(main))
"""


class Pod:
    """A pod of a test, with a disk of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.root = folder / "disk"
        self.message = folder / "message"
        self.message.touch()
        self.env = {
            **os.environ,
            "TRAINYARD_STORE": url,
            "TRAINYARD_STORAGE": str(self.root),
            "TRAINYARD_STORE_PATIENCE": "2",
            labels.ENV_TERMINATION_LOG: str(self.message),
        }

    def start(self, body: str, spec: Mapping[str, Any], **env: str) -> subprocess.Popen[str]:
        text = "\n".join(f"    {line}" for line in body.strip().splitlines())
        command = ["python", "-c", STEP.format(body=text), "--spec", json.dumps(spec)]
        return subprocess.Popen(
            [sys.executable, "-m", "trainers.storage.pod", *command],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, body: str, spec: Mapping[str, Any], **env: str) -> tuple[int, str]:
        with self.start(body, spec, **env) as process:
            output, _ = process.communicate()
        return process.returncode, output

    def said(self) -> Termination:
        found = parse(self.message.read_text())
        assert found is not None
        return found


@pytest.fixture
def pod(tmp_path: Path, bucket: str) -> Pod:
    return Pod(tmp_path, bucket)


def test_paths_are_those_of_each_machine(pod: Pod, store: ObjectStore) -> None:
    store.write("a/in.json", b'{"path": "storage://a/b", "root": "storage://", "other": "/a/b"}')
    store.write("a/raw.bin", b"storage://")
    body = """
known = json.loads(Path(spec["in"]).read_text())
assert known["path"] == os.environ["TRAINYARD_STORAGE"] + "/a/b", known
assert known["other"] == "/a/b"
assert (Path(spec["in"]).parent / "raw.bin").read_bytes() == b"storage://"
out = Path(spec["out"]); out.mkdir()
(out / "z.json").write_text(json.dumps(known)); (out / "manifest.json").write_text("{}")
return {"out": str(out), "more": [str(out / "z.json")], "plain": "x"}
"""
    code, output = pod.run(
        body, {"in": f"{pod.root}/a/in.json", "beside": f"{pod.root}/a", "out": f"{pod.root}/o"}
    )
    assert code == 0, output
    assert pod.said().result == {"out": "storage://o", "more": ["storage://o/z.json"], "plain": "x"}
    assert json.loads(store.read("o/z.json") or b"")["path"] == "storage://a/b"
    assert "sent 2 files" in output


def test_what_a_step_removes_is_removed(pod: Pod, store: ObjectStore) -> None:
    for name in ("a", "b"):
        store.write(f"d/{name}", b"1")
    code, output = pod.run('(Path(spec["d"]) / "a").unlink(); return {}', {"d": f"{pod.root}/d"})
    assert code == 0, output
    assert list(store.find("d")) == ["d/b"]


def test_sigterm_is_handed_on(pod: Pod) -> None:
    body = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(600)
return {}
"""
    with pod.start(body, {}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 7


def test_no_result_is_told_that_the_store_does_not_have(pod: Pod, door: Door, store: ObjectStore) -> None:
    with pod.start(
        'Path(spec["d"]).mkdir(); (Path(spec["d"]) / "a").write_text("x"); print("ready", flush=True);'
        ' sys.stdin.read(); Path(spec["go"]).exists() or __import__("time").sleep(3); return {}',
        {"d": f"{pod.root}/d", "go": "/nowhere"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                break
        door.shut()
        output = process.stdout.read()
        assert process.wait() == exit_code_of(FailureClass.INFRA), output
    failure = pod.said().failure
    assert failure is not None
    assert failure.code == "storage.away"
    door.open()
    assert store.find("d") == {}


def _refused(pod: Pod, words: str, **env: str) -> None:
    code, output = pod.run("return {}", {"at": f"{pod.root}/x"}, **env)
    assert code == exit_code_of(FailureClass.CONFIG), output
    failure = pod.said().failure
    assert failure is not None
    assert failure.code in ("storage.refused", "spec.invalid", "config")
    assert words in failure.reason
    assert failure.hint
    for text in (output, pod.message.read_text()):
        assert SECRET not in text
        assert "a-secret" not in text


def test_a_bucket_that_is_not_there_is_a_matter_of_configuration(pod: Pod) -> None:
    _refused(pod, "NoSuchBucket", TRAINYARD_STORE="s3://not-there-at-all/yard")


def test_no_credentials_are_a_matter_of_configuration(pod: Pod) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del pod.env[name]
    _refused(pod, "NoCredentialsError", AWS_SHARED_CREDENTIALS_FILE="/nowhere", AWS_CONFIG_FILE="/nowhere")


def test_a_secret_in_the_url_is_refused_and_not_said(pod: Pod) -> None:
    _refused(pod, "a bucket and a prefix alone", TRAINYARD_STORE="s3://key:a-secret@bucket/yard")


def test_a_store_without_its_client_says_which_is_missing(pod: Pod) -> None:
    try:
        import gcsfs  # noqa: F401
    except ImportError:
        _refused(pod, "no client for gs:// is installed", TRAINYARD_STORE="gs://bucket/yard")
    else:
        pytest.skip("gcsfs is installed here")


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[int]:
    """The port of an S3 server that knows nobody's key."""
    with running_moto(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="0") as port:
        yield port


def test_wrong_credentials_are_a_matter_of_configuration(pod: Pod, strict: int) -> None:
    _refused(pod, "InvalidAccessKeyId", **credentials(strict))


def test_a_store_that_is_away_is_infrastructure(pod: Pod, door: Door) -> None:
    door.shut()
    began = time.monotonic()
    code, output = pod.run("return {}", {"at": f"{pod.root}/x"})
    assert code == exit_code_of(FailureClass.INFRA), output
    assert time.monotonic() - began >= 2.0  # it was patient
    failure = pod.said().failure
    assert failure is not None
    assert failure.failure_class is FailureClass.INFRA
    assert SECRET not in output


def test_of_two_writers_one_is_first(store: ObjectStore) -> None:
    store.check()
    assert store.create("x/outcome.json", b"1")
    assert not store.create("x/outcome.json", b"2")
    assert store.read("x/outcome.json") == b"1"
    assert store.find("x")["x/outcome.json"].size == 1
    assert store.read("x/none") is None
    store.remove(["x/outcome.json", "x/none"])
    assert store.find("") == {}


def test_a_launcher_hears_by_the_store_that_another_one_has_its_place(
    store: ObjectStore, tmp_path: Path
) -> None:
    """That of a node which is cut off from the cluster, but not from the store."""
    job = "jobs/p/job"
    mirrors = [Mirror(store, tmp_path / name) for name in ("old", "new")]
    records = [JobRecord(mirror.root / job) for mirror in mirrors]

    def exchange(number: int) -> str:
        mirrors[number].push(job, lambda _: True)
        mirrors[number].pull(job, lambda _: True)
        return records[number].place_of("worker", 0)

    records[0].folder.mkdir(parents=True)
    records[0].take_place("worker", 0, "old")
    assert [exchange(0), exchange(1)] == ["old", "old"]
    records[1].take_place("worker", 0, "new")
    assert [exchange(1), exchange(0), exchange(1), exchange(0)] == ["new"] * 4

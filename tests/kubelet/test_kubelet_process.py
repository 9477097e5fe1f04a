"""The kubelet as a process of its own: its command, its end, and what is left after a kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from kubernetes import client, config
from trainyard.kubelet import FakeCluster
from trainyard.kubelet.__main__ import main
from trainyard.kubelet.testing import pod_manifest

# A shell with a child that left for a session of its own, and one that did so with an empty environment.
TREE = "setsid sleep 61.{0}1 & sleep 61.{0}2 & setsid env -i sleep 61.{0}3 & echo up; exec sleep 61.{0}4"


class _Kubelet:
    """`python -m trainyard.kubelet`, started and ready."""

    def __init__(self, root, *options):
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainyard.kubelet", "--root", str(root), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready = self.process.stdout.readline()
        self.api = config.new_client_from_config(str(root / "kubeconfig")) if self.ready else None

    @property
    def core(self):
        return client.CoreV1Api(self.api)

    def run(self, name, script):
        self.core.create_namespaced_pod("default", pod_manifest(name, ["sh", "-c", script]))
        deadline = time.monotonic() + 20
        while True:
            status = self.core.read_namespaced_pod(name, "default").status
            if status.phase == "Running" and "up" in self.core.read_namespaced_pod_log(name, "default"):
                return
            assert time.monotonic() < deadline, status
            time.sleep(0.05)

    def end(self, number):
        """(exit code, what it wrote to stderr)"""
        self.api.close()
        self.process.send_signal(number)
        _out, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.fixture
def start():
    """Starts kubelets, and ends those that a failed test left."""
    started = []

    def run(*args):
        started.append(_Kubelet(*args))
        return started[-1]

    yield run
    for kubelet in started:
        if kubelet.process.returncode is None:
            kubelet.end(signal.SIGKILL)


def _sleepers(word):
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and " ".join(process.info["cmdline"] or ()).startswith(f"sleep 61.{word}")
    ]


def _wait_gone(word, timeout=10.0):
    deadline = time.monotonic() + timeout
    while _sleepers(word) and time.monotonic() < deadline:
        time.sleep(0.02)
    return _sleepers(word)


def _guardian(kubelet):
    (child,) = [
        process
        for process in psutil.Process(kubelet.process.pid).children()
        if "guardian.py" in " ".join(process.cmdline())
    ]
    return child


def test_kill_9_of_the_kubelet_ends_its_containers_and_the_next_one_says_so(start, tmp_path):
    kubelet = start(tmp_path)
    kubelet.run("a", TREE.format(71))
    kubelet.core.create_namespaced_pod("default", pod_manifest("done", ["echo", "kept"]))
    while kubelet.core.read_namespaced_pod("done", "default").status.phase != "Succeeded":
        time.sleep(0.05)
    guardian = _guardian(kubelet)
    assert len(_sleepers(71)) == 4
    token = (tmp_path / "token").read_text()
    kubelet.end(signal.SIGKILL)
    # Nobody has to start anything for this.
    assert _wait_gone(71) == []
    guardian.wait(10)
    with FakeCluster(tmp_path) as cluster:
        status = cluster.pod("a")["status"]
        assert (status["phase"], status["reason"]) == ("Failed", "KubeletRestarted")
        ended = status["containerStatuses"][0]["state"]["terminated"]
        assert (ended["exitCode"], ended["reason"]) == (137, "ContainerStatusUnknown")
        assert cluster.log("a") == "up\n"
        assert cluster.pod("done")["status"]["phase"] == "Succeeded"
        assert cluster.log("done") == "kept\n"
        assert cluster.kubelet.token == token


def test_kill_9_of_the_guardian_too_leaves_the_garbage_to_the_next_kubelet(start, tmp_path):
    kubelet = start(tmp_path)
    kubelet.run("a", "trap '' TERM; " + TREE.format(72))
    kubelet.core.delete_namespaced_pod("a", "default", grace_period_seconds=60)
    guardian = _guardian(kubelet)
    guardian.kill()
    kubelet.end(signal.SIGKILL)
    guardian.wait(10)
    assert len(_sleepers(72)) == 4
    with FakeCluster(tmp_path) as cluster:
        assert _wait_gone(72) == []
        assert cluster.pod("a") is None  # it was being deleted
        assert list((tmp_path / "pods").iterdir()) == []


def test_a_recycled_process_id_is_never_killed(tmp_path, caplog):
    """The note of an earlier life names this very process, with another start time."""
    folder = tmp_path / "pods" / "uid" / "containers" / "base"
    folder.mkdir(parents=True)
    sleeper = subprocess.Popen(["sleep", "61.73"], start_new_session=True)
    try:
        (folder / "pid.json").write_text(f'{{"pid": {sleeper.pid}, "created": 1.0}}')
        (folder.parent / "other").mkdir()
        (folder.parent / "other" / "pid.json").write_text("{")
        with FakeCluster(tmp_path):
            assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
    assert "says nothing" in caplog.text


def test_sigterm_ends_it_in_good_order(start, tmp_path):
    kubelet = start(tmp_path, "--shutdown-grace=2", "--namespace=ml", "--node-label=pool=x", "--gpus=1")
    assert kubelet.ready.startswith("process kubelet ready at http://127.0.0.1:")
    assert str(tmp_path / "kubeconfig") in kubelet.ready
    kubelet.run("a", TREE.format(74))
    kubelet.run("stubborn", "trap 'echo no' TERM; echo up; while :; do sleep 0.1; done")
    guardian = _guardian(kubelet)
    assert psutil.Process(kubelet.process.pid).memory_full_info().pss < 40 * 2**20
    assert guardian.memory_full_info().pss < 15 * 2**20
    began = time.monotonic()
    code, _err = kubelet.end(signal.SIGTERM)
    assert code == 0
    assert time.monotonic() - began < 12
    assert _sleepers(74) == []
    assert not guardian.is_running()
    with FakeCluster(tmp_path) as cluster:
        reasons = {name: cluster.pod(name)["status"]["reason"] for name in ("a", "stubborn")}
        assert reasons == {"a": "Terminated", "stubborn": "Terminated"}


def test_the_command_refuses_what_it_cannot_do(tmp_path, capsys):
    with FakeCluster(tmp_path) as cluster:
        assert _main(["--root", str(tmp_path)]) == 1
        port = cluster.url.rpartition(":")[2]
        assert _main(["--root", str(tmp_path / "other"), "--port", port]) == 1
    assert _main(["--root", str(tmp_path), "--port", "-1"]) == 1
    err = capsys.readouterr().err
    assert "another process kubelet" in err
    assert "in use" in err
    assert "port must be between" in err
    with pytest.raises(SystemExit):
        _main(["--root", str(tmp_path), "--node-label", "x"])


def test_the_command_runs_until_it_is_told_to_stop(tmp_path, capsys):
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    assert _main(["--root", str(tmp_path), "--kubeconfig", str(tmp_path / "here" / "config")]) == 0
    timer.join()
    assert f"(kubeconfig {tmp_path}/here/config)" in capsys.readouterr().out


def _main(argv):
    """main() takes signals; pytest gets its own back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return main(argv)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)

"""The life of pods: exits, env, init containers, restarts, deadlines, grace periods. Real processes, real client."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from kubernetes.client import ApiException, V1DeleteOptions
from trainyard.kubelet.clock import epoch
from trainyard.kubelet.processes import MARK
from trainyard.kubelet.testing import pod_manifest


def _terminated(pod, index=0):
    return pod["status"]["containerStatuses"][index]["state"]["terminated"]


def _conditions(pod):
    return {row["type"]: (row["status"], row.get("reason", "")) for row in pod["status"]["conditions"]}


def _alive(marker):
    """Processes that carry a word in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and marker in " ".join(
            process.info["cmdline"] or ()
        ):
            found.append(process.pid)
    return found


def _gone(marker, timeout=5.0):
    deadline = time.monotonic() + timeout
    while _alive(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _alive(marker)


@pytest.mark.parametrize(
    ("script", "phase", "code", "reason", "number"),
    [
        ("exit 0", "Succeeded", 0, "Completed", None),
        ("exit 81", "Failed", 81, "Error", None),
        ("kill -KILL $$$$", "Failed", 137, "Error", 9),
        ("kill -TERM $$$$", "Failed", 143, "Error", 15),
    ],
)
def test_exit_reasons(ended, script, phase, code, reason, number):
    # "$$$$" is Kubernetes's way to say "$$"
    pod = ended(["sh", "-c", script])
    state = _terminated(pod)
    assert pod["status"]["phase"] == phase
    assert (state["exitCode"], state["reason"], state.get("signal")) == (code, reason, number)
    assert epoch(state["startedAt"]) <= epoch(state["finishedAt"])


def test_a_pod_goes_from_pending_over_running_to_its_end(cluster, core, name, tmp_path):
    go = tmp_path / "go"
    made = core.create_namespaced_pod(
        "default", pod_manifest(name, ["sh", "-c", f"while [ ! -e {go} ]; do sleep 0.05; done"])
    )
    assert made.status.phase == "Pending"
    assert made.metadata.uid
    running = cluster.wait_phase(name, "Running")
    assert _conditions(running) == {
        "PodScheduled": ("True", ""),
        "Initialized": ("True", ""),
        "Ready": ("True", ""),
        "ContainersReady": ("True", ""),
    }
    assert running["spec"]["nodeName"] == "process-kubelet"
    assert running["status"]["podIP"] == "127.0.0.1"
    go.touch()
    done = cluster.wait_phase(name, "Succeeded")
    assert _conditions(done)["Ready"] == ("False", "PodCompleted")
    assert core.read_namespaced_pod_status(name, "default").status.phase == "Succeeded"
    assert [reason for reason, _ in cluster.events(name)] == ["Scheduled", "Pulled", "Created", "Started"]


@pytest.mark.parametrize(
    ("command", "container", "message"),
    [
        (["no-such-program-x"], {}, 'exec: "no-such-program-x": executable file not found in $PATH'),
        (["/no/such/file"], {}, 'exec: "/no/such/file": no such file or directory'),
        (["/etc/passwd"], {}, 'exec: "/etc/passwd": permission denied'),
        ([], {"command": None, "args": ["x"]}, "a container needs a command of its own"),
        (["true"], {"workingDir": "/no/such/dir"}, 'chdir to cwd ("/no/such/dir")'),
    ],
)
def test_a_command_that_cannot_run_is_a_start_error(cluster, name, ended, command, container, message):
    pod = ended(command, container=container)
    state = _terminated(pod)
    assert pod["status"]["phase"] == "Failed"
    assert (state["exitCode"], state["reason"]) == (128, "StartError")
    assert message in state["message"]
    assert ("Failed", f"Error: {state['message']}") in cluster.events(name)


def test_env_is_resolved_as_on_a_cluster(cluster, core, name, monkeypatch):
    core.create_namespaced_config_map(
        "default", {"metadata": {"name": name}, "data": {"a": "from-map", "b": "2"}}
    )
    core.create_namespaced_secret("default", {"metadata": {"name": name}, "stringData": {"s": "from-secret"}})
    env = [
        {"name": "PLAIN", "value": "1"},
        {"name": "JOINED", "value": "$(PLAIN)-$(P_b)-$$(PLAIN)-$(NOPE)"},
        {"name": "MAP", "valueFrom": {"configMapKeyRef": {"name": name, "key": "a"}}},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": name, "key": "s"}}},
        {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "nope", "key": "s", "optional": True}}},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NS", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {
            "name": "MEMORY",
            "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
        },
    ]
    manifest = pod_manifest(
        name,
        ["sh", "-c", "env; echo arg=$0", "$(PLAIN)"],
        labels={"role": "chief"},
        container={
            "env": env,
            "envFrom": [{"configMapRef": {"name": name}, "prefix": "P_"}],
            "resources": {"limits": {"memory": "100Mi"}},
        },
        hostname="worker-1",
    )
    cluster.run(manifest)
    cluster.wait_phase(name, "Succeeded")
    seen = dict(line.split("=", 1) for line in cluster.log(name).splitlines() if "=" in line)
    expected = {
        "PLAIN": "1",
        "JOINED": "1-2-$(PLAIN)-$(NOPE)",
        "MAP": "from-map",
        "SECRET": "from-secret",
        "NAME": name,
        "NS": "default",
        "LABEL": "chief",
        "IP": "127.0.0.1",
        "NODE": "process-kubelet",
        "MEMORY": "100",
        "P_a": "from-map",
        "HOSTNAME": "worker-1",
        "PYTHONUNBUFFERED": "1",
        "arg": "1",
    }
    assert {key: seen.get(key) for key in expected} == expected
    assert "NONE" not in seen
    assert seen[MARK].endswith("/base/0")
    assert not [key for key in seen if key.startswith(("AIRFLOW", "PYTEST"))]


def test_a_missing_reference_waits_until_it_is_there(cluster, core, name):
    env = [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": name, "key": "a"}}}]
    cluster.run(pod_manifest(name, ["sh", "-c", "echo $A"], container={"env": env}))
    pod = cluster.wait_until(
        name,
        lambda pod: "CreateContainerConfigError" in str(pod["status"].get("containerStatuses")),
        "the error",
    )
    waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"]
    assert (pod["status"]["phase"], waiting["message"]) == ("Pending", f'configmap "{name}" not found')
    with pytest.raises(ApiException, match="waiting to start: CreateContainerConfigError"):
        cluster.log(name)
    core.create_namespaced_config_map("default", {"metadata": {"name": name}, "data": {"a": "late"}})
    pod = cluster.wait_phase(name, "Succeeded")
    assert cluster.log(name) == "late\n"
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_python_is_the_interpreter_of_the_kubelet(cluster, name, ended):
    ended(["python", "-c", "import sys; print(sys.executable)"])
    assert cluster.log(name).strip() == sys.executable


def test_init_containers_run_in_order_before_the_others(cluster, name, tmp_path):
    out = tmp_path / "out"

    def container(word):
        return {"name": word, "image": "none", "command": ["sh", "-c", f"sleep 0.1; echo {word} >> {out}"]}

    manifest = pod_manifest(name, [], initContainers=[container("one"), container("two")])
    manifest["spec"]["containers"] = [container("three")]
    cluster.run(manifest)
    pod = cluster.wait_phase(name, "Succeeded")
    assert out.read_text().split() == ["one", "two", "three"]
    assert [row["name"] for row in pod["status"]["initContainerStatuses"]] == ["one", "two"]
    assert all(row["ready"] for row in pod["status"]["initContainerStatuses"])
    assert cluster.log(name, container="one") == ""


def test_a_failed_init_container_fails_the_pod(cluster, name):
    init = {"name": "init", "image": "none", "command": ["sh", "-c", "exit 4"]}
    cluster.run(pod_manifest(name, ["true"], initContainers=[init]))
    pod = cluster.wait_phase(name, "Failed")
    assert pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
    assert pod["status"]["containerStatuses"][0]["state"] == {"waiting": {"reason": "PodInitializing"}}
    assert _conditions(pod)["Initialized"][0] == "False"


def test_two_containers_and_one_that_fails(cluster, name):
    manifest = pod_manifest(name, ["sh", "-c", "sleep 0.2"])
    manifest["spec"]["containers"].append(
        {"name": "side", "image": "none", "command": ["sh", "-c", "echo s; exit 2"]}
    )
    cluster.run(manifest)
    pod = cluster.wait_phase(name, "Succeeded", "Failed")
    assert pod["status"]["phase"] == "Failed"
    assert [_terminated(pod, i)["exitCode"] for i in (0, 1)] == [0, 2]
    assert cluster.log(name, container="side") == "s\n"
    with pytest.raises(ApiException, match="a container name must be specified") as caught:
        cluster.log(name)
    assert caught.value.status == 400


def test_on_failure_restarts_with_back_off_until_it_succeeds(cluster, name, tmp_path):
    tries = tmp_path / "tries"
    script = f"echo x >> {tries}; echo try $(wc -l < {tries}); [ $(wc -l < {tries}) -ge 4 ]"
    cluster.run(pod_manifest(name, ["sh", "-c", script], restart_policy="OnFailure"))
    pod = cluster.wait_phase(name, "Succeeded")
    row = pod["status"]["containerStatuses"][0]
    assert row["restartCount"] == 3
    assert row["lastState"]["terminated"]["exitCode"] == 1
    assert cluster.log(name) == "try 4\n"
    assert cluster.log(name, previous=True) == "try 3\n"
    assert "BackOff" in [reason for reason, _ in cluster.events(name)]


def test_always_restarts_also_after_success_and_shows_the_back_off(cluster, core, name):
    cluster.run(pod_manifest(name, ["sh", "-c", "echo run"], restart_policy="Always"))
    pod = cluster.wait_until(
        name, lambda pod: "CrashLoopBackOff" in str(pod["status"].get("containerStatuses")), "back-off"
    )
    assert pod["status"]["phase"] == "Running"
    assert "back-off" in pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
    assert cluster.log(name) == "run\n"
    core.delete_namespaced_pod(name, "default")
    cluster.wait_gone(name)


def test_a_start_error_is_tried_again_where_the_policy_says_so(cluster, core, name):
    cluster.run(pod_manifest(name, ["no-such-program-x"], restart_policy="OnFailure"))
    cluster.wait_until(
        name,
        lambda pod: any(row["restartCount"] for row in pod["status"].get("containerStatuses", ())),
        "a restart",
    )
    core.delete_namespaced_pod(name, "default", grace_period_seconds=0)
    cluster.wait_gone(name)


def test_the_active_deadline_ends_a_pod(cluster, name):
    cluster.run(
        pod_manifest(name, ["sleep", "61.001"], activeDeadlineSeconds=1, terminationGracePeriodSeconds=1)
    )
    pod = cluster.wait_phase(name, "Failed")
    assert pod["status"]["reason"] == "DeadlineExceeded"
    assert _terminated(pod)["exitCode"] == 143
    assert "DeadlineExceeded" in [reason for reason, _ in cluster.events(name)]
    assert _gone("sleep 61.001")


STUBBORN = textwrap.dedent(
    """
    import signal, time
    signal.signal(signal.SIGTERM, lambda *_: print("not now", flush=True))
    print("ready", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.1)
    """
)


def _wait_for_log(cluster, name, text, timeout=10.0):
    deadline = time.monotonic() + timeout
    while text not in cluster.log(name):
        assert time.monotonic() < deadline, f"{text!r} did not come"
        time.sleep(0.05)


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(cluster, core, name):
    cluster.run(pod_manifest(name, ["python", "-c", STUBBORN], terminationGracePeriodSeconds=1))
    cluster.wait_phase(name, "Running")
    _wait_for_log(cluster, name, "ready")
    asked = time.monotonic()
    answer = core.delete_namespaced_pod(name, "default")
    assert answer.metadata.deletion_timestamp is not None
    assert answer.metadata.deletion_grace_period_seconds == 1
    assert core.read_namespaced_pod(name, "default").status.phase == "Running"
    _wait_for_log(cluster, name, "not now")
    cluster.wait_gone(name)
    assert 0.9 <= time.monotonic() - asked < 4
    with pytest.raises(ApiException) as caught:
        core.read_namespaced_pod(name, "default")
    assert caught.value.status == 404
    assert ("Killing", "Stopping container base") in cluster.events(name)


def test_a_pod_that_hears_sigterm_may_finish_what_it_does(cluster, core, name, tmp_path):
    out = tmp_path / "out"
    script = f"trap 'sleep 0.3; echo saved > {out}; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    cluster.run(pod_manifest(name, ["sh", "-c", script]))
    cluster.wait_phase(name, "Running")
    _wait_for_log(cluster, name, "ready")
    core.delete_namespaced_pod(name, "default", body=V1DeleteOptions(grace_period_seconds=20))
    cluster.wait_gone(name, timeout=10)
    assert out.read_text() == "saved\n"


def test_grace_zero_removes_the_object_at_once_and_the_process(cluster, core, name):
    cluster.run(pod_manifest(name, ["python", "-c", STUBBORN, "stubborn-zero"]))
    cluster.wait_phase(name, "Running")
    core.delete_namespaced_pod(name, "default", grace_period_seconds=0)
    assert cluster.pod(name) is None
    assert _gone("stubborn-zero")


def test_a_shorter_grace_period_hastens_an_end_that_is_under_way(cluster, core, name):
    cluster.run(pod_manifest(name, ["python", "-c", STUBBORN], terminationGracePeriodSeconds=60))
    cluster.wait_phase(name, "Running")
    _wait_for_log(cluster, name, "ready")
    core.delete_namespaced_pod(name, "default")
    core.delete_namespaced_pod(name, "default", grace_period_seconds=1)
    cluster.wait_gone(name, timeout=5)


def test_no_process_outlives_its_container(cluster, core, name, ended):
    """Not one in the group, not one that left it for a session of its own, not one that was orphaned."""
    word = f"leftover-{name}"
    script = textwrap.dedent(
        f"""
        import os, subprocess, sys, time
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)", "{word}"]
        subprocess.Popen(sleeper)
        subprocess.Popen(sleeper, start_new_session=True)
        subprocess.run(["sh", "-c", "setsid " + sys.executable + " -c 'import time; time.sleep(60)' {word} &"])
        time.sleep(0.5)
        """
    )
    pod = ended(["python", "-c", script])
    assert pod["status"]["phase"] == "Succeeded"
    assert _alive(f"time.sleep(60) {word}") == []


def test_two_pods_run_at_once(cluster, name, tmp_path):
    """Each waits for the other's file."""
    for mine, other in (("a", "b"), ("b", "a")):
        script = f"touch {tmp_path}/{mine}; while [ ! -e {tmp_path}/{other} ]; do sleep 0.05; done"
        cluster.run(pod_manifest(f"{name}-{mine}", ["sh", "-c", script]))
    for word in "ab":
        cluster.wait_phase(f"{name}-{word}", "Succeeded")


@pytest.mark.parametrize(
    ("script", "container", "message"),
    [
        ("echo -n yes > $TRAINYARD_TERMINATION_LOG", {}, "yes"),
        ("echo -n yes > /dev/termination-log; exit 1", {}, "yes"),
        ("echo -n yes > /tmp/my-own", {"terminationMessagePath": "/tmp/my-own"}, "yes"),
        ("echo lost; exit 1", {"terminationMessagePolicy": "FallbackToLogsOnError"}, "lost\n"),
        ("echo kept; exit 0", {"terminationMessagePolicy": "FallbackToLogsOnError"}, None),
        ("head -c 5000 /dev/zero | tr '\\0' x > $TRAINYARD_TERMINATION_LOG", {}, "x" * 4096),
    ],
)
def test_termination_messages(ended, script, container, message):
    assert _terminated(ended(["sh", "-c", script], container=container)).get("message") == message


def test_a_container_starts_where_it_is_told(cluster, name, ended, tmp_path):
    ended(["pwd"], container={"workingDir": str(tmp_path)})
    assert cluster.log(name) == f"{tmp_path}\n"


def test_a_stopped_process_is_killed_too(cluster, core, name):
    cluster.run(pod_manifest(name, ["sleep", "61.002"], terminationGracePeriodSeconds=1))
    cluster.wait_phase(name, "Running")
    for pid in _alive("sleep 61.002"):
        os.kill(pid, signal.SIGSTOP)
    core.delete_namespaced_pod(name, "default")
    cluster.wait_gone(name, timeout=5)
    assert _gone("sleep 61.002")


def test_a_pods_folder_goes_with_it(cluster, core, name, ended):
    pod = ended(["true"])
    folder = Path(cluster.kubelet.root) / "pods" / pod["metadata"]["uid"]
    assert (folder / "containers" / "base" / "0.log").exists()
    core.delete_namespaced_pod(name, "default")
    # The object goes first, then what it holds on disk.
    deadline = time.monotonic() + 20
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()

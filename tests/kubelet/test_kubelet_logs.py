"""Logs: live, since, tails, limits, stamps, long lines."""

from __future__ import annotations

import os
import re
import resource
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
from kubernetes import client, config, watch
from kubernetes.client import ApiException
from trainyard.kubelet.logs import MAX_LINE, LogFile, LogPump, read_log, tail
from trainyard.kubelet.testing import pod_manifest

STAMPED = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z (.*)$")


def test_followers_get_lines_while_the_container_runs(cluster, core, name):
    script = "import time\nfor i in range(5):\n    print(time.time())\n    time.sleep(0.5)"
    cluster.run(pod_manifest(name, ["python", "-c", script]))
    cluster.wait_phase(name, "Running")
    late = [
        time.time() - float(line)
        for line in watch.Watch().stream(core.read_namespaced_pod_log, name, "default", follow=True)
    ]
    assert len(late) == 5
    # Handed over at the end, the median would be 1.5 s late; followed live it is some milliseconds.
    assert sorted(late)[2] < 1.0, late


def test_follow_ends_with_the_container_and_has_all_of_it(cluster, name):
    cluster.run(pod_manifest(name, ["sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.1; done; printf end"]))
    cluster.wait_phase(name, "Running", "Succeeded")
    assert cluster.log(name, follow=True) == "1\n2\n3\nend"


def test_both_outputs_are_one_log_and_carry_stamps(cluster, name, ended):
    ended(["sh", "-c", "echo out; echo err >&2; echo; echo last"])
    assert cluster.log(name) == "out\nerr\n\nlast\n"
    lines = cluster.log(name, timestamps=True).splitlines()
    assert [STAMPED.match(line)[1] for line in lines] == ["out", "err", "", "last"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tail_lines": 2}, "4\n5\n"),
        ({"tail_lines": 0}, ""),
        ({"tail_lines": 99}, "1\n2\n3\n4\n5\n"),
        ({"limit_bytes": 3}, "1\n2"),
        ({"since_seconds": 3600}, "1\n2\n3\n4\n5\n"),
        ({"since_seconds": 3600, "tail_lines": 1}, "5\n"),
    ],
)
def test_parts_of_a_log(cluster, name, ended, options, text):
    ended(["sh", "-c", "for i in 1 2 3 4 5; do echo $i; done"])
    assert cluster.log(name, **options) == text


def test_since_leaves_out_what_is_older(cluster, core, name, ended):
    ended(["sh", "-c", "echo old; sleep 2.2; echo new"])
    assert cluster.log(name, since_seconds=1) == "new\n"
    stamp = STAMPED.match(cluster.log(name, timestamps=True).splitlines()[0])[0].split()[0]
    moment = datetime.fromisoformat(stamp[:26] + "+00:00") + timedelta(seconds=1)
    query = [("sinceTime", moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))]
    path = f"/api/v1/namespaces/default/pods/{name}/log"
    answer = core.api_client.call_api(
        path, "GET", query_params=query, auth_settings=["BearerToken"], _preload_content=False
    )
    assert answer.data == b"new\n"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"container": "nope"}, "container nope is not valid for pod"),
        ({"previous": True}, "previous terminated container"),
        ({"since_seconds": -1}, "sinceSeconds must be 1 or more"),
        ({"limit_bytes": 0}, "limitBytes must be 1 or more"),
    ],
)
def test_what_is_refused(cluster, name, ended, query, message):
    ended(["true"])
    with pytest.raises(ApiException, match=message) as caught:
        cluster.log(name, **query)
    assert caught.value.status == 400


def test_the_log_of_a_pod_that_waits_for_its_node_is_refused(cluster, core, name):
    cluster.run(pod_manifest(name, ["true"], nodeSelector={"pool": "none"}))
    with pytest.raises(ApiException, match="waiting to start: the pod is not scheduled"):
        cluster.log(name)
    core.delete_namespaced_pod(name, "default")


def test_long_lines_and_bytes_that_are_no_text_come_as_they_were(cluster, core, name, ended):
    script = r"import sys; w = sys.stdout.buffer.write; w(b'a' * 40000 + b'\n' + b'\xff\xfe\n' + b'b' * 16384 + b'\n')"
    ended(["python", "-c", script])
    got = core.read_namespaced_pod_log(name, "default", _preload_content=False).data
    assert got == b"a" * 40000 + b"\n\xff\xfe\n" + b"b" * 16384 + b"\n"
    lines = cluster.log(name, timestamps=True, tail_lines=1).splitlines()
    assert len(lines) == 1


def test_a_follower_that_leaves_does_not_stay_on_the_server(cluster, core, name):
    cluster.run(pod_manifest(name, ["sleep", "61.003"]))
    cluster.wait_phase(name, "Running")
    response = core.read_namespaced_pod_log(name, "default", follow=True, _preload_content=False)
    before = threading.active_count()
    response.connection.sock.close()
    response.close()
    deadline = time.monotonic() + 15
    while threading.active_count() >= before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert threading.active_count() < before
    core.delete_namespaced_pod(name, "default", grace_period_seconds=0)


def test_a_silent_follower_stays_where_there_are_many_descriptors(cluster, core, name):
    """As with hundreds of pods, which have several each: none of them is out of range."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most == resource.RLIM_INFINITY or most >= 4096, (
        "this machine allows too few open files for the test"
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), most))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        cluster.run(pod_manifest(name, ["sh", "-c", "sleep 5; printf end"]))
        cluster.wait_phase(name, "Running")
        api = client.CoreV1Api(config.new_client_from_config(str(cluster.kubeconfig)))  # with new connections
        log = api.read_namespaced_pod_log(name, "default", follow=True, _preload_content=False)
        assert log.data == b"end"
        api.api_client.close()
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_a_tail_is_found_from_the_end_of_a_large_log(tmp_path):
    file = LogFile(tmp_path / "log")
    for i in range(5000):
        file.feed(b"%d %s\n" % (i, b"x" * 50))
    file.feed(b"no end")
    file.close()
    file.close()
    text = tail(tmp_path / "log", lines=3, size=1000)
    assert [line.split()[0] for line in text.splitlines()] == ["4998", "4999", "no"]
    assert tail(tmp_path / "log", lines=3, size=3) == "end"
    assert tail(tmp_path / "nope", lines=3, size=3) == ""
    assert sum(len(chunk) for chunk in read_log(tmp_path / "log", limit=70_000)) == 70_000


def test_a_piece_of_a_line_waits_for_its_end(tmp_path):
    file = LogFile(tmp_path / "log")
    file.feed(b"x" * (MAX_LINE + 5))
    file.feed(b"y\n")
    file.close()
    assert b"".join(read_log(tmp_path / "log")) == b"x" * (MAX_LINE + 5) + b"y\n"


def test_the_pump_lets_go_of_a_pipe_that_somebody_else_holds_open(tmp_path):
    import os

    pump = LogPump()
    reader, writer = os.pipe()
    file = LogFile(tmp_path / "log")
    pump.add(reader, file)
    os.write(writer, b"said\n")
    pump.finish(reader, file)
    with file.changed:
        assert file.changed.wait_for(lambda: file.closed, 10)
    os.close(writer)
    pump.stop()
    assert b"".join(read_log(tmp_path / "log")) == b"said\n"


def test_a_full_disk_ends_one_log_and_not_the_pump(tmp_path, caplog):
    import os

    class Full(LogFile):
        def _append(self, data):
            raise OSError(28, "No space left on device")

    pump = LogPump()
    files = []
    for kind in (Full, LogFile):
        reader, writer = os.pipe()
        file = kind(tmp_path / kind.__name__)
        pump.add(reader, file)
        os.write(writer, b"said\n")
        os.close(writer)
        files.append(file)
    with files[1].changed:
        assert files[1].changed.wait_for(lambda: files[1].closed, 10)
    pump.stop()
    assert b"".join(read_log(tmp_path / "LogFile")) == b"said\n"
    assert "No space left on device" in caplog.text


def test_a_follower_is_let_go_only_when_the_status_says_how_it_ended(cluster):
    # Airflow reads the status as soon as the log ends; "running" would make it wait and follow again.
    for number in range(5):
        name = f"settled-{number}"
        cluster.run(pod_manifest(name, ["sh", "-c", "echo up; sleep 0.3"]))
        cluster.wait_phase(name, "Running", "Succeeded")
        assert cluster.log(name, follow=True) == "up\n"
        pod = cluster.pod(name)
        assert pod is not None
        assert pod["status"]["phase"] == "Succeeded"

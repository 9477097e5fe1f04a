"""The edge: who gets in, what is answered to bad requests, discovery."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading

import pytest
import trainyard.kubelet as package
from kubernetes import client
from trainyard.kubelet import FakeCluster, KubeletInUse, ProcessKubelet
from trainyard.kubelet.server import MAX_BODY
from trainyard.kubelet.version import GIT_VERSION


def _ask(cluster, method, path, *, token=True, host=None, body=None, **headers):
    """A raw request; (code, body)."""
    port = int(cluster.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    if token:
        word = cluster.kubelet.token if token is True else token
        headers.setdefault("Authorization", f"Bearer {word}")
    headers["Host"] = host or f"127.0.0.1:{port}"
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("token", [False, "", "wrong", "\xe9"])
@pytest.mark.parametrize("path", ["/api/v1/pods", "/version", "/api/v1/namespaces/default/secrets"])
def test_without_the_token_nobody_gets_in(cluster, token, path):
    code, body = _ask(cluster, "GET", path, token=token)
    assert (code, json.loads(body)["reason"]) == (401, "Unauthorized")


def test_a_token_of_another_scheme_is_no_token(cluster):
    assert _ask(cluster, "GET", "/version", Authorization=f"Basic {cluster.kubelet.token}")[0] == 401


@pytest.mark.parametrize("host", ["evil.example:80", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example"])
def test_a_request_by_another_name_is_refused(cluster, host):
    """A web page that resolves its own name to 127.0.0.1 sends that name."""
    assert _ask(cluster, "GET", "/version", host=host)[0] == 403
    assert _ask(cluster, "GET", "/healthz", host=host)[0] == 403


def test_the_kubeconfig_is_for_its_owner_only(cluster):
    assert cluster.kubelet.kubeconfig.stat().st_mode & 0o777 == 0o600
    assert (cluster.kubelet.root / "token").stat().st_mode & 0o777 == 0o600
    assert cluster.kubelet.root.stat().st_mode & 0o777 == 0o700
    assert json.loads(cluster.airflow_connection)["extra"]["kube_config_path"] == cluster.kubeconfig


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz"])
def test_probes_need_no_token(cluster, path):
    assert _ask(cluster, "GET", path, token=False) == (200, b"ok")


def test_it_says_what_it_is(cluster, core):
    assert client.VersionApi(core.api_client).get_code().git_version == GIT_VERSION
    assert GIT_VERSION.endswith("+trainyard-process-kubelet")
    names = {row.name for row in core.get_api_resources().resources}
    assert {"pods", "pods/log", "events", "services", "nodes"} <= names
    assert client.CoreApi(core.api_client).get_api_versions().versions == ["v1"]
    assert [row.name for row in client.ApisApi(core.api_client).get_api_versions().groups] == ["batch"]
    batch = client.BatchV1Api(core.api_client).get_api_resources()
    assert (batch.group_version, [row.name for row in batch.resources]) == (
        "batch/v1",
        ["jobs", "jobs/status"],
    )


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/", None, 404),
        ("GET", "/apis/apps/v1/namespaces/default/deployments", None, 404),
        ("GET", "/apis/batch/v1/namespaces/default/pods", None, 404),
        ("GET", "/api/v1/namespaces/default/jobs", None, 404),
        ("GET", "/api/v1/widgets", None, 404),
        ("GET", "/api/v1/pods/x", None, 404),
        ("GET", "/api/v1/namespaces/default/nodes", None, 404),
        ("GET", "/api/v1/namespaces/default/pods/a/b/c", None, 404),
        ("GET", "/api/v1/namespaces/default/pods/none/log", None, 404),
        ("GET", "/api/v1/namespaces/default/pods/none/scale", None, 404),
        ("POST", "/version", b"{}", 404),
        ("POST", "/api/v1/pods", b"{}", 405),
        ("PUT", "/api/v1/namespaces/default/pods", b"{}", 405),
        ("POST", "/api/v1/namespaces/default/pods/x", b"{}", 405),
        ("POST", "/api/v1/namespaces/default/pods", b"{", 400),
        ("POST", "/api/v1/namespaces/default/pods", b"", 400),
        ("DELETE", "/api/v1/namespaces/default/pods/x", b"[1]", 400),
        ("GET", "/api/v1/pods?limit=x", None, 400),
        ("GET", "/api/v1/pods?watch=1&timeoutSeconds=x", None, 400),
        ("DELETE", "/api/v1/namespaces/default/pods/x?gracePeriodSeconds=x", None, 400),
    ],
)
def test_bad_requests_get_a_status(cluster, method, path, body, code):
    got, answer = _ask(cluster, method, path, body=body)
    status = json.loads(answer)
    assert (got, status["kind"], status["code"]) == (code, "Status", code)
    assert status["message"]


def test_a_put_must_have_an_object(cluster, core, name):
    core.create_namespaced_config_map("default", {"metadata": {"name": name}})
    path = f"/api/v1/namespaces/default/configmaps/{name}"
    assert _ask(cluster, "PUT", path, body=b"[]")[0] == 400
    assert _ask(cluster, "GET", f"{path}/status")[0] == 200


@pytest.mark.parametrize(
    "headers", [{"Content-Length": str(MAX_BODY + 1)}, {"Content-Length": "-5"}, {"Content-Length": "x"}]
)
def test_a_body_that_is_too_long_is_not_read(cluster, headers):
    assert _ask(cluster, "POST", "/api/v1/namespaces/default/pods", **headers)[0] == 413


def test_an_error_of_ours_is_a_500_and_stands_in_the_log(cluster, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(cluster.kubelet.store, "list", fail)
    code, body = _ask(cluster, "GET", "/api/v1/pods")
    assert (code, json.loads(body)["reason"]) == (500, "InternalError")
    assert b"broken" not in body
    assert "RuntimeError: broken" in caplog.text


def test_exec_says_that_there_is_none(cluster, name, ended):
    ended(["true"])
    code, body = _ask(cluster, "GET", f"/api/v1/namespaces/default/pods/{name}/exec?command=ls")
    assert code == 501
    assert "termination message" in json.loads(body)["message"]


def test_a_second_kubelet_on_the_same_folder_is_refused(cluster):
    with pytest.raises(KubeletInUse, match="another process kubelet"):
        ProcessKubelet(cluster.kubelet.root).start()


def test_a_port_that_is_taken_leaves_nothing_behind(cluster, tmp_path):
    port = int(cluster.url.rpartition(":")[2])
    kubelet = ProcessKubelet(tmp_path, port)
    before = threading.active_count()
    with pytest.raises(OSError, match="in use"):
        kubelet.start()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="not running"):
        _ = kubelet.url
    kubelet.stop()
    with ProcessKubelet(tmp_path) as again:
        assert again.url


def test_it_stops_with_open_watches_and_ends_pods_in_their_grace_period(tmp_path):
    from kubernetes import watch
    from trainyard.kubelet.testing import pod_manifest

    before = threading.active_count()
    out = tmp_path / "out"
    with FakeCluster(tmp_path / "root") as cluster:
        core = cluster.core_v1()
        events = watch.Watch().stream(core.list_namespaced_pod, "default", timeout_seconds=60)
        script = f"trap 'echo bye > {out}; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
        cluster.run(pod_manifest("a", ["sh", "-c", script]))
        cluster.run(pod_manifest("waits", ["true"], nodeSelector={"a": "b"}))
        assert next(events)["type"] == "ADDED"
        cluster.wait_phase("a", "Running")  # before, there is no log to follow
        for line in watch.Watch().stream(core.read_namespaced_pod_log, "a", "default", follow=True):
            assert line == "ready"
            break
    assert out.read_text() == "bye\n"
    assert cluster.pod("a")["status"]["reason"] == "Terminated"
    assert threading.active_count() <= before
    with FakeCluster(tmp_path / "root") as cluster:
        assert cluster.pod("a")["status"]["reason"] == "Terminated"
        assert cluster.pod("waits")["status"]["reason"] == "KubeletRestarted"
        assert cluster.log("a").startswith("ready\n")


def test_waiting_for_what_does_not_come_says_where_it_stands(cluster, name, ended):
    with pytest.raises(TimeoutError, match="there is no such pod"):
        cluster.wait_phase("none", "Running", timeout=0.1)
    ended(["true"])
    with pytest.raises(TimeoutError, match='"phase": "Succeeded"'):
        cluster.wait_phase(name, "Failed", timeout=0.1)
    with pytest.raises(TimeoutError, match="is still there"):
        cluster.wait_gone(name, timeout=0.1)


def test_the_package_shows_what_it_has_and_imports_nothing_heavy():
    for word in package.__all__:
        assert getattr(package, word)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = package.nope
    script = (
        "import sys, trainyard.kubelet; heavy = {'airflow', 'kubernetes', 'psutil', 'http.server'} & set(sys.modules);"
        "assert not heavy, heavy; import trainyard.kubelet.testing;"
        "heavy = {'airflow', 'kubernetes', 'tensorflow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

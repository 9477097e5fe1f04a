"""Where the process kubelet listens, and by what names it may be called."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest
from trainyard.kubelet.kubelet import ProcessKubelet


def status(host: str, port: int, name: str, token: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        headers = {"Host": name, "Authorization": f"Bearer {token}"}
        connection.request("GET", "/api/v1/namespaces/default/pods", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_beyond_loopback_it_is_called_by_its_advertised_name(tmp_path: Path) -> None:
    # Another loopback address stands for a container's: a test opens nothing to the outside.
    with ProcessKubelet(tmp_path, host="127.0.0.2", advertise="Kubelet") as kubelet:
        config = json.loads(kubelet.kubeconfig.read_text())
        port = int(kubelet.url.rpartition(":")[2])
        assert kubelet.url == config["clusters"][0]["cluster"]["server"] == f"http://kubelet:{port}"
        assert status("127.0.0.2", port, f"kubelet:{port}", kubelet.token) == 200
        assert status("127.0.0.2", port, f"localhost:{port}", kubelet.token) == 200  # its own health check
        assert status("127.0.0.2", port, f"elsewhere:{port}", kubelet.token) == 403
        assert status("127.0.0.2", port, f"kubelet:{port}", "wrong") == 401
        with pytest.raises(ConnectionRefusedError):
            status("127.0.0.1", port, f"localhost:{port}", kubelet.token)


def test_it_does_not_leave_loopback_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"advertise must name this kubelet .* when host is 0\.0\.0\.0"):
        ProcessKubelet(tmp_path, host="0.0.0.0")
    with ProcessKubelet(tmp_path) as kubelet:
        assert kubelet.url.startswith("http://127.0.0.1:")

"""TensorFlow servers that listen on loopback only."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import textwrap

import pytest

from trainers.runtime import loopback


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:2222", True),
        ("127.3.4.5:1", True),
        ("[::1]:2222", True),
        ("localhost:2222", True),
        ("10.0.0.4:2222", False),
        ("chief-0.gang.ns.svc:2222", False),
        ("[fe80::1]:2222", False),
    ],
)
def test_which_addresses_are_loopback(address: str, expected: bool) -> None:
    assert loopback.is_loopback(address) is expected


def test_any_address_becomes_loopback() -> None:
    def v4(host: str) -> bytes:
        return struct.pack("=HH", socket.AF_INET, 7) + socket.inet_aton(host) + bytes(8)

    def v6(host: str) -> bytes:
        return struct.pack("=HHI", socket.AF_INET6, 7, 0) + socket.inet_pton(socket.AF_INET6, host) + bytes(4)

    assert loopback.loopback_of(v4("0.0.0.0")) == v4("127.0.0.1")
    assert loopback.loopback_of(v4("10.1.2.3")) == v4("10.1.2.3")
    assert loopback.loopback_of(v6("::")) == v6("::ffff:127.0.0.1")
    assert loopback.loopback_of(v6("::ffff:0.0.0.0")) == v6("::ffff:127.0.0.1")
    assert loopback.loopback_of(v6("::"), v6=True) == v6("::1")
    assert loopback.loopback_of(v6("fe80::1")) == v6("fe80::1")
    unix = struct.pack("=H", socket.AF_UNIX) + b"/tmp/socket-of-somebody"
    assert loopback.loopback_of(unix) == unix


def test_a_listener_beyond_loopback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loopback, "listeners", lambda: [("127.0.0.1", 1), ("::ffff:127.0.0.1", 2), ("::1", 3)]
    )
    loopback.check_listeners("127.0.0.1:1")
    monkeypatch.setattr(loopback, "listeners", lambda: [("127.0.0.1", 1), ("::", 5)])
    with pytest.raises(loopback.UnprotectedServer, match="listens on :: port 5, beyond loopback"):
        loopback.check_listeners("127.0.0.1:1")
    loopback.check_listeners("10.0.0.4:1")
    monkeypatch.setenv(loopback.ENV_ALLOW_OPEN, "1")
    loopback.check_listeners("127.0.0.1:1")


def test_where_servers_cannot_be_kept_on_loopback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert loopback.bind_loopback_only("10.0.0.4:2222") is False
    monkeypatch.setattr(loopback, "_installed", [])
    monkeypatch.setattr(loopback.platform, "machine", lambda: "riscv64")
    with pytest.raises(
        loopback.UnprotectedServer, match=r"has no authentication.*not known how on \w+ riscv64"
    ):
        loopback.bind_loopback_only("127.0.0.1:2222")
    monkeypatch.setenv(loopback.ENV_ALLOW_OPEN, "1")
    assert loopback.bind_loopback_only("127.0.0.1:2222") is False
    assert "going on, as TRAINYARD_ALLOW_OPEN_SERVER=1 says" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_server_listens_on_loopback_only(host: str) -> None:
    """Each in a process of its own: the import table of a process can be patched once."""
    program = """
    import sys
    from trainers.job.ports import free_ports
    from trainers.runtime.lean import import_server
    from trainers.runtime.loopback import bind_loopback_only, check_listeners, listeners
    server_lib = import_server()
    address = f"{sys.argv[1]}:{free_ports(1)[0]}"
    assert bind_loopback_only(address) and bind_loopback_only(address)
    spec = server_lib.ClusterSpec({"ps": {0: address}})
    server = server_lib.Server(spec, job_name="ps", task_index=0, protocol="grpc")
    check_listeners(address)
    assert "keras" not in sys.modules
    print([found for found, _ in listeners()])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), host],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert done.returncode == 0, done.stderr
    shown = ("['::1']",) if host == "[::1]" else ("['::ffff:7f00:1']", "['::ffff:127.0.0.1']")
    assert done.stdout.strip() in shown


def test_a_server_in_this_process_listens_on_loopback_only() -> None:
    from trainers.job.ports import free_ports
    from trainers.runtime.lean import import_server

    server_lib = import_server()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    before = set(loopback.listeners())
    assert loopback.bind_loopback_only(address)
    assert loopback.bind_loopback_only(address)
    spec = server_lib.ClusterSpec({"ps": {0: address}})
    server = server_lib.Server(spec, job_name="ps", task_index=0, protocol="grpc")
    new = set(loopback.listeners()) - before
    assert {host for host, _ in new} <= {"::ffff:7f00:1", "::ffff:127.0.0.1"}
    assert [port for _, port in new] == [int(address.rpartition(":")[2])]
    loopback.check_listeners(address)
    del server


def test_the_listeners_of_a_process() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as v4,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as v6,
    ):
        found = loopback.listeners()
        ours = {("127.0.0.1", v4.getsockname()[1]), ("::1", v6.getsockname()[1])}
        assert ours <= set(found)
    assert not ours & set(loopback.listeners())
    assert loopback.listeners(2**22 + 1) == []  # no such process

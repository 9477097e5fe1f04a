"""Waiting for the port of a replica whose process before is still going away."""

from __future__ import annotations

import socket
import threading

import pytest

from trainers.job.failures import FailureClass
from trainers.job.ports import PortTaken, free_ports, wait_until_free


def listening(port: int) -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_port_that_becomes_free_is_waited_for() -> None:
    (port,) = free_ports(1)
    wait_until_free(f"127.0.0.1:{port}", seconds=0)
    server = listening(port)
    threading.Timer(0.3, server.close).start()
    wait_until_free(f"127.0.0.1:{port}", seconds=60)
    listening(port).close()


def test_one_that_stays_taken_is_named() -> None:
    (port,) = free_ports(1)
    with listening(port), pytest.raises(PortTaken, match=f"port {port}") as caught:
        wait_until_free(f"127.0.0.1:{port}", seconds=0.2)
    assert caught.value.failure_class is FailureClass.INFRA

"""Ports: the usual one, the remembered one, the next one; and what really is free."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from trainyard.platform.ports import (
    HOST,
    PREFERRED,
    NoFreePort,
    Port,
    Reservations,
    choose_ports,
    is_free,
)


@pytest.mark.parametrize(
    ("remembered", "taken", "chosen"),
    [
        ({}, set(), {"a": Port(100), "b": Port(101)}),
        ({}, {100}, {"a": Port(101, wanted=100), "b": Port(102, wanted=101)}),
        ({"a": 150}, set(), {"a": Port(150), "b": Port(101)}),
        ({"a": 150}, {150}, {"a": Port(100, wanted=150), "b": Port(101)}),
        ({"a": 101}, set(), {"a": Port(101), "b": Port(102, wanted=101)}),
        ({"unknown": 5}, set(), {"a": Port(100), "b": Port(101)}),
    ],
)
def test_choice(remembered: dict[str, int], taken: set[int], chosen: dict[str, Port]) -> None:
    found = choose_ports(remembered, preferred={"a": 100, "b": 101}, free=lambda port: port not in taken)
    assert found == chosen


def test_no_port_at_all() -> None:
    with pytest.raises(NoFreePort, match=r"no port for a is free between 100 and 299 on 127\.0\.0\.1"):
        choose_ports({}, preferred={"a": 100}, free=lambda _: False)


def test_a_port_that_is_listened_on_is_walked_round() -> None:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port)
        assert choose_ports({}, preferred={"a": port})["a"].number != port
    assert is_free(port)


def test_a_port_with_old_connections_is_free() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server closes first: its side waits in TIME_WAIT
            client.recv(1)
    assert is_free(port)


def test_the_usual_ports_differ() -> None:
    assert len(set(PREFERRED.values())) == len(PREFERRED)


def test_platforms_that_start_at_once_get_different_ports(tmp_path: Path) -> None:
    one, other = Reservations(tmp_path / "locks"), Reservations(tmp_path / "locks")
    ours = {p.number for p in choose_ports({}, free=one.take).values()}
    theirs = {p.number for p in choose_ports({}, free=other.take).values()}
    assert not ours & theirs, "nothing listens yet, but they are promised"
    one.release()
    assert {p.number for p in choose_ports({}, free=Reservations(tmp_path / "locks").take).values()} == ours
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700

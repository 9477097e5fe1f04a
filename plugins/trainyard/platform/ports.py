"""Free loopback ports: the usual one if it is free, else the next, and the same again at the next start."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["HOST", "PREFERRED", "NoFreePort", "Port", "Reservations", "choose_ports", "is_free", "listens"]

HOST = "127.0.0.1"
"""The only address anything of the embedded platform listens on, unless it is told another for MLflow."""

PREFERRED: Mapping[str, int] = {
    "airflow": 8080,
    "kubelet": 6443,
    "mlflow": 5000,
    "model-grpc": 8500,
    "model-rest": 8501,
}
"""The ports people know from each product's own documentation."""

_WALK = 200


class NoFreePort(Exception):
    """No port near the usual one is free."""


@dataclass(frozen=True)
class Port:
    """A chosen port; `wanted` is the one that was taken by somebody else, or None."""

    number: int
    wanted: int | None = None


def is_free(port: int, host: str = HOST) -> bool:
    """Whether a server could listen on this port of this machine's now; on loopback, if no `host` is given."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose old connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


class Reservations:
    """Ports that this user's platforms have chosen, whether anything listens on them yet or not.

    Two platforms that start at the same moment would both find 8080 free, seconds before either listens. Each
    chosen port is locked in a folder that all checkouts of this user share; a lock ends with its process. A port is
    free when it is on each of `hosts`.
    """

    def __init__(self, folder: Path | None = None, *, hosts: Sequence[str] = (HOST,)) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"trainyard-ports-{os.getuid()}"
        self._hosts = tuple(dict.fromkeys(hosts))
        self._held: list[int] = []

    def take(self, port: int) -> bool:
        """Whether the port is free; if so, it is reserved from now on."""
        if not all(is_free(port, host) for host in self._hosts):
            return False
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # O_NOFOLLOW: the folder for temporary files is everybody's.
        lock = os.open(
            self._folder / f"{port}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._held.append(lock)
        return True

    def release(self) -> None:
        """Let all go."""
        while self._held:
            os.close(self._held.pop())


def listens(processes: list[psutil.Process], port: int) -> bool:
    """Whether one of these processes listens on the port."""
    for process in processes:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port for c in connections):
            return True
    return False


def choose_ports(
    remembered: Mapping[str, int],
    *,
    preferred: Mapping[str, int] = PREFERRED,
    free: Callable[[int], bool] = is_free,
) -> dict[str, Port]:
    """A free port for every name: the remembered one, else the preferred one, else the next above it.

    Raises:
        NoFreePort: none of the 200 ports from the preferred one is free.
    """
    chosen: dict[str, Port] = {}
    taken: set[int] = set()
    for name, usual in preferred.items():
        first = remembered.get(name, usual)
        candidates = [first, *(port for port in range(usual, usual + _WALK) if port != first)]
        number = next((port for port in candidates if port not in taken and free(port)), None)
        if number is None:
            raise NoFreePort(
                f"no port for {name} is free between {usual} and {usual + _WALK - 1} on {HOST}; "
                f"end what listens there (ss -tlnp shows it)"
            )
        taken.add(number)
        chosen[name] = Port(number, wanted=first if number != first else None)
    return chosen

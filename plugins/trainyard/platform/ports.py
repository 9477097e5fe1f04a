"""Free loopback ports: the usual one if it is free, else the next, and the same again at the next start."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["HOST", "PREFERRED", "NoFreePort", "Port", "choose_ports", "is_free"]

HOST = "127.0.0.1"
"""The only address anything of the embedded platform listens on."""

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


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose old connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


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

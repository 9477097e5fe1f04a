"""Free loopback ports for the replicas of one machine."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

from trainers.job.errors import InfraError

__all__ = ["PortTaken", "free_ports", "wait_until_free"]

# Below the range that kernels hand out for outgoing connections (from 32768 on Linux, 49152 elsewhere), so that
# a port stays free between being chosen and being bound.
_LOWEST, _HIGHEST = 20000, 32000


class PortTaken(InfraError):
    """Somebody else listens where a replica is expected."""

    code = "job.port_taken"


def wait_until_free(
    address: str,
    *,
    seconds: float = 15.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once nothing listens on the port of `address`, "host:port".

    A replica's killed process holds its port for the moment that the kernel takes to free its memory. Raises
    PortTaken after `seconds`.
    """
    port = int(address.rpartition(":")[2])
    deadline = clock() + seconds
    while True:
        with socket.socket() as probe:
            # As TensorFlow's servers do: connections that have just been closed are no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as e:
                if clock() >= deadline:
                    raise PortTaken(
                        f"port {port}, where this replica must serve, has been in use for {seconds:g} s",
                        hint=f"see what listens there: ss -ltnp 'sport = :{port}'",
                    ) from e
            else:
                return
        sleep(0.05)


def free_ports(count: int, *, rng: random.Random | None = None) -> list[int]:
    """`count` different ports that nothing listens on at any IPv4 address of this machine.

    Any address, not just loopback: TensorFlow's servers bind them all.
    """
    rng = rng or random.Random()
    ports: list[int] = []
    held: list[socket.socket] = []
    try:
        for port in rng.sample(range(_LOWEST, _HIGHEST), _HIGHEST - _LOWEST):
            if len(ports) == count:
                break
            probe = socket.socket()
            try:
                probe.bind(("", port))  # bound, never listening: nobody can connect
            except OSError:
                probe.close()
                continue
            held.append(probe)
            ports.append(port)
    finally:
        for probe in held:
            probe.close()
    if len(ports) < count:
        raise InfraError(
            f"found {len(ports)} of {count} free ports from {_LOWEST} to {_HIGHEST}",
            hint="stop other servers",
        )
    return ports

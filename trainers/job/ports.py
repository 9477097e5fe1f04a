"""Free loopback ports for the replicas of one machine."""

from __future__ import annotations

import random
import socket

from trainers.job.errors import InfraError

__all__ = ["free_ports"]

# Below the range that kernels hand out for outgoing connections (from 32768 on Linux, 49152 elsewhere), so that
# a port stays free between being chosen and being bound.
_LOWEST, _HIGHEST = 20000, 32000


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

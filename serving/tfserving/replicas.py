"""Which replicas of a model server there are: a list of addresses, or all that a headless Service names.

Replicas(["10.0.0.5:8500", "10.0.0.6:8500"]).now()
Replicas(["dns:///model-server-replicas.trainyard.svc:8500"]).now()    # every pod, looked up at each call
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from serving.errors import ConfigInvalid, ServerUnavailable

__all__ = ["DNS", "Replicas", "addresses"]

log = logging.getLogger(__name__)

DNS = "dns:///"
"""Before a name whose every address is a replica, as gRPC writes it."""

Resolve = Callable[[str, int], Sequence[str]]


def addresses(host: str, port: int) -> list[str]:
    """Every "address:port" that a name has, sorted; raises ServerUnavailable where it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as e:
        raise ServerUnavailable(
            f"{host} names no replica: {e}", hint="is the headless Service there, and is a replica ready?"
        ) from e
    return sorted({_joined(str(address[0]), port) for *_, address in found})


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Replicas:
    """The replicas of one model server; `servers` are host:port addresses, or dns:///host:port names."""

    def __init__(self, servers: Sequence[str], *, resolve: Resolve = addresses) -> None:
        if isinstance(servers, str) or not servers or not all(servers):
            raise ConfigInvalid(f"servers must be a list of one or more host:port addresses, got {servers!r}")
        self._fixed = [server for server in servers if not server.startswith(DNS)]
        self._names = [_parsed(server) for server in servers if server.startswith(DNS)]
        self._resolve = resolve

    @property
    def change(self) -> bool:
        """Whether replicas may come and go: some are found by name."""
        return bool(self._names)

    def now(self) -> tuple[str, ...]:
        """The replicas at this moment; raises ServerUnavailable where a name has none."""
        found = list(self._fixed)
        for host, port in self._names:
            found += self._resolve(host, port)
        return tuple(dict.fromkeys(found))


def _parsed(server: str) -> tuple[str, int]:
    host, _, port = server.removeprefix(DNS).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigInvalid(f"servers found by name must be like dns:///host:8500, got {server!r}")
    return host, int(port)

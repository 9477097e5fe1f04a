"""The supervisor as a process of its own: `python -m trainyard.platform.host --settings JSON [--attached]`.

Whoever starts it reads how it goes from platform.json. SIGTERM or SIGINT stops the platform in good order;
with --attached, so does the end of stdin, which comes when the starter goes away, however it goes.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainyard.platform.airflow_config import airflow_options, write_airflow_config
from trainyard.platform.keys import make_keys
from trainyard.platform.ports import HOST, NoFreePort, Reservations, choose_ports
from trainyard.platform.processes import adopt_orphans, is_running, kill_all, tree
from trainyard.platform.services import Service, platform_services, platform_urls
from trainyard.platform.settings import Settings
from trainyard.platform.state import Held, hold, read_state, self_description, write_state
from trainyard.platform.supervisor import ComponentFailed, Supervisor
from trainyard.platform.template import airflow_version, copy_airflow_database

__all__ = ["EXIT_FAILED", "EXIT_HELD", "Host", "end_leftovers", "main"]

log = logging.getLogger(__name__)

MakeServices = Callable[..., Sequence[Service]]
"""As `platform_services`: of settings, ports and `migrate`."""

EXIT_FAILED = 1
EXIT_HELD = 3


class Host:
    """One life of a platform: prepares its folders, runs its supervisor, keeps platform.json true.

    `owns_orphans` as in Supervisor: only for a process that starts nothing else.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        attached: bool,
        make_services: MakeServices = platform_services,
        owns_orphans: bool = False,
    ) -> None:
        self._settings = settings
        self._make_services = make_services
        self._owns_orphans = owns_orphans
        self._lock = threading.Lock()
        self._supervisor: Supervisor | None = None
        self._reserved = Reservations(hosts=(HOST, settings.mlflow_host))
        self._state: dict[str, Any] = {
            "state": "starting",
            "attached": attached,
            "supervisor": self_description(),
            "started": time.time(),
            "ready_seconds": None,
            "failure": None,
        }

    def run(self, stop: threading.Event) -> int:
        """Start, watch until `stop` is set, stop; the exit code."""
        begun = time.monotonic()
        supervisor = self._prepare()
        # `stop` may be set by a signal at any time, also while components are being waited for.
        threading.Thread(target=lambda: (stop.wait(), supervisor.interrupt()), daemon=True).start()
        try:
            supervisor.start()
            if not stop.is_set():
                (self._settings.airflow_home / "migrated").write_text(airflow_version())
                self._write("running", ready_seconds=time.monotonic() - begun)
                supervisor.watch(stop)
            self._write("stopping")
            return 0
        except ComponentFailed as failure:
            log.error("%s", failure)
            self._write("stopping", failure=failure.to_dict())
            return EXIT_FAILED
        finally:
            supervisor.stop()
            self._reserved.release()
            self._write("failed" if self._state["failure"] else "stopped")

    def _prepare(self) -> Supervisor:
        settings = self._settings
        before = read_state(settings.state_file)
        end_leftovers(before)
        settings.make_folders()
        settings.model_server_ready.unlink(missing_ok=True)
        settings.model_config.touch()
        chosen = choose_ports(before.get("ports", {}), free=self._reserved.take)
        ports = {name: port.number for name, port in chosen.items()}
        keys = make_keys(settings.secrets)
        write_airflow_config(
            settings.airflow_home / "airflow.cfg", airflow_options(settings, keys, ports["airflow"])
        )
        self._state |= {
            "ports": ports,
            "walked": {name: port.wanted for name, port in chosen.items() if port.wanted is not None},
            "urls": platform_urls(ports, settings.cluster),
            "cluster": {**settings.cluster.describe(), "namespace": settings.namespace}
            if settings.cluster
            else None,
        }
        services = self._make_services(settings, ports, migrate=not self._database_is_current())
        self._supervisor = Supervisor(
            services, settings.logs, on_change=self._write, owns_orphans=self._owns_orphans
        )
        self._write()
        return self._supervisor

    def _database_is_current(self) -> bool:
        database, migrated = self._settings.airflow_database, self._settings.airflow_home / "migrated"
        if database.exists():
            return migrated.exists() and migrated.read_text() == airflow_version()
        return copy_airflow_database(database)

    def _write(self, state: str | None = None, **changes: Any) -> None:
        with self._lock:
            self._state |= changes
            if state:
                self._state["state"] = state
            components = self._supervisor.components.values() if self._supervisor else ()
            self._state["services"] = [component.to_dict() for component in components]
            write_state(self._settings.state_file, self._state)


def end_leftovers(state: Mapping[str, Any]) -> list[str]:
    """End the processes that a killed supervisor left behind, by pid and start time; their names."""
    ended = []
    for service in state.get("services", ()):
        pid = service.get("pid")
        if pid and is_running(pid, service.get("identity")):
            kill_all(tree(pid), grace=5.0)
            ended.append(service["name"])
    return ended


def main(argv: Sequence[str] | None = None, *, make_services: MakeServices = platform_services) -> int:
    """Run the supervisor until it is told to stop."""
    parser = argparse.ArgumentParser(prog="trainyard.platform.host")
    parser.add_argument("--settings", required=True, help="JSON of Settings' fields")
    parser.add_argument("--attached", action="store_true", help="stop at the end of stdin")
    arguments = parser.parse_args(argv)
    settings = Settings.from_json(arguments.settings)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    stop = threading.Event()
    _set_on_signals(stop)
    if arguments.attached:
        _set_on_end_of(sys.stdin.fileno(), stop)
    try:
        with hold(settings.lock_file):
            host = Host(
                settings,
                attached=arguments.attached,
                make_services=make_services,
                owns_orphans=adopt_orphans(),
            )
            return host.run(stop)
    except Held:
        return EXIT_HELD
    except NoFreePort as error:
        log.error("%s", error)
        return EXIT_FAILED


def _set_on_signals(stop: threading.Event) -> None:
    """Set the event on SIGINT, SIGTERM and SIGHUP; by a pipe, as Event.set may deadlock inside a handler."""
    reading, writing = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(writing, b"."))
    _set_on_end_of(reading, stop)


def _set_on_end_of(descriptor: int, stop: threading.Event) -> None:
    """Set the event once a pipe has something to read or has ended."""

    def wait() -> None:
        os.read(descriptor, 1)
        stop.set()

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())

"""Starts the platform's processes in order, waits until they answer, restarts those that die, stops them all."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from trainyard.platform.leash import Leash
from trainyard.platform.ports import listens
from trainyard.platform.processes import describe_exit, identity, kill_all, signal_group, tree
from trainyard.platform.services import Service

__all__ = ["Component", "ComponentFailed", "Supervisor"]

log = logging.getLogger(__name__)

BACK_OFF = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before each restart; one more death than there are entries, within the window, and it is given up."""
BACK_OFF_WINDOW = 600.0
_PROBE_SECONDS = 0.25
_WATCH_SECONDS = 0.2
_TAIL_LINES = 12


class ComponentFailed(Exception):
    """A component did not come up, or went down once too often."""

    def __init__(self, service: Service, what: str, log_file: Path) -> None:
        super().__init__(f"{service.title} {what}")
        self.service = service
        self.what = what
        self.log_file = log_file
        self.log_tail = _tail(log_file)

    def to_dict(self) -> dict[str, Any]:
        """A JSON value for the state file."""
        return {
            "component": self.service.name,
            "title": self.service.title,
            "what": self.what,
            "log": str(self.log_file),
            "log_tail": self.log_tail,
            "hint": _hint(self.service, self.log_tail),
        }


@dataclass
class Component:
    """One service as it stands: `state` is waiting, starting, ready, done, restarting, stopped or failed."""

    service: Service
    log_file: Path
    state: str = "waiting"
    process: subprocess.Popen[bytes] | None = None
    identity: str | None = None
    started: float = 0.0
    ready_seconds: float | None = None
    deaths: list[float] = field(default_factory=list)
    last_exit: str = ""
    answered: threading.Event = field(default_factory=threading.Event)

    def to_dict(self) -> dict[str, Any]:
        """A JSON value for the state file."""
        return {
            "name": self.service.name,
            "title": self.service.title,
            "state": self.state,
            "pid": self.process.pid if self.process and self.process.returncode is None else None,
            "identity": self.identity,
            "started": self.started,
            "ready_seconds": self.ready_seconds,
            "url": self.service.url,
            "log": str(self.log_file),
            "restarts": len(self.deaths),
            "last_exit": self.last_exit,
        }


class Supervisor:
    """Runs services. `on_change` is called after every change of a component's state, from any thread.

    A component that dies once the platform is up is started again after a growing pause; when it dies more
    often than `BACK_OFF` allows within `BACK_OFF_WINDOW` seconds, `watch` raises ComponentFailed.
    `owns_orphans` says that every other child of this process is one that was handed to it (`adopt_orphans`).
    """

    def __init__(
        self,
        services: Sequence[Service],
        logs: Path,
        *,
        on_change: Callable[[], None] = lambda: None,
        owns_orphans: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.components = {s.name: Component(s, logs / f"{s.name}.log") for s in services}
        self._on_change = on_change
        self._owns_orphans = owns_orphans
        self._clock = clock
        self._sleep = sleep
        self._stopping = threading.Event()
        self._stopped = False
        self._spawning = threading.Lock()  # between a fork and its note, a child looks like an orphan
        self._leash = Leash()
        self._failure: ComponentFailed | None = None

    def start(self) -> None:
        """Start every service as soon as what it needs answers; return once all answer.

        Raises:
            ComponentFailed: one ended, or did not answer within its budget; the others still run.
        """
        threads = [
            threading.Thread(target=self._bring_up, args=(c,), name=f"start {name}", daemon=True)
            for name, c in self.components.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure:
            raise self._failure

    def watch(self, stop: threading.Event) -> None:
        """Restart what dies until `stop` is set; raises ComponentFailed when one is given up."""
        while not stop.wait(_WATCH_SECONDS):
            for component in self.components.values():
                process = component.process
                if component.state == "ready" and process and process.poll() is not None:
                    self._buried(component)
                    threading.Thread(target=self._restart, args=(component,), daemon=True).start()
            if self._failure:
                raise self._failure

    def interrupt(self) -> None:
        """Make a `start` in another thread give up waiting; from a signal handler too."""
        self._stopping.set()

    def stop(self) -> None:
        """End everything, wave by wave: SIGTERM, the service's grace, SIGKILL for its group and descendants.

        A second call does nothing.
        """
        self._stopping.set()
        if self._stopped:
            return
        self._stopped = True
        for wave in sorted({c.service.stop_wave for c in self.components.values()}):
            threads = [
                threading.Thread(target=self._end, args=(c,))
                for c in self.components.values()
                if c.service.stop_wave == wave and c.process is not None
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self._reap_orphans()
        self._leash.close()

    def _bring_up(self, component: Component) -> None:
        try:
            for name in component.service.needs:
                while not self.components[name].answered.wait(_PROBE_SECONDS):
                    if self._stopping.is_set():
                        return
            self._launch(component)
            self._await(component)
        except ComponentFailed as failure:
            self._fail(component, failure)

    def _launch(self, component: Component) -> None:
        service = component.service
        component.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._spawning, component.log_file.open("ab") as output:
            if self._stopping.is_set():
                return
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(service.command)}\n".encode())
            output.flush()
            component.started = time.time()
            try:
                component.process = subprocess.Popen(
                    service.command,
                    env=dict(service.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=component.log_file.parent,
                    start_new_session=True,
                    umask=service.umask,
                )
            except OSError as error:
                raise ComponentFailed(
                    service, f"could not be started: {error}", component.log_file
                ) from error
            self._leash.note(component.process.pid)
        component.identity = identity(component.process.pid)
        self._change(component, "starting")

    def _await(self, component: Component) -> None:
        """Wait until a launched component answers (a one-shot: has ended with 0), within its budget."""
        service, process = component.service, component.process
        deadline = self._clock() + service.start_seconds
        begun = self._clock()
        while process is not None and not self._stopping.is_set():
            code = process.poll()
            if code is not None:
                if service.one_shot and code == 0:
                    self._leash.forget(process.pid)
                    break
                component.last_exit = describe_exit(code)
                raise ComponentFailed(
                    service, f"ended during its start: {component.last_exit}", component.log_file
                )
            if (
                service.probe is not None
                and service.probe(component.started)
                and _is_ours(service, process.pid)
            ):
                break
            if self._clock() >= deadline:
                what = f"did not answer within {service.start_seconds:.0f} s"
                raise ComponentFailed(service, what, component.log_file)
            self._sleep(_PROBE_SECONDS)
        else:
            return
        component.ready_seconds = self._clock() - begun
        self._change(component, "done" if service.one_shot else "ready")
        component.answered.set()

    def _buried(self, component: Component) -> None:
        process = component.process
        assert process is not None
        component.last_exit = describe_exit(process.returncode)
        component.deaths.append(self._clock())
        log.error("%s died: %s", component.service.title, component.last_exit)
        signal_group(process.pid, signal.SIGKILL)
        self._leash.forget(process.pid)
        self._change(component, "restarting")

    def _restart(self, component: Component) -> None:
        """Start a died component again after its back-off; what it left behind is ended first."""
        self._reap_orphans()
        recent = [t for t in component.deaths if t >= self._clock() - BACK_OFF_WINDOW]
        if len(recent) > len(BACK_OFF):
            what = (
                f"died {len(recent)} times in {BACK_OFF_WINDOW / 60:.0f} minutes, last: {component.last_exit}"
            )
            self._fail(component, ComponentFailed(component.service, what, component.log_file))
            return
        pause = BACK_OFF[len(recent) - 1]
        if self._stopping.wait(pause):
            return
        try:
            self._launch(component)
            self._await(component)
        except ComponentFailed as failure:
            if component.process is not None and component.process.poll() is None:
                self._end(component)
            if self._stopping.is_set():
                return
            log.error("%s", failure)
            component.deaths.append(self._clock())
            self._restart(component)

    def _fail(self, component: Component, failure: ComponentFailed) -> None:
        if not self._stopping.is_set():
            self._failure = failure
            self._stopping.set()
        self._change(component, "failed")

    def _end(self, component: Component) -> None:
        process = component.process
        assert process is not None
        begun = self._clock()
        descendants = tree(process.pid)[1:]
        # Twice: the second time says not to wait for work that is still going on.
        for _ in range(2):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(component.service.grace / 2)
        if process.poll() is None:
            log.warning(
                "killing %s: it did not end in %.0f s", component.service.title, component.service.grace
            )
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        kill_all(descendants, grace=2.0)
        self._leash.forget(process.pid)
        log.info("%s ended in %.1f s", component.service.title, self._clock() - begun)
        if component.state != "failed":
            self._change(component, "stopped")

    def _reap_orphans(self) -> None:
        """End processes that were handed to us because their parent died."""
        if not self._owns_orphans:
            return
        with self._spawning:
            ours = {c.process.pid for c in self.components.values() if c.process} | {self._leash.pid}
            children = [p for p in psutil.Process().children() if p.pid not in ours]
        kill_all([p for child in children for p in tree(child.pid)], grace=2.0)

    def _change(self, component: Component, state: str) -> None:
        component.state = state
        self._on_change()


def _is_ours(service: Service, pid: int) -> bool:
    """Whether it was this service that answered, and no stranger who took its port a moment earlier."""
    port = urlsplit(service.url).port if service.url else None
    return port is None or listens(tree(pid), port)


def _tail(path: Path, lines: int = _TAIL_LINES) -> list[str]:
    """The last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


_HINTS = (
    ("address already in use", "another program took its port just now: start again, a free one is found"),
    ("No module named", "the installation is not whole: make clean-venv && make install"),
    ("No space left on device", "free some disk space"),
    ("Cannot allocate memory", "free some memory"),
    ("database disk image is malformed", "its database is broken: make clean starts with an empty one"),
)


def _hint(service: Service, log_tail: Sequence[str]) -> str:
    text = "\n".join(log_tail).lower()
    return next(
        (hint for sign, hint in _HINTS if sign.lower() in text),
        f"read its log; if it stays so, make clean removes the platform's data and {service.title} starts afresh",
    )

"""The embedded platform as its clients see it: start it, ask how it is, use it, stop it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.errors import ConfigError, InfraError
from trainyard.platform.external import check_cluster
from trainyard.platform.host import EXIT_HELD, end_leftovers
from trainyard.platform.keys import AIRFLOW_USER, make_keys
from trainyard.platform.processes import identity, is_running
from trainyard.platform.services import base_environment, client_environment
from trainyard.platform.settings import Settings
from trainyard.platform.state import is_held, read_state, write_state

if TYPE_CHECKING:
    from trainyard.platform.airflow_api import AirflowClient

__all__ = ["Platform", "PlatformBusy", "PlatformFailed"]

OnProgress = Callable[[Mapping[str, Any]], None]
"""Called with the state (platform.json) again and again while one waits."""

START_SECONDS = 480.0
STOP_SECONDS = 90.0
_POLL_SECONDS = 0.1


class PlatformBusy(ConfigError):
    """Another run has this home's platform for itself."""

    code = "platform.busy"


class PlatformFailed(InfraError):
    """The platform did not come up, or went down; `failure` is the component's card as platform.json has it."""

    code = "platform.failed"

    def __init__(self, message: str, *, failure: Mapping[str, Any] | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failure = failure or {}


class Platform:
    """One embedded platform, by its home; made without touching anything.

    `home` alone gives the defaults below that folder; `settings` says everything; without either, they are
    those of the environment. `host` is the supervisor's command.
    """

    def __init__(
        self,
        home: Path | None = None,
        *,
        settings: Settings | None = None,
        host: Sequence[str] = (sys.executable, "-m", "trainyard.platform.host"),
    ) -> None:
        if settings is None:
            settings = Settings.from_environment({} if home else None, home=home)
        self.settings = settings
        self._host_command = host
        self._host: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """platform.json as it is now; {} when this home never had a platform."""
        return read_state(self.settings.state_file)

    @property
    def is_up(self) -> bool:
        """Whether everything answers."""
        return self.state.get("state") == "running"

    @property
    def urls(self) -> dict[str, str]:
        """Where things are: "airflow", "mlflow", "model-rest", "model-grpc" as host:port, and "kubelet" if it runs."""
        return dict(self.state.get("urls", {}))

    @property
    def storage(self) -> Path:
        """The pipelines' storage root."""
        return self.settings.storage

    @property
    def credentials(self) -> tuple[str, str]:
        """User and password of Airflow's page."""
        return AIRFLOW_USER, make_keys(self.settings.secrets).airflow_password

    @functools.cached_property
    def airflow(self) -> AirflowClient:
        """A client of Airflow's REST API, logged in at its first request."""
        from trainyard.platform.airflow_api import AirflowClient

        return AirflowClient(self.urls["airflow"], *self.credentials)

    def environment(self) -> dict[str, str]:
        """The variables by which a program of the user's finds this platform."""
        return client_environment(self.settings, self.urls)

    def start(self, *, attached: bool = False, on_progress: OnProgress = lambda state: None) -> bool:
        """Start the platform and wait until everything answers; False when it was up already.

        An `attached` one ends with this process. One that is being started by `trainyard up` is waited for.

        Raises:
            ClusterUnknown, ClusterRefused: the cluster that pods are to run on isn't there or doesn't answer.
            PlatformBusy: a run that is going on has the platform of this home for itself.
            PlatformFailed: a component didn't come up; everything that was started is stopped again.
        """
        started_here = not is_held(self.settings.lock_file)
        if started_here:
            if self.settings.cluster:
                check_cluster(self.settings.cluster, self.settings.namespace)
            self._spawn(attached=attached)
        try:
            return self._await(started_here, attached=attached, on_progress=on_progress)
        except BaseException:  # Ctrl-C too: nothing half started stays behind
            if self._host is not None:
                self.stop()
            raise

    def _await(self, started_here: bool, *, attached: bool, on_progress: OnProgress) -> bool:
        """Wait until whoever has the lock is up; whether that is the supervisor that was started here."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            state = self.state
            if self._host is not None and self._host.poll() is not None:
                if self._host.returncode != EXIT_HELD:
                    raise self._failed(state)
                self._forget_host()
                started_here = False  # another one was quicker
            current = self._host is None or state.get("supervisor", {}).get("pid") == self._host.pid
            if current and state.get("state") in ("starting", "running"):
                if self._host is None and state.get("attached"):
                    raise self._busy(state)
                on_progress(state)
                if state["state"] == "running":
                    return started_here
            elif self._host is None and not is_held(self.settings.lock_file):
                # The other one was just stopping.
                return self.start(attached=attached, on_progress=on_progress)
            if time.monotonic() >= deadline:
                raise PlatformFailed(
                    f"the platform was not up within {START_SECONDS:.0f} s",
                    hint=f"look into {self.settings.logs}",
                )
            time.sleep(_POLL_SECONDS)

    def stop(self, on_progress: OnProgress = lambda state: None) -> bool:
        """Stop the platform in good order and wait for it; False when nothing ran.

        Only processes that platform.json names with their start times are signalled.
        """
        supervisor = self.state.get("supervisor", {})
        if self._host is not None and self._host.poll() is None:
            pid = self._host.pid
            self._host.send_signal(signal.SIGTERM)
        elif is_running(supervisor.get("pid", 0), supervisor.get("identity")):
            pid = supervisor["pid"]
            os.kill(pid, signal.SIGTERM)
        else:
            self._forget_host()
            return self._clean_up()
        deadline = time.monotonic() + STOP_SECONDS
        known = identity(pid)
        while self._host.poll() is None if self._host else is_running(pid, known):
            on_progress(self.state)
            if time.monotonic() >= deadline:
                raise PlatformFailed(
                    f"the supervisor (pid {pid}) did not stop within {STOP_SECONDS:.0f} s",
                    hint=f"kill -9 {pid} ends everything within seconds",
                )
            time.sleep(_POLL_SECONDS)
        self._forget_host()
        self._clean_up()
        return True

    def _clean_up(self) -> bool:
        """End what a supervisor that was killed left behind; whether there was anything."""
        state = self.state
        if state.get("state") != "lost":
            return False
        left = end_leftovers(state)
        write_state(self.settings.state_file, {**state, "state": "stopped", "services": []})
        return bool(left)

    @contextlib.contextmanager
    def running(self, *, on_progress: OnProgress = lambda state: None) -> Iterator[Platform]:
        """The platform, up; one that this started is stopped at the end, one that ran already is left alone."""
        started = self.start(attached=True, on_progress=on_progress)
        try:
            yield self
        finally:
            if started:
                self.stop()

    def _spawn(self, *, attached: bool) -> None:
        self.settings.make_folders()
        command = [*self._host_command, "--settings", self.settings.to_json()]
        with self.settings.supervisor_log.open("ab") as log:
            self._host = subprocess.Popen(
                [*command, "--attached"] if attached else command,
                env=base_environment(),
                stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.settings.home,
                start_new_session=True,  # Ctrl-C reaches the client alone, which then stops things in order
            )

    def _forget_host(self) -> None:
        """The supervisor is gone: close what leads to it, and the client of the Airflow that was."""
        if self._host is not None and self._host.stdin is not None:
            self._host.stdin.close()
        self._host = None
        if client := self.__dict__.pop("airflow", None):
            client.close()

    def _busy(self, state: Mapping[str, Any]) -> PlatformBusy:
        return PlatformBusy(
            f"another run (supervisor pid {state['supervisor']['pid']}) has the platform of {self.settings.home}",
            hint="wait until it ends, start runs side by side with `make up` first, or give another TRAINYARD_HOME",
        )

    def _failed(self, state: Mapping[str, Any]) -> PlatformFailed:
        failure = state.get("failure")
        code = self._host.returncode if self._host else None
        self._forget_host()
        if failure:
            return PlatformFailed(
                f"{failure['title']} {failure['what']}", failure=failure, hint=failure["hint"]
            )
        return PlatformFailed(
            f"the platform's supervisor ended with {code}", hint=f"its log is {self.settings.supervisor_log}"
        )

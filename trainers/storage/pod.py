"""Process 1 of a pod whose storage is an object store: python -m trainers.storage.pod COMMAND ARGUMENTS...

    TRAINYARD_STORE=s3://bucket/prefix TRAINYARD_STORAGE=/scratch python -m trainers.storage.pod \\
        python -m trainers.evaluate --spec '{"job": "/scratch/jobs/digits/1", ...}'

It brings what the command needs below TRAINYARD_STORAGE, a folder of this pod alone, runs the command, hands signals
on to it, and copies what it writes: of a replica (TRAINYARD_JOB is set) all the time, of a step when it has ended
well, so that a step that failed has written nothing. The termination message is the command's, unless what it wrote
could not be sent. Paths in a result become "storage://...".
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.job import labels, termination
from trainers.job.errors import ConfigError, TrainyardError
from trainers.job.failures import exit_code_of
from trainers.job.shared import ENV_AGENT_PID, ENV_SOCKET, ENV_STORE
from trainers.job.spec import RoleKind
from trainers.storage.agent import ReplicaAgent
from trainers.storage.inputs import fetch_step
from trainers.storage.mirror import Mirror, is_passing
from trainers.storage.objects import ObjectStore, StorageAway, StorageRefused, store_from_environment
from trainers.storage.places import on_the_way, without_root
from trainers.storage.retry import Weather, patience_of, persist

__all__ = ["main"]

_ENV_ROOT = "TRAINYARD_STORAGE"
_ENV_GRACE = "TRAINYARD_GRACE"
_GRACE = "15"  # seconds for the checkpoint itself; a pod has 30, and it must still be uploaded
_LEAVE = 12.0  # seconds to send the rest when a pod leaves
# They tell that the files beside them are all there.
_LAST = ("manifest.json", "export.json", "complete.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code, or that of a failure to bring or to send its files."""
    command = [*(sys.argv[1:] if argv is None else argv)]
    logging.basicConfig(level=logging.WARNING, format="storage: %(message)s", stream=sys.stderr)
    logging.getLogger("trainers").setLevel(logging.INFO)
    role = os.environ.get(labels.ENV_ROLE, "")
    child = _Command(command)
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
    try:
        if not command:
            raise ConfigError("there is no command to run", hint="python -m trainers.storage.pod COMMAND ...")
        store, root = _place()
        if os.environ.get(labels.ENV_JOB) and role in [kind.value for kind in RoleKind]:
            return _run_replica(child, store, root, RoleKind(role))
        return _run_step(child, store, root)
    except (TrainyardError, OSError) as e:
        index = os.environ.get(labels.ENV_INDEX, "")
        failure = termination.failure_of(e, role=role, index=int(index) if index.isdigit() else None)
        termination.write_failure(failure)
        print(failure.card(), file=sys.stderr, flush=True)
        return exit_code_of(failure.failure_class)


def _place() -> tuple[ObjectStore, Path]:
    store, root = store_from_environment(), os.environ.get(_ENV_ROOT, "")
    if store is None or not Path(root).is_absolute():
        raise ConfigError(
            f"{ENV_STORE} and {_ENV_ROOT} must be set, the second to an absolute path",
            hint="Trainyard's operators do this; a container of your own needs both",
        )
    path = Path(os.path.normpath(root))
    path.mkdir(parents=True, exist_ok=True)
    return store, path


def _run_replica(child: _Command, store: ObjectStore, root: Path, role: RoleKind) -> int:
    index = os.environ.get(labels.ENV_INDEX, "")
    agent = ReplicaAgent(
        store, root, Path(os.environ[labels.ENV_JOB]), role, int(index) if index.isdigit() else 0
    )
    agent.stage()
    with tempfile.TemporaryDirectory(prefix="trainyard-store-") as folder:
        address = f"{folder}/agent"
        agent.start(address)
        grace = {} if _ENV_GRACE in os.environ else {_ENV_GRACE: _GRACE}
        code = child.run(Path(folder), {ENV_SOCKET: address, ENV_AGENT_PID: str(os.getpid()), **grace})
        try:
            agent.finish(_LEAVE)
        except (StorageAway, StorageRefused) as e:
            # An outcome is in the store already, with all that it speaks of: what is lost is the end of a log.
            print(
                f"storage: the last of what was written here is lost: {e.message}",
                file=sys.stderr,
                flush=True,
            )
        child.hand_on(root)
    return code


def _run_step(child: _Command, store: ObjectStore, root: Path) -> int:
    module, spec = _step_of(child.command)
    mirror = Mirror(store, root, rewrite=on_the_way(root))
    weather, patience = Weather(), patience_of()
    persist(lambda: fetch_step(mirror, module, spec), patience, weather)
    with tempfile.TemporaryDirectory(prefix="trainyard-store-") as folder:
        code = child.run(Path(folder), {})
        if code == 0:

            def send() -> int:
                return mirror.push("", _is_sent, last=lambda key: key.rpartition("/")[2] in _LAST)

            count = persist(send, patience, weather, through_refusals=True)
            print(f"storage: sent {count} files to {store.url}", flush=True)
        child.hand_on(root)
    return code


def _is_sent(key: str) -> bool:
    return not any(map(is_passing, key.split("/"))) and "/checkpoints/" not in key


def _step_of(command: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """The module and spec of a step's command; of another command nothing is brought."""
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    if "--spec" not in command[:-1]:
        return module, {}
    try:
        spec = json.loads(command[command.index("--spec") + 1])
    except ValueError:
        return module, {}  # the step says so
    return module, spec if isinstance(spec, dict) else {}


class _Command:
    """The pod's own command, as a child of this process."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._said: Path | None = None
        self._starting = False
        self._asked = False

    def terminate(self) -> None:
        """Hand SIGTERM on; safe in a signal handler."""
        self._asked = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        elif not self._starting:
            raise SystemExit(128 + signal.SIGTERM)  # nothing is begun

    def run(self, folder: Path, env: Mapping[str, str]) -> int:
        """Run it to its end; its exit code, as a shell gives it."""
        self._said = folder / "termination"
        self._said.touch()
        words = [sys.executable if word == "python" else word for word in self.command]
        self._starting = True  # from here on SIGTERM is handed on, as soon as there is a process
        try:
            self._process = subprocess.Popen(
                words,
                env={**os.environ, **env, labels.ENV_TERMINATION_LOG: str(self._said)},
                stdin=subprocess.DEVNULL,
            )
        except OSError as e:
            raise ConfigError(f"{words[0]} can't be run: {e.strerror}") from e
        if self._asked:
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def hand_on(self, root: Path) -> None:
        """Write the command's termination message as the pod's."""
        assert self._said is not None
        said = termination.parse(self._said.read_text())
        if said is None:
            return
        if said.failure is not None:
            termination.write_failure(said.failure)
        else:
            termination.write_result(without_root(dict(said.result or {}), root))


if __name__ == "__main__":
    sys.exit(main())

"""A replica's agent: keeps its job's folder and the object store's alike while the replica runs.

What it does, each about once a second and each without the other's waiting:

    files          heartbeats, attempts, logs and the like go up as they change; those of the others come down
    checkpoints    the chief's newest goes up, whole or not at all; an evaluator's comes down
    requests       `trainers.job.shared`: an outcome or generation is made in the store, where one is first

A store that is away stops none of it for good: training goes on, and what was written is sent when it is back. The
end of a job waits, for what it says must be there first: the last checkpoint before the outcome.
"""

from __future__ import annotations

import base64
import json
import posixpath
import socketserver
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.job.errors import MissingRecord, TrainyardError
from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind
from trainers.storage.checkpoints import CheckpointSets
from trainers.storage.inputs import fetch_checkpoints, fetch_dataset, sets_of
from trainers.storage.mirror import Mirror
from trainers.storage.objects import ObjectStore, StorageAway, StorageRefused
from trainers.storage.places import key_below, on_the_way
from trainers.storage.retry import Weather, patience_of, persist

__all__ = ["ReplicaAgent"]

_EVERY = 1.0  # seconds between two looks
_NOT_SENT = ("checkpoints", "history", "plan.json", "pods")
_NOT_TAKEN = ("checkpoints", "history", "stacks", "logs", "export", "evaluation", "pods")
_OF_THE_CHIEF = ("tensorboard", "tracking")
_NEWEST = "checkpoints/checkpoint"


class ReplicaAgent:
    """The agent of one replica of the job in `folder`, below the storage root `root`."""

    def __init__(
        self,
        store: ObjectStore,
        root: Path,
        folder: Path,
        role: RoleKind,
        index: int,
        *,
        patience: float | None = None,
        every: float = _EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mirror = Mirror(store, root, rewrite=on_the_way(root))
        self._folder = folder
        self._job = self._mirror.key(folder)
        self._role = role
        self._name = f"{role.value}-{index}"
        self._patience = patience_of() if patience is None else patience
        self._every = every
        self._clock = clock
        self._weather = Weather()
        self._stop = threading.Event()
        self._saving = threading.Lock()
        self._sets: CheckpointSets | None = None
        self._threads: list[threading.Thread] = []
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    # ---- before

    def stage(self) -> None:
        """Bring what the replica needs; waits for a store that is away, MissingRecord when there is no such job."""
        self._persist(self._stage, through_refusals=False)

    def _stage(self) -> None:
        self._mirror.pull(self._job, self._taken_first)
        if not (self._folder / "plan.json").exists():
            raise MissingRecord(
                f"no job at {self._mirror.store.url}/{self._job}",
                hint="clear the plan task, or check that Airflow's tasks and the pods have the same TRAINYARD_STORE",
            )
        record = JobRecord(self._folder)
        self._sets = sets_of(self._mirror, self._job)
        if record.outcome() is not None and self._role is not RoleKind.EVALUATOR:
            return
        job = record.plan().job
        if self._role is RoleKind.CHIEF:
            self._sets.sweep()
        if self._role in (RoleKind.CHIEF, RoleKind.EVALUATOR):
            self._sets.fetch(count=2)
        manifest = key_below(job.inputs.get("records", ""), self._mirror.root)
        if manifest and self._role is not RoleKind.PS:
            fetch_dataset(self._mirror, manifest)
        warm = key_below(job.warm_start or "", self._mirror.root)
        if warm and self._role is RoleKind.CHIEF:
            fetch_checkpoints(self._mirror, warm, count=2)

    # ---- while it runs

    def start(self, address: str) -> None:
        """Begin to copy, and to listen at the Unix socket `address`."""
        self._server = _Server(address, self)
        for name, target in (
            ("files", self._copy_files),
            ("checkpoints", self._copy_checkpoints),
            ("requests", self._server.serve_forever),
        ):
            thread = threading.Thread(target=target, name=f"trainyard-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _copy_files(self) -> None:
        while not self._stop.wait(self._every):
            self._once(self._exchange)

    def _copy_checkpoints(self) -> None:
        while not self._stop.wait(self._every):
            self._once(self._exchange_checkpoints)

    def _once(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (StorageAway, StorageRefused) as e:
            self._weather.away(e)
        except (OSError, TrainyardError) as e:
            # A file that is just being moved, or a disk that is full: the next look finds it otherwise.
            print(f"storage: {type(e).__name__}: {e}; trying again", flush=True)
        else:
            self._weather.fine()

    def _exchange(self) -> None:
        self._mirror.push(self._job, self._sent, all_=False)
        self._mirror.pull(self._job, self._taken)

    def _exchange_checkpoints(self) -> None:
        with self._saving:
            if self._sets is None:
                return
            if self._role is RoleKind.CHIEF:
                if self._sets.publish() is not None:
                    # For those that only ask how far the job is, and whether it was saved.
                    newest = self._folder / _NEWEST
                    self._mirror.store.write(f"{self._job}/{_NEWEST}", newest.read_bytes())
            elif self._role is RoleKind.EVALUATOR:
                self._sets.fetch()

    def create(self, path: Path, data: bytes) -> bool:
        """See `trainers.job.shared`; what was written before is in the store before this is."""

        def make() -> bool:
            if path.name == "outcome.json":
                self._exchange_checkpoints()
                self._mirror.push(self._job, self._sent)
            return self._mirror.create(path, data)

        return self._persist(make)

    def settle(self) -> None:
        """See `trainers.job.shared`."""
        self._persist(self._exchange)

    def _persist(self, action: Callable[[], Any], *, through_refusals: bool = True) -> Any:
        return persist(
            action, self._patience, self._weather, through_refusals=through_refusals, clock=self._clock
        )

    # ---- after

    def finish(self, patience: float) -> None:
        """Stop copying, and send the rest within so many seconds; StorageAway when that fails."""
        self._stop.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

        def send() -> None:
            if self._role is RoleKind.CHIEF:
                self._exchange_checkpoints()
            self._mirror.push(self._job, self._sent)
            if self._role is RoleKind.CHIEF and self._sets and JobRecord(self._folder).outcome() is not None:
                self._sets.sweep(everything=True)

        persist(send, patience, self._weather, through_refusals=True, clock=self._clock)

    # ---- which files

    def _part(self, key: str) -> str:
        return key[len(self._job) + 1 :]

    def _sent(self, key: str) -> bool:
        return self._part(key).partition("/")[0] not in _NOT_SENT

    def _taken(self, key: str) -> bool:
        part = self._part(key)
        top = part.partition("/")[0]
        if part == _NEWEST:
            return self._role in (RoleKind.PS, RoleKind.WORKER)
        if top in _OF_THE_CHIEF:
            return self._role is RoleKind.CHIEF
        return top not in _NOT_TAKEN

    def _taken_first(self, key: str) -> bool:
        # The log goes on where the pod before this one ended.
        mine = posixpath.basename(key).startswith(f"{self._name}.log") and self._part(key).startswith("logs/")
        return mine or self._taken(key)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, address: str, agent: ReplicaAgent) -> None:
        self.agent = agent
        super().__init__(address, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    """One request of `trainers.job.shared.Agent`."""

    server: _Server

    def handle(self) -> None:
        line = self.rfile.readline()
        if not line:
            return
        try:
            answer = self._answer(json.loads(line))
        except (TrainyardError, OSError, ValueError, KeyError) as e:
            answer = {"error": str(e)}
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "create" in request:
            data = base64.b64decode(request["data"])
            return {"created": self.server.agent.create(Path(request["create"]), data)}
        self.server.agent.settle()
        return {}

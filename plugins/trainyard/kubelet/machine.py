"""What all pods of one process kubelet share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trainyard.kubelet.events import EventRecorder
from trainyard.kubelet.logs import LogPump
from trainyard.kubelet.memory import MemoryWatcher
from trainyard.kubelet.processes import ProcessStarter
from trainyard.kubelet.scheduler import NodeSpec
from trainyard.kubelet.store import Store
from trainyard.kubelet.volumes import VolumeManager

__all__ = ["Machine"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The parts that pods are run with.

    `mark` is in the environment of every process that this kubelet starts; `backoff` is the first and the longest
    wait in seconds before a container is restarted.
    """

    root: Path
    mark: str
    workdir: str
    base_env: dict[str, str]
    node: NodeSpec
    store: Store
    events: EventRecorder
    volumes: VolumeManager
    starter: ProcessStarter
    pump: LogPump
    memory: MemoryWatcher
    backoff: tuple[float, float] = (10.0, 300.0)

    def __post_init__(self) -> None:
        if not 0 < self.backoff[0] <= self.backoff[1]:
            raise ValueError(
                f"backoff must be (first, longest) with 0 < first <= longest, got {self.backoff}"
            )

    def pod_folder(self, uid: str) -> Path:
        """Where a pod's logs, messages and volumes are."""
        return self.root / "pods" / uid

"""What a pod says of itself: phase, conditions, the states of its containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainyard.kubelet.clock import timestamp

__all__ = ["ContainerState", "phase_of", "pod_conditions", "set_condition"]

POD_IP = "127.0.0.1"


@dataclasses.dataclass
class ContainerState:
    """One container of a pod: what `containerStatuses` shows of it."""

    spec: Mapping[str, Any]
    state: dict[str, Any]
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    container_id: str = ""

    @property
    def name(self) -> str:
        """The container's name."""
        return str(self.spec["name"])

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """The exit code, once it has ended."""
        ended = self.state.get("terminated")
        return None if ended is None else int(ended["exitCode"])

    def status(self, *, init: bool = False) -> dict[str, Any]:
        """The row of `containerStatuses`."""
        ready = self.exit_code == 0 if init else self.running
        return {
            "name": self.name,
            "state": self.state,
            "lastState": self.last,
            "ready": ready,
            "started": self.running,
            "restartCount": self.restarts,
            "image": self.spec.get("image", ""),
            "imageID": "",
            **({"containerID": self.container_id} if self.container_id else {}),
        }


def phase_of(inits: Sequence[ContainerState], mains: Sequence[ContainerState], policy: str) -> str:
    """The phase that the containers' states add up to, by the rules of the kubelet."""
    if any(state.exit_code != 0 for state in inits):
        failed = any(state.exit_code not in (None, 0) for state in inits)
        return "Failed" if failed and policy == "Never" else "Pending"
    if any("waiting" in state.state and not state.last for state in mains):
        return "Pending"
    codes = [state.exit_code for state in mains]
    if None in codes or policy == "Always":
        return "Running"
    if not any(codes):
        return "Succeeded"
    return "Failed" if policy == "Never" else "Running"


def pod_conditions(
    inits: Sequence[ContainerState], mains: Sequence[ContainerState], phase: str
) -> Iterable[tuple[str, bool, str, str]]:
    """(type, status, reason, message) of the conditions of a pod that is on its node."""
    waiting_inits = [state.name for state in inits if state.exit_code != 0]
    if waiting_inits:
        text = f"containers with incomplete status: [{' '.join(waiting_inits)}]"
        yield "Initialized", False, "ContainersNotInitialized", text
    else:
        yield "Initialized", True, "PodCompleted" if phase == "Succeeded" else "", ""
    unready = [state.name for state in mains if not state.running]
    for kind in ("Ready", "ContainersReady"):
        if not unready:
            yield kind, True, "", ""
        elif phase == "Succeeded":
            yield kind, False, "PodCompleted", ""
        elif phase == "Failed":
            yield kind, False, "PodFailed", ""
        else:
            text = f"containers with unready status: [{' '.join(unready)}]"
            yield kind, False, "ContainersNotReady", text
    yield "PodScheduled", True, "", ""


def set_condition(status: dict[str, Any], kind: str, ok: bool, reason: str = "", message: str = "") -> None:
    """Set one condition; the time of its last change is kept when it stays the same."""
    rows = status.setdefault("conditions", [])
    value = "True" if ok else "False"
    row: dict[str, Any] = next((row for row in rows if row["type"] == kind), {})
    if not row:
        rows.append(row)
    changed = timestamp() if row.get("status") != value else row["lastTransitionTime"]
    row.clear()
    row.update(type=kind, status=value, lastProbeTime=None, lastTransitionTime=changed)
    if reason:
        row["reason"] = reason
    if message:
        row["message"] = message

"""After a kubelet that was killed: end what it left running, and say so in the pods that it left behind."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import psutil

from trainyard.kubelet.clock import timestamp
from trainyard.kubelet.processes import end_all
from trainyard.kubelet.resources import PODS
from trainyard.kubelet.status import set_condition
from trainyard.kubelet.store import Store

__all__ = ["REASON", "recover"]

log = logging.getLogger(__name__)

REASON = "KubeletRestarted"
_MESSAGE = "the process kubelet was started again; the pod's processes ended with the one before"


def recover(root: Path, mark: str, store: Store) -> int:
    """End processes of an earlier life and mark its unfinished pods Failed, their logs kept; how many pods."""
    for note in sorted(root.glob("pods/*/containers/*/pid.json")):
        leader = _same_process(note)
        if leader is not None:
            log.warning("process %d of an earlier kubelet still runs and is ended", leader)
            end_all(mark, leader)
        note.unlink()
    end_all(mark)
    pods, _ = store.list(PODS)
    unfinished = [pod for pod in pods if pod["status"]["phase"] not in ("Succeeded", "Failed")]
    for pod in unfinished:
        meta = pod["metadata"]
        store.update(PODS, meta["namespace"], meta["name"], _mark_failed)
    for pod in pods:
        if "deletionTimestamp" in pod["metadata"]:
            store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
    _sweep(root, store)
    return len(unfinished)


def _same_process(note: Path) -> int | None:
    """The process id of a note if that process still is the one that was noted, not one with the same number."""
    try:
        noted = json.loads(note.read_text())
        process = psutil.Process(noted["pid"])
        return noted["pid"] if abs(process.create_time() - noted["created"]) < 0.02 else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    except (ValueError, KeyError, TypeError) as e:
        log.warning("%s says nothing: %s", note, e)
        return None


def _mark_failed(pod: dict[str, Any]) -> None:
    status = pod["status"]
    status.update(phase="Failed", reason=REASON, message=_MESSAGE)
    for field in ("containerStatuses", "initContainerStatuses"):
        for row in status.get(field) or ():
            row.update(ready=False, started=False)
            if started := row["state"].get("running"):
                row["state"] = {
                    "terminated": {
                        "exitCode": 137,
                        "reason": "ContainerStatusUnknown",
                        "message": _MESSAGE,
                        "startedAt": started["startedAt"],
                        "finishedAt": timestamp(),
                    }
                }
    for kind in ("Ready", "ContainersReady"):
        set_condition(status, kind, False, "PodFailed")


def _sweep(root: Path, store: Store) -> None:
    """Remove the folders of pods that are no more, and the volumes of those that are over."""
    pods, _ = store.list(PODS)
    known = {pod["metadata"]["uid"] for pod in pods}
    for folder in (root / "pods").iterdir():
        shutil.rmtree(folder if folder.name not in known else folder / "volumes", ignore_errors=True)

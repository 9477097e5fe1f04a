"""Watching a canary: a share of the traffic for a while, then a verdict, by looks that may be hours apart.

    canary_step(...)["decision"]     # "wait", "promote" or "rollback", by outcome pass, fail or unknown

Nothing is held between two looks: what was seen so far is in `releases/NAME/canary.json`, so that a task may give
its slot back, and a watcher that is killed is simply called again. A rollback is done by the look that decides it;
a promotion is left to `promote_step`, which is given the verdict for the log.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import ReleaseConflict, ServingError
from serving.files import locked, write_atomic
from serving.release.canary import FAIL, PASS, UNKNOWN, WAITING, Canary, CanaryVerdict, Counts, judge
from serving.release.counts import CANDIDATE, STABLE, Sides, by_clients, by_group, by_version
from serving.release.rolling import rollout_of
from serving.release.store import ReleaseStore
from serving.traffic import Share, set_share

if TYPE_CHECKING:
    from serving.tfserving.config import ModelEntry
    from serving.tfserving.rollout import Rollout

__all__ = ["PROMOTE", "ROLLBACK", "WAIT", "canary_step", "forget_canary", "watch_canary"]

log = logging.getLogger(__name__)

WAIT, PROMOTE, ROLLBACK = "wait", "promote", "rollback"
TRAFFIC, COUNTS = "traffic.json", "counts"
"""Beside the servers' config file: the shares that clients follow, and the folder of what they counted."""

_LEASE_S = 900.0
_LOCK_WAIT_S = 60.0
_FORMAT = 1


def canary_step(
    storage: Path | str,
    name: str,
    version: int,
    servers: Sequence[str],
    config_path: Path | str,
    canary: Canary,
    *,
    by: str,
    metrics: Sequence[str] = (),
    canary_metrics: Sequence[str] = (),
    now: Callable[[], float] = time.time,
    lease_s: float = _LEASE_S,
) -> dict[str, Any]:
    """Look once at a deployed version that takes a share of the traffic; call it again while it says "wait".

    The first look gives it the share, in `traffic.json` beside the config file. `metrics` are the servers' HTTP
    addresses; with `canary_metrics` too, the canary is a server group of its own, and both are counted under
    TensorFlow Serving's names. Without counts by version, what clients wrote beside the config file is used.
    Returns outcome, decision, reasons, numbers and `started` (seconds since 1970). `lease_s` is how long clients
    keep the share when nobody looks any more. Raises ReleaseConflict when the version is not deployed.
    """
    store = ReleaseStore(storage, name)
    beside = Path(config_path).parent
    rollout = rollout_of(servers, config_path)
    with locked(store.releases / ".canary.lock", _LOCK_WAIT_S):
        state = _read(store)
        if state is None or state["version"] != version:
            state = _begin(_deployed(rollout, name, version), name, version, canary, now())
        if "verdict" not in state:
            entry = _deployed(rollout, name, version)
            _add(state, _look(state, metrics, canary_metrics, beside / COUNTS))
            verdict = _judge(state, canary, rollout, now())
            state["decision"] = _decide(verdict, canary)
            if state["decision"] == WAIT and not canary_metrics:  # else routes give it the share
                share = Share(
                    canary.share, entry.labels["canary"], now() + max(lease_s, 2 * canary.duration_s)
                )
                set_share(beside / TRAFFIC, name, share)
            elif state["decision"] != WAIT:
                state["verdict"] = verdict.to_json()
            _write(store, state)
            said = verdict.to_json()
        else:
            said = state["verdict"]
        result = {**said, "decision": state["decision"], "started": state["started"]}
        if state["decision"] != WAIT:
            set_share(beside / TRAFFIC, name, None)
        if state["decision"] == ROLLBACK:
            rollout.abandon(name, version)
            why = f"canary {said['outcome']}: {'; '.join(said['reasons'])}"
            store.reject(version, by=by, why=why, canary=result)
        return {"name": name, "version": version, **result}


def watch_canary(
    *arguments: Any, poll_s: float = 5.0, sleep: Callable[[float], None] = time.sleep, **options: Any
) -> dict[str, Any]:
    """Call `canary_step` with the same arguments until it decides; for whoever has no scheduler to wait in."""
    while True:
        result = canary_step(*arguments, **options)
        if result["decision"] != WAIT:
            return result
        sleep(poll_s)


def forget_canary(storage: Path | str, name: str, config_path: Path | str) -> None:
    """Forget what was watched before, and its share, so that a version that is deployed again is watched anew."""
    store = ReleaseStore(storage, name)
    traffic = Path(config_path).parent / TRAFFIC
    if not _path(store).exists() and not traffic.exists():
        return
    with locked(store.releases / ".canary.lock", _LOCK_WAIT_S):
        if traffic.exists():
            set_share(traffic, name, None)
        _path(store).unlink(missing_ok=True)


def _deployed(rollout: Rollout, name: str, version: int) -> ModelEntry:
    entry = rollout.config.entry(name)
    if entry is None or entry.labels.get("canary") != version:
        raise ReleaseConflict(
            f"version {version} of {name} has no label canary on the servers any more",
            hint="somebody took it out, or another release came: deploy it again",
        )
    return entry


def _path(store: ReleaseStore) -> Path:
    return store.releases / "canary.json"


def _read(store: ReleaseStore) -> dict[str, Any] | None:
    try:
        state = json.loads(_path(store).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as e:
        log.warning("%s can't be read, the watch begins anew: %s", _path(store), e)
        return None
    return state if isinstance(state, dict) and state.get("format") == _FORMAT else None


def _write(store: ReleaseStore, state: Mapping[str, Any]) -> None:
    for left in store.releases.glob(".canary.json.*.tmp"):
        left.unlink(missing_ok=True)
    write_atomic(_path(store), json.dumps(state, sort_keys=True).encode())


def _begin(entry: ModelEntry, name: str, version: int, canary: Canary, started: float) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "model": name,
        "version": version,
        "stable": entry.labels.get("stable"),
        "started": started,
        "canary": canary.to_dict(),
        "first": True,
        "seen": {},
        "total": {STABLE: Counts().to_dict(), CANDIDATE: Counts().to_dict()},
    }


def _look(
    state: dict[str, Any], metrics: Sequence[str], canary_metrics: Sequence[str], folder: Path
) -> Sides:
    name, version = state["model"], state["version"]
    if canary_metrics:
        return by_group(metrics, canary_metrics, name)
    sides = by_version(metrics, name, state["stable"] or 0, version) if metrics else {}
    # Servers that counted by version once do so always: clients' files besides would count the same requests twice.
    state["by_version"] = state.get("by_version", False) or bool(sides)
    return sides if state["by_version"] else by_clients(folder, name, version)


def _add(state: dict[str, Any], sides: Sides) -> None:
    """Add what was counted since the last look; the first look is where counting begins."""
    for source, by_side in sides.items():
        before = state["seen"].get(source)
        for side, counts in by_side.items():
            if before is None:
                # A source that is new now counted nothing before it came; at the first look it may have.
                new = Counts() if state["first"] else counts
            else:
                new = counts.since(Counts.from_dict(before[side]) if side in before else Counts())
            state["total"][side] = (Counts.from_dict(state["total"][side]) + new).to_dict()
        state["seen"][source] = {side: counts.to_dict() for side, counts in by_side.items()}
    state["first"] = False


def _judge(state: Mapping[str, Any], canary: Canary, rollout: Rollout, now: float) -> CanaryVerdict:
    stable, candidate = (Counts.from_dict(state["total"][side]) for side in (STABLE, CANDIDATE))
    verdict = judge(canary, stable, candidate, now - state["started"])
    gone = [] if verdict.outcome == FAIL else _not_available(rollout, state)
    if gone:
        return CanaryVerdict(FAIL, tuple(gone), verdict.numbers)
    if verdict.outcome in (UNKNOWN, WAITING) and state["stable"] is None:
        first = "there is no stable version yet that it could be compared with"
        return CanaryVerdict(PASS, (first,), verdict.numbers)
    return verdict


def _not_available(rollout: Rollout, state: Mapping[str, Any]) -> list[str]:
    """What replicas say of a version that they no longer serve; one that does not answer says nothing."""
    try:
        loaded = rollout.loaded(state["model"])
    except ServingError as e:
        log.warning("not every replica says what it has loaded: %s", e)
        return []
    version = state["version"]
    return [
        f"{server} no longer serves version {version}: it is {states[version]}"
        for server, states in loaded.items()
        if states.get(version) == "END"
    ]


def _decide(verdict: CanaryVerdict, canary: Canary) -> str:
    if verdict.outcome == UNKNOWN:
        return canary.on_unknown
    return {PASS: PROMOTE, FAIL: ROLLBACK}.get(verdict.outcome, WAIT)

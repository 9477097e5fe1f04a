"""Which share of a model's requests goes to its canary: a small file that clients follow, and what they count.

    set_share(path, "digits", Share(0.1, version=8, until=time.time() + 900))     # whoever runs the release
    PredictClient("127.0.0.1:8500", "digits", canary_share=path)                  # follows the file

A share is a lease: after `until` clients send everything to `stable` again, so that a release whose watcher died
leaves no canary behind. Standard library only.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.errors import ConfigInvalid
from serving.files import locked, write_atomic
from serving.release.canary import Counts

__all__ = ["CallCounter", "Route", "Share", "in_share", "read_counts", "read_shares", "set_share"]

log = logging.getLogger(__name__)

CANARY = "canary"
_LOOK_EVERY_S = 1.0
_LOCK_WAIT_S = 30.0
# 10 us to 100 s, a quarter more a bucket: fine enough to tell 1.3 times slower.
_BOUNDS = tuple(round(10 * 1.25**i, 3) for i in range(73))


@dataclass(frozen=True)
class Share:
    """The part of a model's requests (0 to 1) that label `canary` gets, until a time (seconds since 1970)."""

    share: float
    version: int
    until: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigInvalid(f"share must be from 0 to 1, got {self.share}")


def read_shares(path: Path | str) -> dict[str, Share]:
    """Shares by model; {} where there is no file, or none that can be read."""
    try:
        document = json.loads(Path(path).read_bytes())
        return {name: Share(**given) for name, given in document.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as e:
        log.warning("%s can't be read, so nothing goes to canaries: %s", path, e)
        return {}


def set_share(path: Path | str, model: str, share: Share | None) -> None:
    """Give a model's canary a share, or None; other models keep theirs."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock"), _LOCK_WAIT_S):
        for left in path.parent.glob(f".{path.name}.*.tmp"):
            left.unlink(missing_ok=True)
        shares = read_shares(path)
        if shares.get(model) == share:
            return
        shares.pop(model, None)
        if share is not None:
            shares[model] = share
        write_atomic(path, json.dumps({name: asdict(s) for name, s in sorted(shares.items())}).encode())


def in_share(model: str, key: str | bytes, share: float) -> bool:
    """Whether requests of a key belong to the share; the same key always does, and to every larger share too."""
    key = key.encode() if isinstance(key, str) else key
    digest = hashlib.sha256(model.encode() + b"\0" + key).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


class Route:
    """Decides for each call of one model whether it goes to the canary; safe to share between threads.

    `share` is a number, or the path of a file that is looked at again every second. `draw` gives numbers from 0
    to 1 for calls without a key.
    """

    def __init__(
        self,
        model: str,
        share: float | Path | str,
        *,
        draw: Callable[[], float] = random.random,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._draw, self._now, self._clock = model, draw, now, clock
        self._path = None if isinstance(share, (int, float)) else Path(share)
        self._share = Share(float(share), 0, float("inf")) if isinstance(share, (int, float)) else None
        self._looked = float("-inf")

    def current(self) -> Share | None:
        """The share in force now, None where everything goes to `stable`."""
        if self._path is not None and self._clock() - self._looked >= _LOOK_EVERY_S:
            self._looked = self._clock()
            self._share = read_shares(self._path).get(self._model)
        share = self._share
        return share if share is not None and share.share > 0 and self._now() < share.until else None

    def to_canary(self, key: str | bytes | None) -> bool:
        """Whether this call goes to the canary."""
        share = self.current()
        if share is None:
            return False
        return self._draw() < share.share if key is None else in_share(self._model, key, share.share)


class CallCounter:
    """What a client's calls of one model came to, by side; kept in a file of its own under `folder`.

    For servers that don't count by version, as TensorFlow Serving: the canary's watcher adds up the files of all
    clients. Written at most every second, and by `close`.
    """

    def __init__(
        self, folder: Path | str, model: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.json"
        self.path = Path(folder) / model / name
        self._clock = clock
        self._lock = threading.Lock()
        self._sides: dict[str, tuple[list[int], list[int]]] = {}
        self._written = clock()

    def count(self, side: str, ok: bool, micros: float) -> None:
        """One call of a side ("stable", "canary"): whether it was answered, and how long that took."""
        with self._lock:
            numbers, buckets = self._sides.setdefault(side, ([0, 0], [0] * (len(_BOUNDS) + 1)))
            numbers[0] += 1
            if ok:
                buckets[bisect.bisect_left(_BOUNDS, micros)] += 1
            else:
                numbers[1] += 1
            due = self._clock() - self._written >= _LOOK_EVERY_S
            if due:
                self._written = self._clock()
        if due:
            self.close()

    def counts(self) -> dict[str, Counts]:
        """What was counted so far."""
        with self._lock:
            return {
                side: Counts(
                    numbers[0],
                    numbers[1],
                    dict(zip((*_BOUNDS, float("inf")), buckets, strict=True)),
                )
                for side, (numbers, buckets) in self._sides.items()
            }

    def close(self) -> None:
        """Write what was counted; a folder that can't be written to is a warning, never a failed request."""
        document = {side: counts.to_dict() for side, counts in self.counts().items()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(document).encode())
        except OSError as e:
            log.warning("%s can't be written, its calls don't count: %s", self.path, e)


def read_counts(folder: Path | str, model: str) -> dict[str, Mapping[str, Counts]]:
    """What clients counted, by file name and side."""
    found: dict[str, Mapping[str, Counts]] = {}
    for path in sorted((Path(folder) / model).glob("*.json")):
        try:
            document: Mapping[str, Any] = json.loads(path.read_bytes())
            found[path.name] = {side: Counts.from_dict(given) for side, given in document.items()}
        except (OSError, ValueError, AttributeError) as e:
            log.warning("%s is left out: %s", path, e)
    return found

"""A change of champion under way, so that one that is killed is finished or undone by whoever comes next.

A promotion moves labels and writes the log; nothing can do both at once. So what is going to happen is written
down first. The servers' config file is the moment of truth: where `stable` points at the new version there, the
change happened and its line in the log is still owed; where it does not, nothing happened yet.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.files import write_atomic
from serving.release.promotions import PROMOTE, Promotion
from serving.release.store import ReleaseStore

__all__ = ["Intent", "settle"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Intent:
    """What is going to be written into the promotion log, and the version it is about."""

    what: str
    version: int
    by: str
    why: str
    gate: Mapping[str, Any] | None = None
    mlflow_version: str | None = None
    canary: Mapping[str, Any] | None = None

    @staticmethod
    def path(store: ReleaseStore) -> Path:
        return store.releases / "pending.json"

    @classmethod
    def read(cls, store: ReleaseStore) -> Intent | None:
        """The change that a killed run left, None where there is none."""
        try:
            return cls(**json.loads(cls.path(store).read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as e:
            log.warning("%s can't be read and is ignored: %s", cls.path(store), e)
            return None

    def begin(self, store: ReleaseStore) -> None:
        """Write it down; from now on a run that is killed can be finished."""
        write_atomic(self.path(store), json.dumps(asdict(self), sort_keys=True).encode())

    def finish(self, store: ReleaseStore) -> Promotion:
        """Write the line into the log (once) and forget the change."""
        if self.what == PROMOTE:
            entry = store.promote(
                self.version,
                by=self.by,
                why=self.why,
                gate=self.gate,
                mlflow_version=self.mlflow_version,
                canary=self.canary,
            )
        else:
            entry = store.rollback(by=self.by, why=self.why, to=self.version)
        self.forget(store)
        return entry

    def forget(self, store: ReleaseStore) -> None:
        """Nothing is under way any more."""
        self.path(store).unlink(missing_ok=True)


def settle(store: ReleaseStore, stable: int | None) -> Intent | None:
    """Finish a change that was killed after `stable` had moved, forget one that was killed before.

    `stable` is where the servers' config file points that label. Called inside `store.changing()`. Returns
    the change that was finished.
    """
    left = Intent.read(store)
    if left is None:
        return None
    if left.version != stable:
        log.info("%s of version %d was killed before it happened", left.what, left.version)
        left.forget(store)
        return None
    log.info("finishing the %s of version %d, which was killed", left.what, left.version)
    left.finish(store)
    return left

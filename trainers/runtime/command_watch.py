"""The launcher's watch over a command of the user's own: it need not say anything of itself.

Its launcher gives the signs of life in its place. If the command writes its progress file, its figures go with them,
and from then on it has to go on writing, within the stall budget.
"""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

from trainers.job.failures import FailureClass
from trainers.job.files import write_json
from trainers.job.record import Heartbeat
from trainers.job.reporting import read_progress
from trainers.runtime.replica import Replica
from trainers.runtime.restarts import SAVED_STEP
from trainers.runtime.tracking import Spool
from trainers.runtime.watch import End, Watch

__all__ = ["CommandWatch", "look_every", "silent_peers"]


def silent_peers(replica: Replica) -> list[str]:
    """Peers that have given no sign of life for as long as the start of a pod may take."""
    budget, now = replica.job.budgets.start, replica.now()
    return [
        beat.replica
        for beat in replica.record.heartbeats()
        if beat.replica != replica.name and now - beat.at > budget
    ]


def look_every(replica: Replica) -> float:
    """Seconds between looks at all peers, of which each reads many files."""
    return max(replica.times.beat, min(30.0, replica.job.budgets.start / 10))


class CommandWatch(Watch):
    """The watch over one process of a command; `progress_file` is where it may give signs of life."""

    progress_file: Path | None = None
    spool: Spool | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._written: float | None = None  # when the progress file was, by the file system's clock
        self._figures: dict[str, Any] = {}
        self._saved = -1
        self._peers_seen = self._r.clock()
        self._told = False
        # What it says is sent to MLflow while it runs where this image can; else when the job is over.
        self._delivers = self._r.is_chief and importlib.util.find_spec("mlflow") is not None

    def _over(self, now: float) -> End | None:
        """The world ends by itself in a moment, as frameworks do; servers, and who stays, are asked to."""
        self._over_since = now if self._over_since is None else self._over_since
        leave = self._r.times.leave
        patience = leave if self._r.drives else 0.0
        if now - self._over_since < patience:
            return None
        if not self._told:
            self._told = True
            self._child.signal(signal.SIGTERM)
        return End("over") if now - self._over_since >= patience + leave else None

    def _leaving(self, now: float) -> End | None:
        """After SIGTERM: the command is told, and has the grace time to save and exit."""
        if self._asked_at is None:
            self._asked_at = now
            self._r.say("asked to leave: so is the command")
            self._beat("leaving")
            self._child.signal(signal.SIGTERM)
        grace = self._r.times.grace
        if now - self._asked_at > grace:
            return End("terminated", reason=f"the command had not ended {grace:g} s after SIGTERM")
        return None

    def _note_progress(self, now: float) -> None:
        if self._delivers:
            self._delivery.progressed("training")
            self._delivery.poll()
        new = self._read(now)
        if now - self._r.last_beat > (self._r.times.beat / 4 if new else self._r.times.beat):
            self._beat("running")

    def _read(self, now: float) -> bool:
        """Take over what the command says of itself; whether it has said something since the last sign of life."""
        assert self.progress_file is not None
        try:
            written = self.progress_file.stat().st_mtime
        except FileNotFoundError:
            return False
        if written == self._written:
            return bool(self._figures)
        self._written, self._changed = written, now
        self._figures = read_progress(self.progress_file)
        return bool(self._figures)

    def _beat(self, phase: str) -> None:
        figures, self._figures = dict(self._figures), {}
        saved = figures.pop("saved_step", None)
        self._r.beat(phase, self._attempt.number, self._attempt.generation, **figures)
        if not self._r.is_chief:
            return
        if saved is not None and saved != self._saved:
            self._saved = saved
            path = self._record.folder / SAVED_STEP
            self._r.tolerating("the saved step", lambda: write_json(path, {"step": saved}))
        spool, step = self.spool, figures.get("step")
        if spool is not None and step is not None:
            known = {name: figures.get(name) for name in ("loss", "examples_per_s")}
            self._r.tolerating("the figures", lambda: spool.metrics(known, step=step))

    def _alone(self, now: float) -> End | None:
        """Nobody goes on for ever with a peer that is gone."""
        if now - self._peers_seen < look_every(self._r):
            return None
        self._peers_seen = now
        silent = silent_peers(self._r)
        budget = self._r.job.budgets.start
        if silent:
            return End("alone", reason=f"{', '.join(silent)} gave no sign of life for {budget:g} s")
        return None

    def _stalled(self, now: float) -> End | None:
        still = now - self._changed
        if self._written is None:
            return self._suspended(now)
        if still <= self._r.job.budgets.stall:
            return None
        beat: Heartbeat | None = self._r.heartbeat()
        step = f" (step {beat.step})" if beat and beat.step else ""
        reason = f"the command has not written its progress file for {still:.0f} s{step}"
        self._r.say(f"{reason}: ending it")
        # Whoever stands still in a gang holds up all: everybody begins again.
        why = f"{FailureClass.STALLED}: {reason}"
        self._record.next_generation(self._attempt.generation, by=self._r.name, reason=why)
        return End("stalled", reason=reason)

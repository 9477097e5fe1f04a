"""The attempts of one replica: every process that was started for it, and how each ended."""

from __future__ import annotations

import dataclasses

from trainers.job.failures import Failure
from trainers.job.record import Attempt
from trainers.runtime.replica import Replica
from trainers.runtime.watch import End

__all__ = ["Attempts"]


class Attempts:
    """The attempts of `replica` in its job's record, of this launcher and of those before it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._written: dict[int, Attempt] = {}

    def write(self, attempt: Attempt) -> None:
        """Write one, or what has become of it; on a full disk it is kept in memory."""
        self._written[attempt.number] = attempt
        self._replica.tolerating("the attempt", lambda: self._replica.record.write_attempt(attempt))

    def all(self) -> list[Attempt]:
        """Of this replica, also those that a full disk did not take."""
        me = self._replica.me
        found = {a.number: a for a in self._replica.record.attempts(me.role, me.index)}
        return [*(found | self._written).values()]

    def newest(self) -> int:
        """The number of the newest, 0 when there is none."""
        return max((attempt.number for attempt in self.all()), default=0)

    def excuse(self, attempt: Attempt, reason: str) -> None:
        """Write that its end was not its own fault, so that it doesn't count."""
        self.write(dataclasses.replace(attempt, failure_class=None, reason=reason))

    def note_end(self, attempt: Attempt | None, end: End, failure: Failure | None) -> None:
        """Write how one ended; None is a life that did not come to start a process."""
        if attempt is None:
            return
        code = end.code
        self.write(
            dataclasses.replace(
                attempt,
                ended=self._replica.now(),
                exit_code=code if code is not None and code >= 0 else None,
                signal=-code if code is not None and code < 0 else None,
                failure_class=failure.failure_class.value if failure else None,
                last_step=self._replica.job_step(),
                reason=failure.reason if failure else end.reason,
            )
        )

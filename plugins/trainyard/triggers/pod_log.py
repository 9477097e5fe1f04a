"""A pod's lines into its task's log while the task is deferred: live, each once, with the time they were written.

Where the lines come from:

    file   the replica's own log in the job's folder (`trainers.job.replica_log`): no request at all, whole whatever
           becomes of pod and node, and not cut by the kubelet's rotation. For replicas whose folder is visible here.
    api    the container's log, followed: one long request a pod, taken up again where it broke.

A place in a log is (time of the last line, how many lines of that time). A triggerer that comes after one that was
killed finds the place in what that one has written into the task's log; the worker that ends the task is told it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from trainers.job.replica_log import LogTail
from trainyard.triggers.cluster_api import ApiRefused, Cluster, passes
from trainyard.triggers.follow import Row, Tell, follow_files, tell_all, until

__all__ = [
    "Fresh",
    "Place",
    "PodLog",
    "earlier_place",
    "earlier_places",
    "lines_out",
    "log_of_task",
]

LOGGER = "trainyard.pod"
_TAIL_BYTES = 1 << 20
_PAUSES = (0.5, 10.0)

lines_out = structlog.get_logger(logger_name=LOGGER)


class Place(NamedTuple):
    """How far a log was told: the last line's time, as it was written, and how many lines of that time."""

    stamp: str = ""
    count: int = 0

    def after(self, stamp: str) -> Place:
        """The place behind one more line."""
        return Place(stamp, self.count + 1 if stamp == self.stamp else 1)


class PodLog:
    """Tells one container's lines; `place` is how far it has come.

    `job` and `replica` name the file, where there is one to be seen; else the API is followed.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        container: str,
        *,
        job: str = "",
        replica: str = "",
        place: Place | None = None,
        tell: Tell | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.container = container
        self.place = place or Place()
        seen = bool(replica) and (Path(job) / "plan.json").exists()
        self._tail = LogTail(Path(job), replica) if seen else None
        self._tell = tell or self._to_task
        self._clock = clock

    async def follow(self, started: str, ended: asyncio.Event) -> bool:
        """Tell lines as they come, until the container has `ended` and all are told; whether all could be had.

        `started` is when the container started (RFC 3339): what a replica's file has from before is another pod's.
        """
        if self._tail is not None and await self._follow_file(self._tail, started, ended):
            return True
        # It may also have died before it could open its log: what it printed is with the kubelet.
        return await self._follow_api(ended)

    # ---- the replica's file

    async def _follow_file(self, tail: LogTail, started: str, ended: asyncio.Event) -> bool:
        """Whether there was anything."""
        fresh = Fresh(self.place, not_before=started[:19])  # whole seconds, as a pod's status has them

        def read(first: bool) -> list[Row]:
            lines = tail.old() if first else tail.new()
            return list(fresh.of((stamp, text) for stamp, _, text in lines))

        await follow_files(read, self._tell_line, ended)
        return bool(self.place.stamp)

    # ---- the container's log

    async def _follow_api(self, ended: asyncio.Event) -> bool:
        pause, longest = _PAUSES
        while True:
            begun, over = self._clock(), ended.is_set()
            try:
                await self._from_api(follow=not over, ended=ended)
                if over:
                    return True
            except ApiRefused as e:
                if over and not passes(e):
                    return False
                if e.status not in (400, 404) and not passes(
                    e
                ):  # not started yet, or gone: others notice that
                    return False
            except Exception as e:
                if not passes(e):
                    raise
            if self._clock() - begun > longest:
                pause = _PAUSES[0]
            await until(ended, pause) if not over else await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

    async def _from_api(self, *, follow: bool, ended: asyncio.Event) -> None:
        """Tell what the API has from the place on; a stream that goes on after the end is left."""
        fresh = Fresh(self.place)
        async with self.cluster.connect() as api:
            stream = api.log_lines(
                self.namespace, self.name, self.container, since=self.place.stamp, follow=follow
            )
            over = asyncio.ensure_future(ended.wait())
            try:
                while True:
                    more = asyncio.ensure_future(anext(stream, None))
                    await asyncio.wait(
                        {more, over} if follow else {more}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not more.done():  # ended: the rest is asked for without following
                        more.cancel()
                        return
                    lines = more.result()
                    if lines is None:
                        return
                    rows = [_parted(line) for line in lines]
                    if rows and fresh.lacks(rows[0][0]):
                        self._tell(
                            rows[0][0], "(lines before this one are missing: the kubelet has put them aside)"
                        )
                    await tell_all(fresh.of(rows), self._tell_line)
            finally:
                over.cancel()

    # ---- both

    def _tell_line(self, stamp: str, text: str) -> None:
        self.place = self.place.after(stamp)
        if text:
            self._tell(stamp, text)

    def _to_task(self, stamp: str, text: str) -> None:
        lines_out.info(f"[{self.container}] {text}", timestamp=stamp)


class Fresh:
    """Lets lines through from behind a place on; once one has come, all that follow."""

    def __init__(self, place: Place, *, not_before: str = "") -> None:
        self._stamp, self._count = place
        self._not_before = not_before
        self._passed = False

    def of(self, lines: Iterable[Row]) -> Iterator[Row]:
        """Those of `lines` that are new."""
        for row in lines:
            self._passed = self._passed or self._is_new(row[0])
            if self._passed:
                yield row

    def lacks(self, stamp: str) -> bool:
        """Whether a first line of this time comes from behind the place: the place itself is no longer there."""
        return not self._passed and self._count > 0 and stamp > self._stamp

    def _is_new(self, stamp: str) -> bool:
        if stamp < self._not_before or (self._stamp and stamp < self._stamp):
            return False
        if stamp == self._stamp and self._count:
            self._count -= 1
            return False
        return True


def _parted(line: bytes) -> Row:
    stamp, _, text = line.decode(errors="backslashreplace").partition(" ")
    return stamp, text


def log_of_task(ti: Any) -> Path:
    """The file of a task's log; those of triggerers are beside it, with more to their names."""
    from airflow.configuration import conf
    from airflow.utils.helpers import log_filename_template_renderer

    name = log_filename_template_renderer()(ti=ti, try_number=ti.try_number)
    return Path(conf.get("logging", "base_log_folder")) / name


def earlier_place(folder: Path, name: str) -> Place:
    """How far the task's log in `folder` (files `name` and `name.*`) has been told; Place() when nothing was."""
    places = [_last(row["timestamp"] for row in _told(path)) for path in folder.glob(f"{name}*")]
    return max(places, default=Place())


def earlier_places(folder: Path, name: str, replicas: Iterable[str]) -> dict[str, Place]:
    """As `earlier_place`, of each replica, whose lines begin with `[its name]`.

    One that said nothing in the part of a long log that is read was told what is older than that part.
    """
    stamps: dict[str, list[str]] = {replica: [] for replica in replicas}
    oldest = ""
    for path in folder.glob(f"{name}*"):
        rows = _told(path)
        if rows and path.stat().st_size > _TAIL_BYTES:
            oldest = max(oldest, rows[0]["timestamp"])
        for row in rows:
            replica = str(row.get("event", "")).partition("]")[0].removeprefix("[")
            stamps.get(replica, []).append(row["timestamp"])
    return {replica: _last(found) if found else Place(oldest) for replica, found in stamps.items()}


def _last(stamps: Iterable[str]) -> Place:
    known = list(stamps)
    return Place(max(known), known.count(max(known))) if known else Place()


def _told(path: Path) -> list[Mapping[str, Any]]:
    """The newest lines of a log file that a pod or replica has written."""
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            data = f.read()
    except OSError:
        return []
    return [row for row in map(_row, data.splitlines()) if row.get("logger") == LOGGER]


def _row(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:  # the line that was being written when it was killed
        return {}
    return row if isinstance(row, dict) else {}

"""A role group as one task: the Indexed Job of a large group is made or found again, followed and collected."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from urllib3.exceptions import HTTPError

from trainers.job.failures import Failure, FailureClass
from trainers.job.replica_log import read_logs
from trainyard.cluster import delete_job
from trainyard.indexed_jobs import GroupWatch, all_are_there, end_of, failure_of_job
from trainyard.pods import events_of_pod

if TYPE_CHECKING:
    from pathlib import Path

    from kubernetes.client import BatchV1Api, CoreV1Api, V1Job, V1Pod

__all__ = ["GroupFailed", "GroupJob"]

_TIMEOUT = 30  # seconds a request
_POLL_S = 2.0
_AWAY_S = 600.0  # for so long the API may not answer while pods run
_GONE_S = 120.0
_TAIL = 500


class GroupFailed(Exception):
    """The group has failed; `final` when Kubernetes has tried as often as it may."""

    def __init__(self, failure: Failure, *, final: bool = False) -> None:
        super().__init__(failure.reason)
        self.failure = failure
        self.final = final


class GroupJob:
    """The Indexed Job `name`; `say(text)` tells people. Raises GroupFailed, and ApiException for what is refused."""

    def __init__(
        self,
        api: CoreV1Api,
        name: str,
        namespace: str,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        from kubernetes.client import BatchV1Api

        self.name = name
        self.namespace = namespace
        self._api = api
        self._batch: BatchV1Api = BatchV1Api(api.api_client)
        self._say = say
        self._clock = clock
        self._sleep = sleep

    def ensure(self, manifest: dict[str, Any]) -> None:
        """Make it, or go on with the one that is there and has not ended: that of a worker that was lost."""
        from kubernetes.client.exceptions import ApiException

        deadline = self._clock() + _GONE_S
        while True:
            try:
                self._batch.create_namespaced_job(self.namespace, manifest, _request_timeout=_TIMEOUT)
            except ApiException as e:
                if e.status != 409 or self._clock() > deadline:
                    raise
            else:
                self._say(f"job {self.name} of {manifest['spec']['completions']} pods")
                return
            there = self.read()
            if there is not None and there.metadata.deletion_timestamp is None:
                if end_of(there) is None:
                    self._say(f"job {self.name} is there already")
                    return
                self.delete()
            self._sleep(_POLL_S)

    def read(self) -> V1Job | None:
        """The Job, None when it is gone."""
        from kubernetes.client.exceptions import ApiException

        try:
            return self._batch.read_namespaced_job(self.name, self.namespace, _request_timeout=_TIMEOUT)
        except ApiException as e:
            if e.status != 404:
                raise
            return None

    def pods(self) -> list[V1Pod]:
        """Its pods."""
        selector = f"job-name={self.name}"
        found = self._api.list_namespaced_pod(
            self.namespace, label_selector=selector, _request_timeout=_TIMEOUT
        )
        return list(found.items)

    def delete(self) -> None:
        """Delete it and its pods."""
        delete_job(self._api, self.name, self.namespace)

    # ---- waiting

    def follow(self, folder: Path, replicas: list[str], watch: GroupWatch) -> Iterator[tuple[str, str]]:
        """(replica, line) of what the replicas print into the job's folder, until the Job has ended or is gone."""
        look = _Paced(lambda: self._is_over(watch), self._clock)
        lines = read_logs(folder, replicas, is_over=look, sleep=lambda _: self._sleep(_POLL_S))
        return ((replica, text) for _, replica, text in lines)

    def tail(self, folder: Path, replicas: list[str]) -> Iterator[tuple[str, str]]:
        """(replica, line): the last lines of all."""
        return ((replica, text) for _, replica, text in read_logs(folder, replicas, tail=_TAIL))

    def _is_over(self, watch: GroupWatch) -> bool:
        job = self.read()
        if job is None or end_of(job) is not None:
            return True
        if all_are_there(job):
            return False
        failure = watch.look(job, self.pods())
        for name in watch.lost:
            self._say(f"pod {name} was lost with its node; it is deleted by force")
            self._force(name)
        if failure is not None:
            raise GroupFailed(self.with_events(failure, job))
        return False

    def _force(self, name: str) -> None:
        from kubernetes.client.exceptions import ApiException

        try:
            self._api.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        except ApiException as e:
            if e.status != 404:
                raise

    # ---- the end

    def collect(self) -> None:
        """Return when it is complete, raise GroupFailed when it isn't; it and its pods are deleted."""
        job = self.read()
        if job is None:
            text = f"job {self.name} was deleted before it ended"
            hint = "it is started again; if nobody deleted it, see `kubectl get events`"
            raise GroupFailed(Failure(FailureClass.PREEMPTED, text, code="kubernetes.gone", hint=hint))
        end = end_of(job)
        if end is not None and end[0]:
            self.delete()
            return
        failure = self.with_events(failure_of_job(job, self.pods()), job)
        raise GroupFailed(failure, final=True)

    def with_events(self, failure: Failure, job: V1Job | None = None) -> Failure:
        """The failure with the cluster's warnings of the Job, of pods that could not be made, say."""
        from kubernetes.client.exceptions import ApiException

        job = job or self.read()
        if job is None:
            return failure
        try:
            told = events_of_pod(self._api, job)
        except (ApiException, HTTPError) as e:
            self._say(f"the events of job {self.name} can't be read: {e}")
            return failure
        return dataclasses.replace(failure, events=told)


class _Paced:
    """Asks at most every `_POLL_S` seconds, and goes on through an API server that does not answer for a while."""

    def __init__(self, ask: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._asked = -_POLL_S
        self._away: float | None = None

    def __call__(self) -> bool:
        from kubernetes.client.exceptions import ApiException

        now = self._clock()
        if now - self._asked < _POLL_S:
            return False
        self._asked = now
        try:
            over = self._ask()
        except (ApiException, HTTPError) as e:
            status = getattr(e, "status", None)
            self._away = now if self._away is None else self._away
            if (status is not None and 400 <= status < 500 and status != 429) or now - self._away > _AWAY_S:
                raise
            return False
        self._away = None
        return over

"""Waiting for a pod without a worker slot, and taking up pods that are there already; a part of PodOperator."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.exceptions import AirflowException
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.utils.pod_manager import (
    OnFinishAction,
    OnKillAction,
    PodLaunchFailedException,
    PodLaunchTimeoutException,
    PodManager,
    PodNotFoundException,
)
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from trainers.job import labels
from trainyard.given_up import GIVEN_UP, Lookout, PodGivenUp, PodLost, watched
from trainyard.patience import patiently
from trainyard.pods import pod_from

if TYPE_CHECKING:
    from airflow.sdk import Context
    from kubernetes.client import V1Pod

__all__ = ["PodTimedOut", "WaitingOperator"]

_POLL = 1.0  # seconds between looks at a pod that is to go before the next one comes


class PodTimedOut(AirflowException):
    """The task's execution_timeout has passed while its pod ran."""


class WaitingOperator(KubernetesPodOperator):
    """KubernetesPodOperator whose pod is waited for by `trainyard.triggers.pod`, and adopted rather than doubled."""

    remote_pod: V1Pod | None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._gone = False
        self._watch = Lookout()

    def log_source(self) -> dict[str, str]:
        """Where else the lines are ("job", a folder, and "replica"), and what goes with the run; {} for none."""
        return {}

    def ends_with_pod(self) -> bool:
        """Whether nothing is left to do once the pod has succeeded; a subclass may know."""
        return False

    # ---- giving the slot up

    def convert_config_file_to_dict(self) -> None:
        """Leave the way to the cluster to the connection; a KUBECONFIG of Airflow's own would contradict it."""
        self._config_dict = None
        if self.config_file or not self.kubernetes_conn_id:
            super().convert_config_file_to_dict()

    def invoke_defer_method(self, last_log_time: Any = None, context: Context | None = None) -> None:
        """Wait in the triggerer, through the watch that all pods of a namespace share."""
        # Imported here: a DAG file that is parsed needs no trigger.
        from trainyard.triggers.pod import PodTrigger

        assert self.pod is not None
        ti = context["ti"] if context else None
        deadline = None
        if self.execution_timeout is not None and ti is not None and ti.start_date is not None:
            deadline = ti.start_date.timestamp() + self.execution_timeout.total_seconds()
        trigger = PodTrigger(
            name=self.pod.metadata.name,
            namespace=self.pod.metadata.namespace,
            uid=self.pod.metadata.uid or "",
            container=self.base_container_name,
            cluster=self._way_to_cluster(),
            began=time.time(),
            schedule_timeout=self.schedule_timeout_seconds,
            startup_timeout=self.startup_timeout_seconds,
            deadline=deadline,
            grace=self.termination_grace_period,
            collect=self.on_finish_action == OnFinishAction.DELETE_POD,
            kill=self.on_kill_action != OnKillAction.KEEP_POD,
            finish=self.ends_with_pod(),
            get_logs=self.get_logs,
            **self.log_source(),
        )
        # No timeout of Airflow's: when that passes, nothing of ours runs and the pod would stay. The trigger has it.
        self.defer(trigger=trigger, method_name="trigger_reentry")

    def _way_to_cluster(self) -> dict[str, Any]:
        extras: dict[str, Any] | None = None
        if self.kubernetes_conn_id:
            try:
                extras = dict(BaseHook.get_connection(self.kubernetes_conn_id).extra_dejson)
            except AirflowNotFoundException:
                self.log.info("the triggerer has to know the connection %s itself", self.kubernetes_conn_id)
        self.convert_config_file_to_dict()
        return {
            "connection": self.kubernetes_conn_id,
            "extras": extras,
            "context": self.cluster_context,
            "config": self._config_dict,
            "in_cluster": self.in_cluster,
        }

    def come_back(self, context: Context, event: Mapping[str, Any]) -> None:
        """Do with the pod what its end asks for; raises what that means.

        The event has the pod's last status: one that was collected since has still ended as it did.
        """
        status, message = event["status"], event["message"]
        pod = pod_from(event["pod"]) if event.get("pod") else None
        self.pod = self.remote_pod = pod
        if status == "gone":
            self._gone = True
            raise PodNotFoundException(message)
        if status == "refused":
            from kubernetes.client.exceptions import ApiException

            raise ApiException(status=403, reason=message)
        if status in ("success", "failed") and pod is not None:
            self.cleanup(pod, pod, context=context)
            return
        error: AirflowException
        if status == "given_up":
            error = GIVEN_UP[event["what"]](message)
        elif status == "image":
            error = PodLaunchFailedException(message)
        elif status == "late" and event["what"] != "execution":
            error = PodLaunchTimeoutException(message)
        else:
            error = PodTimedOut(message)
        if pod is not None:
            self.delete_given_up(pod, error)
        raise error

    def delete_given_up(self, pod: V1Pod, error: Exception) -> None:
        """Delete a pod nobody waits for any more; of a lost one the object only, as its node can't say that it ended.

        What stays of it would keep its address: the replica's next pod has the same host name.
        """
        self.log.warning("%s; it is deleted", error)
        self._delete(pod, force=isinstance(error, PodLost))

    def _delete(self, pod: V1Pod, *, force: bool = False) -> None:
        from kubernetes.client.exceptions import ApiException

        grace = 0 if force else self.termination_grace_period
        options = {} if grace is None else {"grace_period_seconds": grace}
        name, namespace = pod.metadata.name, pod.metadata.namespace
        try:
            patiently(lambda: self.client.delete_namespaced_pod(name, namespace, **options))
        except ApiException as e:
            if e.status != 404:
                raise

    # ---- taking up what is there

    def get_or_create_pod(self, pod_request_obj: V1Pod, context: Context) -> V1Pod:
        """The pod of this task's present life: one that runs or has succeeded is taken up, else one is created.

        A worker or scheduler that died has left a pod that does the task's work. One of before somebody cleared the
        task is another matter: it is deleted, and has gone before the next one comes, since that has its address.
        """
        life = str(context["ti"].max_tries)
        meta = pod_request_obj.metadata
        meta.annotations = {**(meta.annotations or {}), labels.ANNOTATION_LIFE: life}
        lookouts: dict[str, Lookout] = {}
        while True:
            pods = self._pods_of_task(meta.namespace, context)
            ours = [pod for pod in pods if _is_of_life(pod, life)]
            if ours:
                ours.sort(key=lambda pod: pod.metadata.creation_timestamp)
                self.log.info("pod %s is there already", ours[-1].metadata.name)
            for pod in pods:
                if pod not in ours[-1:]:
                    self._send_away(pod, lookouts.setdefault(pod.metadata.uid, Lookout()))
            if ours:
                return ours[-1]
            if not pods:
                return self._create(pod_request_obj)
            time.sleep(_POLL)

    def _pods_of_task(self, namespace: str, context: Context) -> list[V1Pod]:
        selector = self._build_find_pod_label_selector(context)
        return list(
            patiently(lambda: self.client.list_namespaced_pod(namespace, label_selector=selector).items)
        )

    def _send_away(self, pod: V1Pod, lookout: Lookout) -> None:
        """Delete a pod that is not to be taken up; by force once its node doesn't end it."""
        if pod.metadata.deletion_timestamp is None:
            self.log.info("pod %s is of an earlier try: it is deleted", pod.metadata.name)
            self._delete(pod)
            return
        try:
            lookout.look(pod)
        except PodGivenUp as e:
            self.delete_given_up(pod, e)

    def _create(self, pod: V1Pod) -> V1Pod:
        """Create it; one that an attempt without an answer has created is that one."""
        from kubernetes.client.exceptions import ApiException

        name, namespace = pod.metadata.name, pod.metadata.namespace
        body = self.client.api_client.sanitize_for_serialization(pod)
        try:
            return patiently(lambda: self.client.create_namespaced_pod(namespace, body))
        except ApiException as e:
            if e.status != 409:
                raise
        return patiently(lambda: self.client.read_namespaced_pod(name, namespace))

    # ---- fewer and more patient requests

    def make_pod_manager(self) -> PodManager:
        """The provider's, whose readings of the pod are looked at, and whose deletions are patient."""
        manager = watched(PodManager(kube_client=self.client, callbacks=self.callbacks), self._watch)
        manager.delete_pod = self._delete  # type: ignore[method-assign]
        return manager

    def is_istio_enabled(self, pod: V1Pod) -> bool:
        """Whether the pod has Istio's sidecar: it says so itself, without being read again."""
        containers = (pod.spec.containers if pod and pod.spec else None) or ()
        return any(container.name == self.ISTIO_CONTAINER_NAME for container in containers)


def _is_of_life(pod: V1Pod, life: str) -> bool:
    """Whether the pod may be taken up: not leaving, not failed, and not of before the task was cleared."""
    phase = pod.status.phase if pod.status else None
    said = (pod.metadata.annotations or {}).get(labels.ANNOTATION_LIFE, life)
    return pod.metadata.deletion_timestamp is None and phase != "Failed" and said == life

"""PodOperator: KubernetesPodOperator that says what a pod's end means, and nothing more.

It adds to the provider's operator: settings from the environment, the termination message as result (no XCom
sidecar), the failure card and retry by failure class, more memory after an OOM. It never writes a pod's spec
or environment into a log.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.exceptions import AirflowException
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.utils.pod_manager import (
    PodLaunchFailedException,
    PodLaunchTimeoutException,
    PodManager,
    PodNotFoundException,
)
from airflow.sdk.exceptions import AirflowNotFoundException
from urllib3.exceptions import HTTPError

from trainers.job import labels
from trainers.job.failures import Failure, FailureClass
from trainers.job.pod_overlay import BASE, check_pod_overlay
from trainers.job.policies import RestartPolicy
from trainers.job.resources import Resources
from trainyard.failing import RETRIES, RETRY_DELAY, RetryByClass, StepFailed, failures_before, report
from trainyard.given_up import NeverStarts, PodLost
from trainyard.operators.waiting import PodTimedOut, WaitingOperator
from trainyard.pod_defaults import container_security, merged_over, overlay_of, pod_security, scratch
from trainyard.pods import (
    GONE_HINT,
    LOST_HINT,
    MISSING_HINT,
    events_of_pod,
    failure_of_api_error,
    failure_of_pod,
    has_ended,
    result_of_pod,
    says_why,
)
from trainyard.run_failed import on_failed_run
from trainyard.settings import CONNECTION, PipelineSettings

if TYPE_CHECKING:
    from airflow.sdk import Context
    from kubernetes.client import V1Pod, V1ResourceRequirements

__all__ = ["PodOperator"]

# The provider asks every 5 s whether a pod has started; on one machine it has in 50 ms.
_CHECK_INTERVAL, _CHECK_INTERVAL_DEFERRED = 0.1, 2
_MEMORY_GROWTH = 1.5  # a restart after OOM gets this much more
_FROM_OUTSIDE = frozenset(
    {FailureClass.CONFIG, FailureClass.INFRA, FailureClass.OOM, FailureClass.PREEMPTED, FailureClass.QUOTA}
)
_STORAGE_VOLUME = "trainyard-storage"
_STAGED = (
    "python",
    "-m",
    "trainers.storage.pod",
)  # before the command of a pod whose storage is an object store
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)
}


class PodOperator(WaitingOperator):
    """A pod of Trainyard's.

    `pod_resources` is a Resources or its `to_dict`; `pod` is laid over the pod, a part of a Pod manifest whose
    container of ours is `base` (`trainers.job.pod_overlay`), or the path of a pod template file; `restart` caps
    the retries by failure class. What KubernetesPodOperator takes besides is passed on. Raises StepFailed, whose
    text is the failure card and whose class decides the retry; the failure is in XCom under "failure".
    """

    template_fields = (*KubernetesPodOperator.template_fields, "subdomain", "pod_resources")
    template_fields_renderers = {"env_vars": "py", "pod_resources": "json"}  # noqa: RUF012 - Airflow's own form
    component = "pod"

    def __init__(
        self,
        *,
        pod_resources: Resources | Mapping[str, Any] | None = None,
        pod: Mapping[str, Any] | str | None = None,
        restart: RestartPolicy | None = None,
        deferrable: bool | None = None,
        startup_timeout_seconds: int = 600,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("kubernetes_conn_id", CONNECTION)
        kwargs.setdefault("retries", RETRIES)
        kwargs.setdefault("retry_delay", RETRY_DELAY)
        kwargs.setdefault("retry_policy", RetryByClass())
        super().__init__(
            startup_timeout_seconds=startup_timeout_seconds,
            deferrable=bool(deferrable),
            log_pod_spec_on_failure=False,
            do_xcom_push=False,
            termination_message_policy="FallbackToLogsOnError",
            automount_service_account_token=False,
            **kwargs,
        )
        self.pod_resources = pod_resources or Resources()
        self.pod_overlay = check_pod_overlay("pod", overlay_of("pod", pod or {}))
        self.restart = restart
        self._deferrable_by_setting = deferrable is None
        if self.has_dag():
            on_failed_run(self.dag)

    # ---- the pod

    def build_pod_request_obj(self, context: Context | None = None, *, dry_run: bool = False) -> V1Pod:
        """The pod: as KubernetesPodOperator builds it, from our settings and without rights it doesn't need."""
        settings = PipelineSettings.from_environment()
        if isinstance(self.pod_resources, Mapping):
            self.pod_resources = Resources.from_dict(self.pod_resources)
        needs = self.pod_resources
        ooms = failures_before(context).get(FailureClass.OOM, 0)
        self.image = self.image or settings.image
        self.namespace = self.namespace or settings.namespace
        self.name = self.name or labels.dns_label(f"{self.dag_id}-{self.task_id}", limit=50)
        self.env_vars = _with_env(self.env_vars, settings.environ)
        self.labels = {
            labels.LABEL_MANAGED_BY: labels.MANAGED_BY,
            labels.LABEL_COMPONENT: self.component,
            labels.LABEL_PIPELINE: labels.dns_label(self.dag_id),
            **self.labels,
        }
        said = self.pod_overlay.get("spec", {})
        self.service_account_name = (
            self.service_account_name or said.get("serviceAccountName") or settings.service_account or None
        )
        self.container_resources = _requirements(needs, _MEMORY_GROWTH**ooms)
        self.node_selector = _node_selector(needs) | dict(self.node_selector)
        self.tolerations = self.tolerations or _tolerations(needs)
        self.security_context = self.security_context or pod_security(said, settings.fs_group)
        base = next((row for row in said.get("containers", ()) if row["name"] == BASE), {})
        self.container_security_context = self.container_security_context or container_security(base)
        self._mount_storage(settings)
        if settings.store and self.component != "pod":
            self._stage_storage()
        if settings.scratch and not any(m.mount_path == settings.scratch for m in self.volume_mounts):
            volume, mount = scratch(settings.scratch)
            self.volumes, self.volume_mounts = [*self.volumes, volume], [*self.volume_mounts, mount]
        if self.pod_overlay:
            # What an author says wins over what we say of the container, and what the provider is told over both.
            self.full_pod_spec = merged_over(self.full_pod_spec, self.pod_overlay)
        return super().build_pod_request_obj(context, dry_run=dry_run)

    def _mount_storage(self, settings: PipelineSettings) -> None:
        from kubernetes.client import (
            V1EmptyDirVolumeSource,
            V1PersistentVolumeClaimVolumeSource,
            V1Volume,
            V1VolumeMount,
        )

        shared = settings.storage_claim or settings.store
        if not shared or any(v.name == _STORAGE_VOLUME for v in self.volumes):
            return
        if settings.store:  # a root of the pod's own, to and from which its process 1 copies
            volume = V1Volume(name=_STORAGE_VOLUME, empty_dir=V1EmptyDirVolumeSource())
        else:
            claim = V1PersistentVolumeClaimVolumeSource(claim_name=settings.storage_claim)
            volume = V1Volume(name=_STORAGE_VOLUME, persistent_volume_claim=claim)
        mount = V1VolumeMount(name=_STORAGE_VOLUME, mount_path=str(settings.storage))
        self.volumes, self.volume_mounts = [*self.volumes, volume], [*self.volume_mounts, mount]

    def _stage_storage(self) -> None:
        """Let our own process 1 bring and send the files of the command."""
        if tuple(self.cmds[: len(_STAGED)]) != _STAGED:
            self.cmds = [*_STAGED, *self.cmds]

    # ---- its run

    def execute(self, context: Context) -> dict[str, Any] | None:
        """Run the pod to its end; its result."""
        if self._deferrable_by_setting:
            self.deferrable = PipelineSettings.from_environment().deferrable
        self.startup_check_interval_seconds = _CHECK_INTERVAL_DEFERRED if self.deferrable else _CHECK_INTERVAL
        return self._explained(context, lambda: super(PodOperator, self).execute(context))

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> dict[str, Any] | None:
        """Come back from the triggerer; the pod's result."""
        return self._explained(context, lambda: self.come_back(context, event))

    @functools.cached_property
    def pod_manager(self) -> PodManager:
        """The provider's, with readings and deletions of ours."""
        return self.make_pod_manager()

    def _explained(self, context: Context, run: Callable[[], Any]) -> dict[str, Any] | None:
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config import ConfigException

        try:
            run()
        except StepFailed:
            raise
        except (AirflowException, ApiException, HTTPError, ConfigException) as e:
            failure = self.explain(e)
            if self.succeeded_after_all():
                self.log.warning("the pod did not end well, but its work was done: %s", failure.reason)
                return None
            failure = _of_missing_volume(self._with_events(failure))
            # What the pod itself said is the whole story; the provider's frames would only bury it.
            cause = None if has_ended(self.remote_pod) else e
            raise report(context, failure, final=self.is_over()) from cause
        # To the provider this meant its sidecar; to Airflow, from here on, that the returned value is kept.
        self.do_xcom_push = True
        return result_of_pod(self.remote_pod or self.pod, self.base_container_name)

    def _with_events(self, failure: Failure) -> Failure:
        """The failure with what the cluster says of the pod, unless the process itself has said why it failed."""
        from kubernetes.client.exceptions import ApiException

        pod = self.remote_pod or self.pod
        if pod is None or failure.failure_class not in _FROM_OUTSIDE:
            return failure
        try:
            return dataclasses.replace(failure, events=events_of_pod(self.client, pod))
        except (ApiException, HTTPError) as e:
            self.log.info("the events of pod %s can't be read: %s", pod.metadata.name, e)
            return failure

    def succeeded_after_all(self) -> bool:
        """Whether the work is done although the pod failed; a subclass may know better."""
        return False

    def is_over(self) -> bool:
        """Whether trying again is pointless whatever the failure's class; a subclass may know."""
        return False

    def explain(self, error: Exception) -> Failure:
        """The failure that an error of the provider or the Kubernetes client means."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config import ConfigException

        if isinstance(error, PodLost):
            return Failure(FailureClass.PREEMPTED, str(error), code="kubernetes.node_lost", hint=LOST_HINT)
        if isinstance(error, NeverStarts):
            return Failure(FailureClass.CONFIG, str(error), code="kubernetes.missing", hint=MISSING_HINT)
        if isinstance(error, PodTimedOut):
            hint = "raise the task's execution_timeout, or find out why its pod takes so long"
            return Failure(FailureClass.STALLED, str(error), code="airflow.timeout", hint=hint)
        if isinstance(error, PodLaunchTimeoutException):
            return self._not_started(str(error).splitlines()[0])
        if isinstance(error, PodLaunchFailedException):
            return Failure(FailureClass.CONFIG, " ".join(str(error).split()), code="kubernetes.image")
        if isinstance(error, (AirflowNotFoundException, ConfigException)):
            return Failure(
                FailureClass.CONFIG,
                f"no way to Kubernetes: {error}",
                code="kubernetes.connection",
                hint=f"set the Airflow connection {self.kubernetes_conn_id}; `trainyard up` does it on one machine",
            )
        if self.remote_pod is not None and (
            self._gone or says_why(self.remote_pod, self.base_container_name)
        ):
            return failure_of_pod(self.remote_pod, self.base_container_name)
        if isinstance(error, PodNotFoundException):
            return Failure(FailureClass.PREEMPTED, str(error), code="kubernetes.gone", hint=GONE_HINT)
        if isinstance(error, ApiException):
            return failure_of_api_error(error)
        if isinstance(error, HTTPError):
            return Failure(
                FailureClass.INFRA,
                f"the Kubernetes API can't be reached: {error}",
                code="kubernetes.unreachable",
                hint="see whether the cluster is up; `trainyard status` shows the process kubelet",
            )
        return Failure(FailureClass.INFRA, str(error), code="kubernetes.unknown")

    def _not_started(self, said: str) -> Failure:
        """The failure of a pod that found no node in time, or did not start there."""
        known = self.remote_pod is not None and says_why(self.remote_pod, self.base_container_name)
        if known:  # the scheduler's or the node's own words
            return dataclasses.replace(
                failure_of_pod(self.remote_pod, self.base_container_name), code="kubernetes.no_room"
            )
        late = "scheduled" in said
        return Failure(
            FailureClass.QUOTA if late else FailureClass.INFRA,
            said,
            code="kubernetes.no_room" if late else "kubernetes.no_start",
        )

    def cleanup(
        self,
        pod: V1Pod,
        remote_pod: V1Pod,
        xcom_result: dict[str, Any] | None = None,
        context: Context | None = None,
    ) -> None:
        """Look once more at a pod that isn't known to have ended, then do as KubernetesPodOperator does."""
        if remote_pod is not None and not has_ended(remote_pod):
            remote_pod = self._read_again(remote_pod)
        self.remote_pod = remote_pod
        if self._watch.error is not None and remote_pod is not None:
            self.delete_given_up(remote_pod, self._watch.error)
            raise self._watch.error
        if self._gone and not self._killed:
            # The provider would try to label and delete it, and log its stack of errors.
            raise PodNotFoundException(f"pod {remote_pod.metadata.name} is gone")
        super().cleanup(pod, remote_pod, xcom_result, context)

    def _read_again(self, pod: V1Pod) -> V1Pod:
        from kubernetes.client.exceptions import ApiException

        try:
            pod = self.client.read_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
        except (ApiException, HTTPError) as e:
            self._gone = getattr(e, "status", None) == 404
            self.log.info("could not read pod %s again: %s", pod.metadata.name, e)
        else:
            self._gone = pod.metadata.deletion_timestamp is not None
        return pod


def _of_missing_volume(failure: Failure) -> Failure:
    """A pod that waits for the ConfigMap or Secret of a volume looks as if it were just slow; its events tell."""
    told = [row for row in failure.events if row.startswith("FailedMount") and "not found" in row]
    if failure.code != "kubernetes.no_start" or not told:
        return failure
    return dataclasses.replace(
        failure,
        failure_class=FailureClass.CONFIG,
        reason=f"{failure.reason} {told[-1]}",
        code="kubernetes.missing",
        hint=MISSING_HINT,
    )


# ---- from our values to the Kubernetes client's


def _with_env(own: Any, passed_on: Mapping[str, str]) -> list[Any]:
    from kubernetes.client import V1EnvVar

    rows = own if isinstance(own, list) else [V1EnvVar(name, value) for name, value in (own or {}).items()]
    known = {row.name for row in rows}
    added = {"PYTHONUNBUFFERED": "1", **passed_on}
    return [*rows, *(V1EnvVar(name, value) for name, value in added.items() if name not in known)]


def _requirements(needs: Resources, growth: float) -> V1ResourceRequirements:
    from kubernetes.client import V1ResourceRequirements

    memory = needs.memory if growth == 1 else f"{_bytes(needs.memory) * growth / 1024**2:.0f}Mi"
    gpus = {needs.gpu_resource: str(needs.gpu)} if needs.gpu else {}
    # No CPU limit: throttling slows the whole gang, sharing what is idle doesn't.
    return V1ResourceRequirements(
        requests={"cpu": f"{needs.cpu:g}", "memory": memory, **gpus}, limits={"memory": memory, **gpus}
    )


def _bytes(quantity: str) -> float:
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert match is not None, quantity  # Resources took it
    return float(match[1]) * _UNITS[match[2]]


def _node_selector(needs: Resources) -> dict[str, str]:
    product = {needs.gpu_label: needs.gpu_type} if needs.gpu_type else {}
    return {**product, **needs.node_selector}


def _tolerations(needs: Resources) -> list[Any]:
    from kubernetes.client import V1Toleration

    fields = {"key", "operator", "value", "effect"}
    return [
        V1Toleration(
            **{name: value for name, value in row.items() if name in fields},
            toleration_seconds=row.get("tolerationSeconds"),
        )
        for row in needs.tolerations
    ]

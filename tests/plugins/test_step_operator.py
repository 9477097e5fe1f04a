"""StepOperator against a process kubelet: real pods, real processes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.exceptions import AirflowException
from airflow.providers.cncf.kubernetes.utils.pod_manager import (
    PodLaunchFailedException,
    PodLaunchTimeoutException,
)
from airflow.sdk.exceptions import TaskDeferred
from kubernetes.client.exceptions import ApiException
from trainyard.failing import RetryByClass, StepFailed
from trainyard.triggers.pod import PodTrigger
from urllib3.exceptions import HTTPError

from trainers.job.spec import Resources


def _names(cluster: Any) -> list[str]:
    return [pod.metadata.name for pod in cluster.core_v1().list_namespaced_pod("trainyard").items]


def test_a_step_returns_its_result_and_leaves_no_pod(
    step: Any, context_of: Any, cluster: Any, pipelines: Path
) -> None:
    operator = step(
        'print("hello from the pod"); return {"sum": spec["a"] + spec["b"], "where": spec["output"], '
        '"storage": os.environ["TRAINYARD_STORAGE"]}',
        {"a": 2, "b": 3, "output": "storage://records/x"},
    )
    began = time.monotonic()
    result = operator.execute(context_of(operator))
    took = time.monotonic() - began
    assert result == {"sum": 5, "where": f"{pipelines}/records/x", "storage": str(pipelines)}
    assert operator.do_xcom_push is True  # so that Airflow keeps it
    assert _names(cluster) == []
    print(f"a step that does nothing: {took:.2f} s from start to end")


def test_the_pods_log_is_in_the_tasks_log(
    step: Any, context_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = step('print("line one"); print("line two"); return {}')
    operator.execute(context_of(operator))
    log = capsys.readouterr().out
    assert "line one" in log
    assert "line two" in log


def test_no_environment_and_no_spec_in_the_log(
    step: Any, context_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = step('raise errors.UserError("no")', {"password": "hunter2"})
    with pytest.raises(StepFailed):
        operator.execute(context_of(operator))
    log = "".join(capsys.readouterr())
    assert "Building pod" in log
    assert "hunter2" not in log
    assert "PYTHONPATH" not in log


@pytest.mark.parametrize(
    ("source", "failure_class", "words", "retried"),
    [
        (
            'raise errors.DataError("all rows are bad", hint="look at them")',
            "DATA",
            "all rows are bad",
            False,
        ),
        ('raise errors.UserError("loss is not a number")', "USER", "loss is not a number", False),
        ('raise errors.ConfigError("no such strategy")', "CONFIG", "no such strategy", False),
        ('return {}["gone"]', "USER", "KeyError: 'gone'", False),
        ('raise errors.InfraError("disk full")', "INFRA", "disk full", True),
        ('raise MemoryError("too big")', "OOM", "too big", True),
        ("os.kill(os.getpid(), 9)", "INFRA", "was ended by SIGKILL", True),
        ("os._exit(3)", "INFRA", "ended with exit code 3", True),
        ("os._exit(88)", "PREEMPTED", "ended with exit code 88", True),
    ],
)
def test_a_failure_is_a_card_and_its_class_decides_the_retry(
    step: Any, context_of: Any, cluster: Any, source: str, failure_class: str, words: str, retried: bool
) -> None:
    operator = step(source)
    context = context_of(operator)
    with pytest.raises(StepFailed) as caught:
        operator.execute(context)
    card = str(caught.value)
    assert card.startswith(f"FAILED {failure_class}"), card
    assert words in card
    assert "what to do:" in card
    assert context["ti"].xcom["failure"]["class"] == failure_class
    decision = RetryByClass().evaluate(caught.value, 1, 10, context)
    assert decision.action.value == ("retry" if retried else "fail"), decision
    assert _names(cluster) == []


def test_the_pods_own_word_stands_alone_in_the_traceback(step: Any, context_of: Any) -> None:
    operator = step('raise errors.DataError("all rows are bad")')
    with pytest.raises(StepFailed) as caught:
        operator.execute(context_of(operator))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_deleted_pod_is_preempted_and_may_run_again(step: Any, context_of: Any, cluster: Any) -> None:
    operator = step('print("up"); time.sleep(60); return {}')
    context = context_of(operator)

    def delete() -> None:
        while not (names := _names(cluster)):
            time.sleep(0.05)
        cluster.wait_phase(names[0], "Running", namespace="trainyard")
        cluster.core_v1().delete_namespaced_pod(names[0], "trainyard", grace_period_seconds=1)

    thread = threading.Thread(target=delete)
    thread.start()
    with pytest.raises(StepFailed, match="was deleted before it ended") as caught:
        operator.execute(context)
    thread.join()
    assert caught.value.failure.failure_class.value == "PREEMPTED"
    decision = RetryByClass().evaluate(caught.value, 1, 10, context)
    assert (decision.action.value, decision.retry_delay.total_seconds()) == ("retry", 5.0)


def test_killing_the_task_deletes_the_pod(step: Any, context_of: Any, cluster: Any) -> None:
    operator = step("time.sleep(60); return {}", termination_grace_period=1)
    context = context_of(operator)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            operator.execute(context)
        except StepFailed as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    while not (names := _names(cluster)):
        time.sleep(0.05)
    cluster.wait_phase(names[0], "Running", namespace="trainyard")
    operator.on_kill()
    cluster.wait_gone(names[0], namespace="trainyard")
    thread.join()


def test_a_pod_over_its_memory_is_oom_and_gets_more_next_time(
    step: Any, context_of: Any, cluster: Any
) -> None:
    source = "block = bytearray(300 << 20); time.sleep(30); return {}"
    operator = step(source, pod_resources=Resources(cpu=0.1, memory="100Mi"))
    context = context_of(operator)
    with pytest.raises(StepFailed, match="OOMKilled") as caught:
        operator.execute(context)
    assert caught.value.failure.failure_class.value == "OOM"
    assert RetryByClass().evaluate(caught.value, 1, 10, context).action.value == "retry"

    again = step(source, pod_resources=Resources(cpu=0.1, memory="100Mi"))
    second = context_of(again, store=context["task_state_store"], try_number=2)
    pod = again.build_pod_request_obj(second, dry_run=True)
    assert pod.spec.containers[0].resources.limits["memory"] == "150Mi"
    with pytest.raises(StepFailed) as caught:
        again.execute(second)
    assert RetryByClass().evaluate(caught.value, 2, 10, second).action.value == "fail"  # once, not twice


def test_a_pod_that_no_node_can_take_waits_and_says_so(step: Any, context_of: Any) -> None:
    operator = step("return {}", pod_resources=Resources(memory="900Ti"), schedule_timeout_seconds=1)
    with pytest.raises(StepFailed) as caught:
        operator.execute(context_of(operator))
    assert caught.value.failure.failure_class.value == "QUOTA"
    assert "Unschedulable: 0/1 nodes are available: 1 Insufficient memory" in str(caught.value)
    card = str(caught.value)
    assert "  events:\n    FailedScheduling: 0/1 nodes are available" in card, (
        "as kubectl describe would show"
    )
    assert "events:" not in _card_of_a_user_error(step, context_of), "the process has said why itself"


def _card_of_a_user_error(step: Any, context_of: Any) -> str:
    operator = step('raise errors.UserError("no such column")')
    with pytest.raises(StepFailed) as caught:
        operator.execute(context_of(operator))
    return str(caught.value)


def test_no_connection_is_a_setting_to_fix(
    step: Any, context_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = step("return {}", kubernetes_conn_id="trainyard_nowhere")
    monkeypatch.setenv(
        "AIRFLOW_CONN_TRAINYARD_NOWHERE",
        '{"conn_type": "kubernetes", "extra": {"kube_config_path": "/nowhere/kubeconfig"}}',
    )
    with pytest.raises(StepFailed, match="no way to Kubernetes") as caught:
        operator.execute(context_of(operator))
    assert caught.value.failure.failure_class.value == "CONFIG"


def test_a_refused_manifest_is_a_setting_to_fix(step: Any, context_of: Any) -> None:
    operator = step("return {}", hostname="Not_A_Name")
    with pytest.raises(StepFailed) as caught:
        operator.execute(context_of(operator))
    assert caught.value.failure.failure_class.value == "CONFIG"
    assert "hostname" in str(caught.value)


def _deferred(operator: Any, context: Any) -> dict[str, Any]:
    """Run until the task gives its slot up, and the trigger until the pod has ended; its event."""
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    assert caught.value.method_name == "trigger_reentry"
    path, kwargs = caught.value.trigger.serialize()
    assert path == "trainyard.triggers.pod.PodTrigger"
    return asyncio.run(event_of(PodTrigger(**json.loads(json.dumps(kwargs)))))


async def event_of(trigger: PodTrigger) -> dict[str, Any]:
    """The one event of a trigger."""
    events = [event.payload async for event in trigger.run()]
    assert len(events) == 1
    return json.loads(json.dumps(events[0]))  # as Airflow keeps it


def test_on_a_cluster_a_task_may_wait_without_a_slot(
    step: Any, context_of: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    operator = step('time.sleep(0.5); return {"a": 1}')
    event = _deferred(operator, context_of(operator))
    again = step('time.sleep(0.5); return {"a": 1}')  # Airflow makes the operator anew
    assert again.trigger_reentry(context_of(again), event) == {"a": 1}
    assert _names(cluster) == []


def test_a_failure_found_after_deferral_is_the_same_card(
    step: Any, context_of: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    source = 'time.sleep(0.5); raise errors.DataError("all rows are bad")'
    operator = step(source)
    event = _deferred(operator, context_of(operator))
    again = step(source)
    with pytest.raises(StepFailed, match="all rows are bad") as caught:
        again.trigger_reentry(context_of(again), event)
    assert caught.value.failure.failure_class.value == "DATA"
    assert _names(cluster) == []


def test_a_pod_that_was_collected_after_its_success_is_a_success(
    step: Any, context_of: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    operator = step('return {"a": 1}')
    event = _deferred(operator, context_of(operator))
    cluster.core_v1().delete_namespaced_pod(event["name"], "trainyard")
    cluster.wait_gone(event["name"], namespace="trainyard")
    again = step("return {}")
    assert again.trigger_reentry(context_of(again), event) == {"a": 1}


def test_a_pod_that_went_away_during_a_deferral_may_run_again(
    step: Any, context_of: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_DEFERRABLE", "true")
    operator = step("time.sleep(600)")
    context = context_of(operator)
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    name = context["ti"].xcom["pod_name"]
    cluster.core_v1().delete_namespaced_pod(name, "trainyard", grace_period_seconds=0)
    cluster.wait_gone(name, namespace="trainyard")
    event = asyncio.run(event_of(caught.value.trigger))
    assert event["status"] == "gone"
    again = step("return {}")
    with pytest.raises(StepFailed) as failed:
        again.trigger_reentry(context_of(again), event)
    assert failed.value.failure.failure_class.value == "PREEMPTED", failed.value


@pytest.mark.parametrize(
    ("error", "failure_class", "words"),
    [
        (HTTPError("connection refused"), "INFRA", "can't be reached"),
        (AirflowException("something new"), "INFRA", "something new"),
        (
            PodLaunchFailedException("Image cannot be pulled:\n no such"),
            "CONFIG",
            "Image cannot be pulled: no",
        ),
        (PodLaunchTimeoutException("Pod took too long to be scheduled"), "QUOTA", "scheduled"),
        (PodLaunchTimeoutException("Pod took too long to start"), "INFRA", "start"),
        (ApiException(status=403, reason="forbidden"), "CONFIG", "forbidden"),
    ],
)
def test_errors_on_the_way_to_a_pod_have_a_class(
    step: Any, error: Exception, failure_class: str, words: str
) -> None:
    failure = step("return {}").explain(error)
    assert failure.failure_class.value == failure_class
    assert words in failure.reason


def test_resources_become_kubernetes_own(step: Any, context_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tolerations = ({"key": "gpu", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 5},)
    needs = Resources(2, "8Gi", 1, "A100", {"pool": "gpu"}, tolerations)
    operator = step("return {}", pod_resources=needs)
    pod = operator.build_pod_request_obj(context_of(operator), dry_run=True)
    container = pod.spec.containers[0]
    assert container.resources.requests == {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"}
    assert container.resources.limits == {"memory": "8Gi", "nvidia.com/gpu": "1"}
    assert pod.spec.node_selector == {"nvidia.com/gpu.product": "A100", "pool": "gpu"}
    assert pod.spec.tolerations[0].toleration_seconds == 5


def test_a_spec_holds_json_values_only(step: Any) -> None:
    operator = step("return {}", {"rows": (row for row in (1, 2))})
    assert json.loads(operator.build_pod_request_obj(dry_run=True).spec.containers[0].args[1]) == {
        "rows": [1, 2]
    }
    with pytest.raises(TypeError, match="JSON values, got object"):
        step("return {}", {"x": object()}).build_pod_request_obj(dry_run=True)

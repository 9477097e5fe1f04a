"""release: from a trained model that passed the gate to a served one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import TaskGroup, task

from trainers.job.spec import Resources
from trainyard.failing import RetryByClass, explained
from trainyard.operators.release import PromoteOperator, RegisterOperator, registry_alias
from trainyard.operators.step import StepOperator
from trainyard.settings import PipelineSettings
from trainyard.trigger_form import Under

if TYPE_CHECKING:
    from airflow.sdk.definitions.xcom_arg import XComArg

__all__ = ["release"]

_RETRIES = 3


@task(task_id="publish", retries=_RETRIES, retry_policy=RetryByClass())
@explained
def _publish(name: str, exported: dict[str, Any], registered: dict[str, Any]) -> dict[str, Any]:
    from serving.release.steps import publish_step

    settings = PipelineSettings.from_environment()
    result = publish_step(settings.storage, name, exported["export"], registered.get("model_version"))
    print(f"{name}: version {result['version']} is at {result['path']}, {result['bytes']} bytes")
    return result


@task(task_id="deploy", retries=_RETRIES, retry_policy=RetryByClass())
@explained
def _deploy(published: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    from serving.release.steps import deploy_step

    settings = PipelineSettings.from_environment()
    servers, config = settings.serving()
    result = deploy_step(
        settings.storage,
        published["name"],
        published["version"],
        servers,
        config,
        deadline_s,
        alias=registry_alias(settings),
    )
    print(f"{published['name']}: version {published['version']} is loaded on {', '.join(servers)}")
    return result


@task(task_id="verify", retries=_RETRIES, retry_policy=RetryByClass())
@explained
def _verify(published: dict[str, Any]) -> dict[str, Any]:
    from serving.release.steps import verify_step

    settings = PipelineSettings.from_environment()
    servers, config = settings.serving()
    return verify_step(settings.storage, published["name"], published["version"], servers, config)


def release(
    trained: XComArg,
    records: Any,
    evaluation: XComArg,
    verdict: XComArg,
    *,
    name: str,
    deadline_s: float = 120.0,
    resources: Resources | None = None,
    group_id: str = "release",
) -> XComArg:
    """Release a model as a task group: export, register, publish, deploy, verify, promote.

    Takes what `train`, `prepare`, `evaluate` and `gate` returned; `name` is the model's. Returns {"name",
    "version", "previous", ...}. Each task may run again without harm; what fails before `promote` leaves the
    champion serving. `deadline_s` is how long the servers may take to load the version.
    """
    manifest = records if isinstance(records, str) else records["manifest"]
    with TaskGroup(group_id):
        export = StepOperator(
            task_id="export",
            module="trainers.export",
            spec={"job": trained["job"], "manifest": manifest, "output": Under(trained["job"], "export")},
            pod_resources=resources,
        )
        verdict >> export
        register = RegisterOperator(
            task_id="register",
            module="trainers.register",
            spec={
                "job": trained["job"],
                "export": export.output["export"],
                "name": name,
                "evaluation": evaluation["evaluation"],
                "manifest": manifest,
            },
            pod_resources=resources,
        )
        published = _publish(name, export.output, register.output)
        deployed = _deploy(published, deadline_s)
        verified = _verify(published)
        promote = PromoteOperator(task_id="promote", release=published, decision=verdict, retries=_RETRIES)
        deployed >> verified >> promote
    return promote.output

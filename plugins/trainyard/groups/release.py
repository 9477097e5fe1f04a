"""release: from a trained model that passed the gate to a served one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import TaskGroup, task

from trainers.job.spec import Resources
from trainyard.failing import RetryByClass, explained
from trainyard.groups.steps import for_pods
from trainyard.operators.canary import CanarySensor
from trainyard.operators.release import (
    PromoteOperator,
    RegisterOperator,
    registry_alias,
    registry_aliases,
    store_config,
)
from trainyard.operators.step import StepOperator
from trainyard.settings import PipelineSettings
from trainyard.shared_files import bring
from trainyard.trigger_form import FromForm, Under

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk.definitions.xcom_arg import XComArg

    from serving.release.canary import Canary

__all__ = ["release"]

_RETRIES = 3


@task(task_id="publish", retries=_RETRIES, retry_policy=RetryByClass())
@explained
def _publish(name: str, exported: dict[str, Any], registered: dict[str, Any]) -> dict[str, Any]:
    from serving.release.steps import publish_step

    settings = PipelineSettings.from_environment()
    bring(exported["export"])
    result = publish_step(settings.storage, name, exported["export"], registered.get("model_version"))
    if settings.model_store:
        from serving.release.mirror import mirror_version

        mirror_version(settings.storage, name, result["version"], settings.model_store)
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
        **({"base_path": settings.model_base} if settings.model_base else {}),
    )
    store_config(settings)
    print(f"{published['name']}: version {published['version']} is loaded on {', '.join(servers)}")
    return result


@task(task_id="verify", retries=_RETRIES, retry_policy=RetryByClass())
@explained
def _verify(published: dict[str, Any]) -> dict[str, Any]:
    from serving.release.steps import verify_step

    settings = PipelineSettings.from_environment()
    servers, config = settings.serving()
    return verify_step(settings.storage, published["name"], published["version"], servers, config)


@task(task_id="prune", retries=_RETRIES, retry_policy=RetryByClass())
@explained
def _prune(name: str, keep: int) -> dict[str, Any]:
    from serving.release.steps import prune_step

    settings = PipelineSettings.from_environment()
    servers, config = settings.serving()
    result = prune_step(
        settings.storage, name, keep, config, servers=servers, aliases=registry_aliases(settings)
    )
    store_config(settings)
    if settings.model_store:
        from serving.release.mirror import remove_versions

        remove_versions(name, result["removed"], settings.model_store)
    print(f"{name}: versions {result['removed'] or 'none'} are removed, held are {result['held'] or 'none'}")
    for warning in result["warnings"]:
        print(f"warning: {warning}")
    return result


def release(
    trained: XComArg,
    records: Any,
    evaluation: XComArg,
    verdict: XComArg,
    *,
    name: str,
    deadline_s: float = 120.0,
    resources: Resources | None = None,
    pod: Mapping[str, Any] | str | None = None,
    group_id: str = "release",
    canary: Canary | None = None,
    keep: int | None = None,
) -> XComArg:
    """Release a model as a task group: export, register, publish, deploy, verify, promote, prune.

    Takes what `train`, `prepare`, `evaluate` and `gate` returned; `name` is the model's. Returns {"name",
    "version", "previous", ...}. Each task may run again without harm; what fails before `promote` leaves the
    champion serving. `deadline_s` is how long the servers may take to load the version.
    `canary` tries it on a share of the requests before `promote`, and takes it back by itself
    (`trainyard.Canary`). `keep` is how many versions stay; without it the form says. `resources` and `pod` are for
    the pods of export and register, as of `prepare`.
    """
    manifest = records if isinstance(records, str) else records["manifest"]
    with TaskGroup(group_id):
        export = StepOperator(
            task_id="export",
            module="trainers.export",
            spec={"job": trained["job"], "manifest": manifest, "output": Under(trained["job"], "export")},
            **for_pods(resources, pod),
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
            **for_pods(resources, pod),
        )
        published = _publish(name, export.output, register.output)
        deployed = _deploy(published, deadline_s)
        verified = _verify(published)
        promote = PromoteOperator(task_id="promote", release=published, decision=verdict, retries=_RETRIES)
        deployed >> verified
        if canary is None:
            verified >> promote
        else:
            watch = CanarySensor(task_id="canary", release=published, canary=canary, retries=_RETRIES)
            promote.canary = watch.output
            verified >> watch >> promote
        promote >> _prune(name, FromForm("keep_versions") if keep is None else keep)
    return promote.output

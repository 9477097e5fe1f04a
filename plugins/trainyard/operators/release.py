"""The tasks of a release that have a link: register and promote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from trainyard.failing import RetryByClass, cards
from trainyard.links import MlflowRunLink, ModelLink
from trainyard.operators.step import StepOperator
from trainyard.registered import aliases_of
from trainyard.settings import PipelineSettings
from trainyard.tracking import model_url, run_url, set_alias

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["PromoteOperator", "RegisterOperator", "registry_alias", "registry_aliases", "store_config"]


class RegisterOperator(StepOperator):
    """Register an export as a version of a model in MLflow; a StepOperator with links."""

    operator_extra_links = (MlflowRunLink(), ModelLink())

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mlflow_run_url = ""
        self.model_url = ""

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the step; its result."""
        self.mlflow_run_url = run_url(self.spec["job"])
        return self._linked(super().execute(context))

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Come back from the triggerer; the step's result."""
        self.mlflow_run_url = run_url(self.spec["job"])
        return self._linked(super().trigger_reentry(context, event))

    def _linked(self, result: dict[str, Any]) -> dict[str, Any]:
        version = result.get("model_version")
        if version is not None:
            self.model_url = model_url(PipelineSettings.from_environment().mlflow, self.spec["name"], version)
        return result


def registry_alias(settings: PipelineSettings) -> Any:
    """The callable by which a release moves a registry's alias, or None without a registry."""
    if not settings.mlflow:
        return None
    return lambda name, alias, version: set_alias(settings.mlflow, name, alias, version)


def registry_aliases(settings: PipelineSettings) -> Any:
    """The callable that gives a model's aliases, or None without a registry; OSError where it does not answer."""
    if not settings.mlflow.startswith(("http://", "https://")):
        return None

    def aliases(name: str) -> dict[str, str]:
        found = aliases_of(settings.mlflow, name)
        if found is None:
            raise OSError(f"mlflow does not say which aliases {name} has")
        return found

    return aliases


def store_config(settings: PipelineSettings) -> None:
    """Copy the servers' config to the object store, where new replicas find it, if there is one."""
    if settings.model_store:
        from serving.release.mirror import mirror_file

        mirror_file(settings.model_config, f"{settings.model_store}/models.config")


class PromoteOperator(BaseOperator):
    """Make a verified version the champion, with the gate's verdict in the promotion log."""

    template_fields = ("release", "decision", "canary")
    operator_extra_links = (ModelLink(),)

    def __init__(self, *, release: Any, decision: Any, canary: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("retry_policy", RetryByClass())
        super().__init__(**kwargs)
        self.release = release
        self.decision = decision
        self.canary = canary
        self.model_url = ""

    def execute(self, context: Context) -> dict[str, Any]:
        """Promote; {"name", "version", "previous", "labels", "promoted", "warnings"}."""
        with cards(context):
            return self._promote(context)

    def _promote(self, context: Context) -> dict[str, Any]:
        from serving.release.steps import promote_step

        settings = PipelineSettings.from_environment()
        servers, config = settings.serving()
        name, registered = self.release["name"], self.release["mlflow_version"]
        if registered is not None:
            self.model_url = model_url(settings.mlflow, name, registered)
        user = getattr(context["dag_run"], "triggering_user_name", None)
        result = promote_step(
            settings.storage,
            name,
            self.release["version"],
            servers,
            config,
            by=f"{user or 'schedule'}, {self.dag_id} {context['run_id']}",
            why="; ".join(self.decision["reasons"]),
            gate=self.decision,
            mlflow_version=registered,
            alias=registry_alias(settings),
            **({"canary": self.canary} if self.canary else {}),
        )
        store_config(settings)
        print(f"{name}: version {result['version']} is the champion, before it was {result['previous']}")
        return result

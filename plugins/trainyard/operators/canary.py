"""CanarySensor: a deployed version on a share of the traffic, promoted or taken back by what it showed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue

from serving.errors import CanaryFailed
from serving.release.canary import Canary
from trainyard.failing import RetryByClass, cards
from trainyard.settings import PipelineSettings

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["CanarySensor"]

_LONGEST_POKE_S = 60.0


class CanarySensor(BaseSensorOperator):
    """Look at a canary now and then, holding no slot between two looks, until it is decided.

    Its result is the verdict, for the promotion log. A canary that is taken back fails the task for good, after
    the servers have their config before again. The form's fields `canary_share` (0: none), `canary_minutes` and
    `canary_min_requests` go before what `canary` says, where the form has them.
    """

    template_fields = ("release",)
    ui_color = "#fff2cc"

    def __init__(self, *, release: Any, canary: Canary, **kwargs: Any) -> None:
        kwargs.setdefault("retry_policy", RetryByClass())
        kwargs.setdefault("mode", "reschedule")
        kwargs.setdefault("poke_interval", max(1.0, min(_LONGEST_POKE_S, canary.duration_s / 10)))
        # Not what ends a watch (that is the canary's own patience), but what ends a watcher gone wrong.
        kwargs.setdefault("timeout", 7 * 24 * 3600)
        super().__init__(**kwargs)
        self.release = release
        self.canary = canary

    def poke(self, context: Context) -> PokeReturnValue | bool:
        """Look once."""
        with cards(context):
            result = self._look(context)
            print(f"canary {result['outcome']}, {result['decision']}: {'; '.join(result['reasons'])}")
            if result["decision"] == "rollback":
                raise CanaryFailed(
                    f"version {self.release['version']} of {self.release['name']} was taken back, its canary says "
                    f"{result['outcome']}: {'; '.join(result['reasons'])}",
                    hint="the champion serves on; the numbers are in the promotion log",
                )
        return PokeReturnValue(is_done=result["decision"] == "promote", xcom_value=result)

    def _look(self, context: Context) -> dict[str, Any]:
        from serving.release.steps import canary_step

        values = context["params"]
        changes = {
            "share": values.get("canary_share"),
            "duration_s": None if values.get("canary_minutes") is None else values["canary_minutes"] * 60,
            "min_requests": values.get("canary_min_requests"),
        }
        if changes["share"] == 0:
            return {"outcome": "none", "decision": "promote", "reasons": ["the form asks for no canary"]}
        settings = PipelineSettings.from_environment()
        servers, config = settings.serving()
        return canary_step(
            settings.storage,
            self.release["name"],
            self.release["version"],
            servers,
            config,
            dataclasses.replace(self.canary, **{k: v for k, v in changes.items() if v is not None}),
            by=f"canary, {self.dag_id} {context['run_id']}",
            metrics=settings.model_metrics,
            canary_metrics=settings.model_canary_metrics,
        )

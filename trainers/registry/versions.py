"""A run's metrics, dataset and artifacts, and a model's version: each logged once, however often it is tried.

What was logged is found again by its digest, and values keep the time of their making, so that a second call
writes the same rows. A version's artifacts are uploaded before the version is made: there is none without.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

    from trainers.records.manifest import Manifest

__all__ = ["CHALLENGER", "CHAMPION", "Registration"]

CHALLENGER, CHAMPION = "challenger", "champion"
_EXPORT_DIGEST = "trainyard.export_digest"
_DIGEST_LENGTH = 36  # MLflow holds no more of a dataset's digest


@dataclasses.dataclass(frozen=True)
class Registration:
    """What is to be registered: the export folder and its manifest, the evaluation, the records, the run."""

    name: str
    job: Path
    folder: Path
    export: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    records: Manifest | None
    run_id: str

    @property
    def tags(self) -> dict[str, str]:
        """What a version says of its origin."""
        tags = {
            _EXPORT_DIGEST: self.export["digest"],
            "trainyard.records_digest": self.export["records_digest"],
            "trainyard.job": str(self.export["job"]),
            "trainyard.run": str(self.export["run_id"]),
            "trainyard.trainer": self.export["trainer"],
            "trainyard.code_version": self.export["code_version"],
        }
        return {key: str(value) for key, value in tags.items()}

    def register(self, client: MlflowClient) -> ModelVersion:
        """The version of this export, made unless it is there; it is the challenger until it is champion."""
        version = self._find(client) or self._create(client)
        aliases = client.get_registered_model(self.name).aliases
        if str(aliases.get(CHAMPION)) != str(version.version):
            client.set_registered_model_alias(self.name, CHALLENGER, version.version)
        return version

    def _find(self, client: MlflowClient) -> ModelVersion | None:
        query = f"name = '{self.name}' and tag.`{_EXPORT_DIGEST}` = '{self.export['digest']}'"
        ready = [v for v in client.search_model_versions(query) if v.status == "READY"]
        return max(ready, key=lambda v: int(v.version), default=None)

    def _create(self, client: MlflowClient) -> ModelVersion:
        from mlflow.exceptions import MlflowException

        model_id = self._logged_model(client)
        self._log_to_run(client, model_id)
        try:
            client.create_registered_model(self.name)
        except MlflowException as e:
            if e.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return client.create_model_version(
            self.name,
            source=f"models:/{model_id}",
            run_id=self.run_id,
            tags=self.tags,
            description=self._words(),
            await_creation_for=10,
            model_id=model_id,
        )

    def _logged_model(self, client: MlflowClient) -> str:
        """The id of the logged model that holds the export's files."""
        experiment = client.get_run(self.run_id).info.experiment_id
        query = f"tags.`{_EXPORT_DIGEST}` = '{self.export['digest']}'"
        for model in client.search_logged_models([experiment], filter_string=query):
            if model.source_run_id != self.run_id:
                continue  # equal bytes, but the lineage of another run
            if str(model.status) == "READY":
                return str(model.model_id)
            client.delete_logged_model(model.model_id)  # an upload that was cut short
        model = client.create_logged_model(
            experiment, self.name, self.run_id, tags=self.tags, model_type="savedmodel"
        )
        client.log_model_artifacts(model.model_id, str(self.folder))
        client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _log_to_run(self, client: MlflowClient, model_id: str) -> None:
        from mlflow import entities

        step = int(self.export.get("step") or 0)
        known = client.get_run(self.run_id).outputs
        if model_id not in [model.model_id for model in (known.model_outputs if known else ())]:
            client.log_outputs(
                self.run_id, [entities.LoggedModelOutput(model_id, step)]
            )  # a second time fails
        dataset = None
        if self.records is not None:
            dataset = entities.Dataset(
                name=self.records.name,
                digest=self.records.digest[:_DIGEST_LENGTH],
                source_type="local",
                source=json.dumps({"uri": str(self.records.path), "raw": list(self.records.sources)}),
                schema=None,
                profile=json.dumps({"num_rows": sum(self.records.counts.values()), **self.records.counts}),
            )
            context = [entities.InputTag("mlflow.data.context", "training")]
            client.log_inputs(self.run_id, [entities.DatasetInput(dataset, context)])
            client.log_artifact(self.run_id, str(self.records.path))
        if self.evaluation is not None:
            at = int(self.evaluation["created"] * 1000)
            metrics = [
                entities.Metric(
                    f"eval_{key}",
                    value,
                    at,
                    step,
                    model_id=model_id,
                    dataset_name=dataset and dataset.name,
                    dataset_digest=dataset and dataset.digest,
                )
                for key, value in self.evaluation["metrics"].items()
                if value is not None
            ]
            client.log_batch(self.run_id, metrics=metrics)
            client.log_artifact(self.run_id, str(self.job / "evaluation.json"))

    def _words(self) -> str:
        metrics = (self.evaluation or {}).get("metrics", {})
        said = ", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if v is not None)
        return f"{self.export['trainer']} at step {self.export.get('step')}" + (f": {said}" if said else "")

"""A run's metrics, dataset and artifacts, and a model's version: each logged once, however often it is tried.

What was logged is found again by its digest, and values keep the time of their making, so that a second call
writes the same rows. A version's artifacts are uploaded before the version is made: there is none without.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.registry.card import write_card
from trainers.registry.datasets import dataset_inputs
from trainers.registry.uploads import upload

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

    from trainers.records.manifest import Manifest

__all__ = ["CHALLENGER", "CHAMPION", "Registration"]

CHALLENGER, CHAMPION = "challenger", "champion"
_EXPORT_DIGEST = "trainyard.export_digest"


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
            "trainyard.git_commit": (self.export.get("code") or {}).get("commit") or "unknown",
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
        job = (self.export.get("lineage") or {}).get("job") or {}
        model = client.create_logged_model(
            experiment,
            self.name,
            self.run_id,
            tags=self.tags,
            params={key: str(value)[:500] for key, value in (job.get("args") or {}).items()},
            model_type="savedmodel",
        )
        self._upload_model(client, str(model.model_id), str(model.artifact_location))
        client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _upload_model(self, client: MlflowClient, model_id: str, location: str) -> None:
        """The export as it is, and the files that make it a model of MLflow's."""
        with tempfile.TemporaryDirectory(prefix="trainyard-card-") as folder:
            card = Path(folder)
            ids = {"run_id": self.run_id, "model_id": model_id, "location": location}
            write_card(card, self.folder, self.export, ids)
            for files in (self.folder, card):
                call = functools.partial(client.log_model_artifacts, model_id, str(files))
                upload(location, files, call)

    def _log_to_run(self, client: MlflowClient, model_id: str) -> None:
        from mlflow import entities

        step = int(self.export.get("step") or 0)
        run = client.get_run(self.run_id)
        known = run.outputs
        if model_id not in [model.model_id for model in (known.model_outputs if known else ())]:
            client.log_outputs(
                self.run_id, [entities.LoggedModelOutput(model_id, step)]
            )  # a second time fails
        inputs = {} if self.records is None else dataset_inputs(self.records)
        if self.records is not None:
            client.log_inputs(self.run_id, list(inputs.values()))
            self._log_file(client, run.info.artifact_uri, Path(str(self.records.path)))
        self._log_metrics(client, model_id, step, inputs.get("evaluation") or inputs.get("training"))
        if self.evaluation is not None:
            self._log_file(client, run.info.artifact_uri, self.job / "evaluation.json")
        for path in sorted((self.job / "evaluation").rglob("*")):
            if path.is_file():  # reports and pictures
                into = path.parent.relative_to(self.job).as_posix()
                self._log_file(client, run.info.artifact_uri, path, into)

    def _log_file(self, client: MlflowClient, location: str, path: Path, into: str = "") -> None:
        call = functools.partial(client.log_artifact, self.run_id, str(path), into or None)
        upload(location, path, call, into=into)

    def _log_metrics(self, client: MlflowClient, model_id: str, step: int, evaluated: Any) -> None:
        """The evaluation's metrics, of the dataset that they are of; the export's size and time to load."""
        from mlflow.entities import Metric

        dataset = evaluated.dataset if evaluated is not None else None
        of = {"dataset_name": dataset.name, "dataset_digest": dataset.digest} if dataset is not None else {}
        metrics = []
        if self.evaluation is not None:
            at = int(self.evaluation["created"] * 1000)
            metrics = [
                Metric(f"eval_{key}", value, at, step, model_id=model_id, **of)
                for key, value in self.evaluation["metrics"].items()
                if value is not None
            ]
        at = int(float(self.export.get("created") or 0) * 1000)
        metrics += [
            Metric(f"export_{key}", float(self.export[key]), at, step, model_id=model_id)
            for key in ("bytes", "load_s", "first_answer_s")
            if self.export.get(key) is not None
        ]
        client.log_batch(self.run_id, metrics=metrics)

    def _words(self) -> str:
        metrics = (self.evaluation or {}).get("metrics", {})
        said = ", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if v is not None)
        return f"{self.export['trainer']} at step {self.export.get('step')}" + (f": {said}" if said else "")

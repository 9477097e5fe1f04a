"""Links from a task to what it made: its MLflow run, its registered model, the reports of its records and evaluation.

Airflow reads a link from XCom. A running task shows one too, because the operators push it when they start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

__all__ = [
    "LINKS",
    "DriftReportLink",
    "EvaluationReportLink",
    "MlflowRunLink",
    "ModelLink",
    "RecordsReportLink",
]


class _UrlLink(BaseOperatorLink):
    """A link whose URL the operator knows, in the attribute `attribute`, once it has run; kept as the XCom `key`."""

    attribute = ""
    key = ""

    @property
    def xcom_key(self) -> str:
        """Where the URL is kept."""
        return self.key

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The URL, "" when there is none: the page then shows no button."""
        return getattr(operator, self.attribute, "")


class MlflowRunLink(_UrlLink):
    """The MLflow run of a training job."""

    name = "MLflow run"
    attribute = "mlflow_run_url"
    key = "trainyard_mlflow_run"


class ModelLink(_UrlLink):
    """The version of a model in MLflow's registry."""

    name = "Model"
    attribute = "model_url"
    key = "trainyard_model"


class RecordsReportLink(_UrlLink):
    """The report of a dataset of records: its statistics and what was refused."""

    name = "Records report"
    attribute = "report_url"
    key = "trainyard_records_report"


class EvaluationReportLink(_UrlLink):
    """The report of an evaluation: metrics, slices and plots beside the champion's."""

    name = "Evaluation report"
    attribute = "report_url"
    key = "trainyard_evaluation_report"


class DriftReportLink(_UrlLink):
    """The report of what a model was asked, beside what it was trained on."""

    name = "Drift report"
    attribute = "report_url"
    key = "trainyard_drift_report"


LINKS = (MlflowRunLink(), ModelLink(), RecordsReportLink(), EvaluationReportLink(), DriftReportLink())

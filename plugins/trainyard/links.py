"""Links from a task to what it made: its MLflow run, its registered model, the report of its records.

Airflow reads a link from XCom. A running task shows one too, because the operators push it when they start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

__all__ = ["LINKS", "MlflowRunLink", "ModelLink", "RecordsReportLink"]


class _UrlLink(BaseOperatorLink):
    """A link whose URL the operator knows, in the attribute `attribute`, once it has run."""

    attribute = ""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The URL, "" when there is none: the page then shows no button."""
        return getattr(operator, self.attribute, "")


class MlflowRunLink(_UrlLink):
    """The MLflow run of a training job."""

    name = "MLflow run"
    attribute = "mlflow_run_url"

    @property
    def xcom_key(self) -> str:
        """Where the URL is kept."""
        return "trainyard_mlflow_run"


class ModelLink(_UrlLink):
    """The version of a model in MLflow's registry."""

    name = "Model"
    attribute = "model_url"

    @property
    def xcom_key(self) -> str:
        """Where the URL is kept."""
        return "trainyard_model"


class RecordsReportLink(_UrlLink):
    """The report of a dataset of records: its statistics and what was refused."""

    name = "Records report"
    attribute = "report_url"

    @property
    def xcom_key(self) -> str:
        """Where the URL is kept."""
        return "trainyard_records_report"


LINKS = (MlflowRunLink(), ModelLink(), RecordsReportLink())

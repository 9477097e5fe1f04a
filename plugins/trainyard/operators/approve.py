"""ApproveOperator: a person says whether a model that passed the gate is released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.branch import BranchMixIn
from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import Param

from trainyard.comparison import comparison
from trainyard.evaluation_page import report_url
from trainyard.links import EvaluationReportLink
from trainyard.operators.gate import evaluation_document, keep_verdict

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["APPROVE", "REJECT", "ApproveOperator"]

APPROVE, REJECT = "Approve", "Reject"


class ApproveOperator(HITLOperator, BranchMixIn):
    """Wait for a person's answer and follow one branch: everything downstream when approved, else `not_released`.

    The task's page shows the verdict and the comparison with the champion. It waits without a slot; nobody's answer
    within `timeout` is a rejection. `wanted` may come from the form: without it, the task goes on at once.
    `approvers` are the ids of the users who may answer; without them, everybody may who may edit the run.
    """

    inherits_from_skipmixin = True
    # Not subject and body: names of the data are in them, and no templates.
    template_fields = ("decision", "evaluation", "wanted")
    operator_extra_links = (EvaluationReportLink(),)
    ui_color = "#ffe0e0"

    def __init__(
        self,
        *,
        decision: Any,
        evaluation: Any,
        not_released: str,
        wanted: Any = True,
        timeout: timedelta = timedelta(hours=24),
        approvers: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        comment = Param(
            "", type=["string", "null"], maxLength=500, title="Comment", description="For the promotion log."
        )
        # Airflow fails a task whose answer comes before its scheduler has noted that it waits; it is asked again.
        kwargs.setdefault("retries", 2)
        kwargs.setdefault("retry_delay", timedelta(seconds=5))
        # Airflow hands the DAG's to every operator: they are no question here.
        kwargs.pop("params", None)
        super().__init__(
            subject="Release this model?",
            options=[APPROVE, REJECT],
            defaults=[REJECT],
            response_timeout=timeout,
            params={"comment": comment},
            assigned_users=[{"id": user, "name": user} for user in approvers] or None,
            **kwargs,
        )
        self.decision = decision
        self.evaluation = evaluation
        self.not_released = not_released
        self.wanted = wanted
        self.report_url = ""

    def execute(self, context: Context) -> Any:
        """Ask, and leave until there is an answer; the verdict when nobody has to be asked."""
        self._link()
        if not self.wanted:
            print("nobody has to approve: the form does not ask for it")
            return self._follow(context, self.decision, released=True)
        self.subject = f"Release the model of {context['ti'].dag_id}, {context['run_id']}?"
        self.body = comparison(self.decision, evaluation_document(self.evaluation), self.report_url)
        return super().execute(context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Take the answer; the verdict with it."""
        from serving.release.verdict import Approval, Verdict, decided

        self._link()
        answer = super().execute_complete(context, event)
        user = answer.get("responded_by_user")
        approval = Approval(
            "approve" if answer["chosen_options"] == [APPROVE] else "reject",
            by=_name(user),
            when=answer["responded_at"].isoformat(),
            comment=str((answer.get("params_input") or {}).get("comment") or "").strip()[:500],
            timed_out=bool(event.get("timedout")) or not user,
        )
        verdict = decided(Verdict.from_json(self.decision), approval)
        print(approval.words())
        document = verdict.to_json()
        keep_verdict(self.evaluation, document, context)
        return self._follow(context, document, released=verdict.deployable)

    def _follow(self, context: Context, decision: Mapping[str, Any], *, released: bool) -> dict[str, Any]:
        chosen = sorted(self.downstream_task_ids - {self.not_released}) if released else [self.not_released]
        # Skipping tasks is an exception to Airflow: what would be returned is not kept then.
        context["ti"].xcom_push(key="return_value", value=dict(decision))
        self.do_branch(context, chosen)
        return dict(decision)

    def _link(self) -> None:
        self.report_url = report_url(self.evaluation.get("report"))


def _name(user: Any) -> str:
    """A user as the promotion log calls them."""
    if not user:
        return ""
    given = (
        user
        if isinstance(user, Mapping)
        else {"id": getattr(user, "id", ""), "name": getattr(user, "name", "")}
    )
    name, known = str(given.get("name") or ""), str(given.get("id") or "")
    return name if name == known or not known else (f"{name} ({known})" if name else known)

"""How a failure shows in Airflow: one error that carries the failure card, and a retry by its class.

StepFailed     raised by operators; its text is the card, `.failure` the value
explained      turns the errors of trainers and serving into StepFailed, in plain tasks
RetryByClass   the retry policy of all our tasks
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.exceptions import AirflowException
from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy

from trainers.job.failures import Failure, FailureClass
from trainers.job.policies import RestartPolicy

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = [
    "FAILURE_KEY",
    "RETRIES",
    "RETRY_DELAY",
    "RetryByClass",
    "StepFailed",
    "cards",
    "explained",
    "failure_in",
    "failures_before",
    "most_telling",
    "report",
]

FAILURE_KEY = "failure"
"""The XCom that holds a failed task's failure."""

_COUNTS_KEY = "trainyard_failures"
# Airflow's own cap, over all classes; the class decides before that.
RETRIES = 10
RETRY_DELAY = dt.timedelta(seconds=2)

# Of several replicas' failures, the one that says most: a cause before what followed from it.
_TELLING = (
    FailureClass.USER,
    FailureClass.DATA,
    FailureClass.CONFIG,
    FailureClass.OOM,
    FailureClass.QUOTA,
    FailureClass.STALLED,
    FailureClass.INFRA,
    FailureClass.PREEMPTED,
    FailureClass.PEER_LOST,
)

_DELAYS: Mapping[FailureClass, dt.timedelta] = {
    FailureClass.QUOTA: dt.timedelta(seconds=60),  # room is made by others, in minutes
    FailureClass.PREEMPTED: dt.timedelta(seconds=5),  # the next node is there, or soon will be
}
_LONGEST_DELAY = dt.timedelta(minutes=2)

Function = TypeVar("Function", bound=Callable[..., Any])


class StepFailed(AirflowException):
    """A step or replica failed; the text is the failure card. A `final` one is not retried whatever its class."""

    def __init__(self, failure: Failure, title: str = "", *, final: bool = False) -> None:
        super().__init__(failure.card(title))
        self.failure = failure
        self.final = final


def failure_in(error: BaseException) -> Failure | None:
    """The failure that an error carries or means, or None for one that is none of ours.

    The trees of `trainers` and `serving` don't know each other but have the same shape: `failure_class`,
    `code`, `hint`.
    """
    if isinstance(error, StepFailed):
        return error.failure
    name = getattr(error, "failure_class", None)
    try:
        cls = FailureClass(str(name))
    except ValueError:
        return None
    reason = str(getattr(error, "message", "") or error)
    return Failure(cls, reason, code=getattr(error, "code", ""), hint=getattr(error, "hint", ""))


def most_telling(failures: Iterable[Failure]) -> Failure | None:
    """Of several replicas' failures, the one that is shown."""
    return min(failures, key=lambda failure: _TELLING.index(failure.failure_class), default=None)


def report(context: Context | Mapping[str, Any], failure: Failure, *, final: bool = False) -> StepFailed:
    """Hand the failure to XCom, count it, and give the error to raise."""
    ti = context.get("ti")
    if ti is not None:
        ti.xcom_push(key=FAILURE_KEY, value=failure.to_dict())
    _count(context, failure.failure_class)
    return StepFailed(failure, title_of(context), final=final)


@contextlib.contextmanager
def cards(context: Context | Mapping[str, Any]) -> Iterator[None]:
    """Errors of ours from within come out as StepFailed, with the failure in XCom."""
    try:
        yield
    except StepFailed:
        raise
    except Exception as e:
        failure = failure_in(e)
        if failure is None:
            raise
        raise report(context, failure) from e


def explained(function: Function) -> Function:
    """A plain task's function whose errors of ours come out as StepFailed, with the failure in XCom."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from airflow.sdk import get_current_context

        with cards(get_current_context()):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def title_of(context: Context | Mapping[str, Any]) -> str:
    """What failed, for the card's head: "digits_retrain / train.replica [worker-1]"."""
    ti = context.get("ti")
    if ti is None:
        return ""
    mapped = f" [{ti.map_index}]" if (getattr(ti, "map_index", None) or -1) >= 0 else ""
    return f"{ti.dag_id} / {ti.task_id}{mapped}"


# How often each class has failed this task instance lives in Airflow's task state store: it outlasts a try. A
# task that somebody cleared starts a new life, which Airflow shows by a higher `max_tries`.


def failures_before(context: Context | Mapping[str, Any] | None) -> dict[FailureClass, int]:
    """How often this task instance has failed in its present life, by class; {} where Airflow can't tell."""
    context = context or {}
    store, ti = context.get("task_state_store"), context.get("ti")
    if store is None or ti is None:
        return {}
    state = store.get(_COUNTS_KEY)
    if not isinstance(state, Mapping) or state.get("life") != ti.max_tries:
        return {}
    return {FailureClass(name): number for name, number in state["counts"].items()}


def _count(context: Context | Mapping[str, Any], failure_class: FailureClass) -> None:
    store, ti = context.get("task_state_store"), context.get("ti")
    if store is None or ti is None:
        return
    counts = failures_before(context)
    counts[failure_class] = counts.get(failure_class, 0) + 1
    store.set(_COUNTS_KEY, {"life": ti.max_tries, "counts": {c.value: n for c, n in counts.items()}})


class RetryByClass(RetryPolicy):
    """Retry by failure class: USER, DATA and CONFIG never, OOM once, free ones always, the rest up to a cap.

    A task's operator may say its own caps by `restart` (a RestartPolicy). Errors that are none of ours follow
    Airflow's rules.
    """

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Context | None = None,
    ) -> RetryDecision:
        """The decision for one failed try."""
        failure = failure_in(exception)
        if failure is None:
            return RetryDecision.default()
        if getattr(exception, "final", False):
            return RetryDecision.fail("the job is over")
        cls = failure.failure_class
        restart = getattr((context or {}).get("task"), "restart", None) or RestartPolicy()
        cap = restart.cap(cls)
        number = failures_before(context).get(cls, try_number)
        if number > cap:
            again = "is never retried" if cap == 0 else f"was retried {cap:g} times"
            return RetryDecision.fail(f"class {cls} {again}")
        delay = _DELAYS.get(cls, min(RETRY_DELAY * 2 ** (number - 1), _LONGEST_DELAY))
        return RetryDecision.retry(delay, f"class {cls}, failure {number}")

    def serialize(self) -> dict[str, Any]:
        """It has no settings."""
        return {"__type": type(self).__name__}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> RetryByClass:
        """The policy of `serialize`."""
        return cls()

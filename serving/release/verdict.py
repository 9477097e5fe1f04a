"""The gate's decision as a value: outcome, reasons, numbers, and what people decided about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from serving.errors import ConfigInvalid
from serving.release.limits import FAIL, PASS, UNKNOWN

__all__ = ["APPROVE", "REJECT", "Approval", "Override", "Verdict", "decided", "override", "overridden"]

_OUTCOMES = (PASS, FAIL, UNKNOWN)
APPROVE, REJECT = "approve", "reject"


@dataclass(frozen=True)
class Override:
    """A person's decision against the gate.

    `author` is who decided as far as the machine knows: the Airflow user who triggered the run, the operating
    system's user of a command. `on_behalf_of` is the name that was written into the form, which anybody may write
    anything into; `source` says where the author's name is from: airflow, cli, or form when there is no other.
    """

    outcome_before: str
    reason: str
    author: str
    on_behalf_of: str = ""
    source: str = ""


@dataclass(frozen=True)
class Approval:
    """A person's answer to the question whether to release; `by` is empty when nobody answered in time."""

    decision: str
    by: str
    when: str = ""
    comment: str = ""
    timed_out: bool = False

    def __post_init__(self) -> None:
        if self.decision not in (APPROVE, REJECT):
            raise ConfigInvalid(f"decision must be {APPROVE} or {REJECT}, got {self.decision!r}")

    def words(self) -> str:
        """A sentence for people."""
        if self.timed_out:
            return f"nobody answered in time, which is to {self.decision}"
        comment = f": {self.comment}" if self.comment else ""
        return f"{self.by or 'somebody'} {'approves' if self.decision == APPROVE else 'rejects'}{comment}"


@dataclass(frozen=True)
class Verdict:
    """The gate's decision, the sentences that say why, and the numbers they speak of."""

    outcome: str
    reasons: tuple[str, ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    override: Override | None = None
    approval: Approval | None = None

    def __post_init__(self) -> None:
        if self.outcome not in _OUTCOMES:
            raise ConfigInvalid(f"outcome must be one of {', '.join(_OUTCOMES)}, got {self.outcome!r}")

    @property
    def deployable(self) -> bool:
        """Only a pass is."""
        return self.outcome == PASS

    def words(self) -> str:
        """One line for people: the outcome and its reasons."""
        return f"{self.outcome}: {'; '.join(self.reasons)}"

    def to_json(self) -> dict[str, Any]:
        """A small JSON value; "approval" is there once somebody was asked."""
        out = {
            "outcome": self.outcome,
            "reasons": list(self.reasons),
            "numbers": dict(self.numbers),
            "override": None if self.override is None else asdict(self.override),
        }
        return out if self.approval is None else {**out, "approval": asdict(self.approval)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Verdict:
        """The verdict of `to_json`; raises ConfigInvalid."""
        try:
            given, asked = document.get("override"), document.get("approval")
            return cls(
                document["outcome"],
                tuple(map(str, document["reasons"])),
                dict(document.get("numbers") or {}),
                Override(**given) if given else None,
                Approval(**asked) if asked else None,
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise ConfigInvalid(f"a gate's verdict must have outcome and reasons: {e!r}") from e


def override(
    verdict: Verdict, reason: str, author: str, *, on_behalf_of: str = "", source: str = ""
) -> Verdict:
    """Let a model pass against the gate; the reason and its author go into the promotion log.

    Without an author the name that was given is all there is, and is said to be just that.
    """
    reason, author, named = reason.strip(), author.strip(), on_behalf_of.strip()
    if not reason:
        raise ConfigInvalid("an override must have a reason, got none")
    if not author:
        author, named, source = named, "", "form"
    if not author:
        raise ConfigInvalid("an override must have an author, got none")
    if verdict.deployable:
        return verdict
    decision = Override(verdict.outcome, reason, author, "" if named == author else named, source)
    who = author
    if decision.on_behalf_of:
        who += f", for {decision.on_behalf_of} as they say,"
    elif source == "form":
        who += " (a name in the form, no user of Airflow)"
    words = f"{who} overrides {verdict.outcome}: {reason}"
    return replace(verdict, outcome=PASS, reasons=(words, *verdict.reasons), override=decision)


def overridden(
    gate: Mapping[str, Any] | None, reason: str, author: str, *, on_behalf_of: str = "", source: str = "cli"
) -> dict[str, Any]:
    """A verdict's JSON with an override, for `promote_step(gate=...)`; of None, for a version that was never judged."""
    verdict = Verdict(UNKNOWN, ("the version was not judged",)) if gate is None else Verdict.from_json(gate)
    return override(verdict, reason, author, on_behalf_of=on_behalf_of, source=source).to_json()


def decided(verdict: Verdict, approval: Approval) -> Verdict:
    """A verdict with a person's answer: who rejects makes a pass a failure, who approves makes nothing a pass."""
    reasons = (approval.words(), *verdict.reasons)
    rejected = approval.decision == REJECT and verdict.deployable
    return replace(verdict, outcome=FAIL if rejected else verdict.outcome, reasons=reasons, approval=approval)

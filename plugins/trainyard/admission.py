"""Admission: a gang is let in as a whole, or waits as a whole.

    ledger = Ledger.from_data(config_map.data)
    decision = ledger.ask(gang, demand, quotas, living_pods, now=time.time())
    decision.admitted, decision.reason

Between the moment when a gang is let in and the moment when its last pod is there, its room is free to look at and
taken all the same. The ledger holds such reservations, so that two gangs that each fit a half-empty quota are not both
let in to hold half of it and wait for the other's. Who waits longest goes first once it has waited for `PATIENCE`.
The ledger is one ConfigMap of the namespace, changed only as long as nobody else has changed it.
Plain values; the Kubernetes API is `trainyard.operators.admit`'s.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from trainers.job import labels
from trainers.job.plan import Plan
from trainyard.kubelet.quantity import parse_quantity

__all__ = ["LEDGER", "Decision", "Ledger", "Quota", "demand_of", "usage_of"]

LEDGER = "trainyard-admission"
"""The name of the ConfigMap."""

PATIENCE = 600.0
"""Seconds after which nobody may overtake who waits."""

_FORGET = 180.0  # a waiting gang that has not asked for so long has no Airflow any more
_HELD = 1200.0  # a reservation whose pods have not come for so long is given up

Amounts = Mapping[str, Decimal]


@dataclasses.dataclass(frozen=True)
class Quota:
    """A ResourceQuota: what is allowed and what is used, by its own names of resources."""

    name: str
    hard: Amounts
    used: Amounts

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Quota:
        """From its manifest; scopes are not looked at, a quota with scopes counts as if it had none."""
        hard = manifest.get("spec", {}).get("hard") or {}
        used = (manifest.get("status") or {}).get("used") or {}
        return cls(
            manifest["metadata"]["name"],
            {name: parse_quantity(value) for name, value in hard.items()},
            {name: parse_quantity(value) for name, value in used.items()},
        )


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a gang is let in, and in words what it waits for; `never`: it is larger than the quota as a whole."""

    admitted: bool
    reason: str = ""
    never: bool = False


def _named(requests: Amounts, limits: Amounts) -> dict[str, Decimal]:
    """Amounts under all names that a quota may have for them."""
    found = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for name, amount in requests.items():
        found[f"requests.{name}"] = amount
        if name in ("cpu", "memory", "ephemeral-storage"):
            found[name] = amount
    for name, amount in limits.items():
        found[f"limits.{name}"] = amount
    return found


def _sum(rows: Iterable[Amounts]) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for row in rows:
        for name, amount in row.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total


def demand_of(plan: Plan) -> dict[str, Decimal]:
    """What all replicas of a plan ask for together, sidecars left out."""
    rows = []
    for replica in plan.replicas:
        needs = replica.resources
        gpus = {needs.gpu_resource: Decimal(needs.gpu)} if needs.gpu else {}
        memory = {"memory": parse_quantity(needs.memory)}
        rows.append(_named({"cpu": Decimal(str(needs.cpu)), **memory, **gpus}, {**memory, **gpus}))
    if plan.indexed:
        rows.append({"count/jobs.batch": Decimal(len(plan.indexed))})
    return _sum(rows)


def usage_of(pods: Iterable[Mapping[str, Any]]) -> dict[str, Decimal]:
    """What pods that have not ended ask for together, as a quota counts it."""
    rows = []
    for pod in pods:
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        parts: dict[str, list[Amounts]] = {"requests": [], "limits": []}
        for container in pod["spec"]["containers"]:
            for kind, found in parts.items():
                said = (container.get("resources") or {}).get(kind) or {}
                found.append({name: parse_quantity(value) for name, value in said.items()})
        rows.append(_named(_sum(parts["requests"]), _sum(parts["limits"])))
    return _sum(rows)


@dataclasses.dataclass(frozen=True)
class _Entry:
    demand: Amounts
    asked: float
    seen: float
    admitted: float | None = None

    def to_json(self) -> str:
        data = dataclasses.asdict(self) | {"demand": {k: str(v) for k, v in self.demand.items()}}
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> _Entry | None:
        """None for what somebody else has written there."""
        try:
            data = json.loads(text)
            demand = {name: Decimal(amount) for name, amount in data.pop("demand").items()}
            return cls(demand=demand, **data)
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
            return None


class Ledger:
    """Who was let in and whose pods are still to come, and who waits."""

    def __init__(self, entries: Mapping[str, _Entry] | None = None) -> None:
        self._entries = dict(entries or {})

    @classmethod
    def from_data(cls, data: Mapping[str, str] | None) -> Ledger:
        """From a ConfigMap's data; what can't be read is left out."""
        found = {gang: _Entry.from_json(text) for gang, text in (data or {}).items()}
        return cls({gang: entry for gang, entry in found.items() if entry is not None})

    def to_data(self) -> dict[str, str]:
        """For a ConfigMap."""
        return {gang: entry.to_json() for gang, entry in sorted(self._entries.items())}

    def asked(self, gang: str) -> float | None:
        """When a gang asked first."""
        entry = self._entries.get(gang)
        return entry.asked if entry else None

    def leave(self, gang: str) -> bool:
        """Forget a gang; whether it was known."""
        return self._entries.pop(gang, None) is not None

    def ask(
        self,
        gang: str,
        demand: Amounts,
        quotas: Iterable[Quota],
        pods: Iterable[Mapping[str, Any]],
        *,
        now: float,
    ) -> Decision:
        """Let a gang in, or note that it waits.

        `pods` are those of the namespace, as manifests. A gang that was let in and asks again is let in.
        """
        pods, quotas = list(pods), list(quotas)
        realised = self._tidy(pods, now)
        mine = self._entries.get(gang)
        if mine is not None and mine.admitted is not None:
            return Decision(True, "it was let in before")
        others = {name: entry for name, entry in self._entries.items() if name != gang}
        still_to_come = _sum(
            _missing(entry.demand, realised.get(name, {}))
            for name, entry in others.items()
            if entry.admitted is not None
        )
        asked = mine.asked if mine else now
        decision = _fits(demand, quotas, usage_of(pods), still_to_come)
        first = [
            name
            for name, entry in others.items()
            if entry.admitted is None and entry.asked < asked and now - entry.asked > PATIENCE
        ]
        if decision.admitted and first and quotas:
            decision = Decision(False, f"{', '.join(sorted(first))} asked before and has waited longer")
        if decision.never:
            self.leave(gang)
        else:
            self._entries[gang] = _Entry(demand, asked, now, now if decision.admitted else None)
        return decision

    def _tidy(self, pods: list[Mapping[str, Any]], now: float) -> dict[str, Amounts]:
        """Forget who is gone or all there; what of each gang is there."""
        by_gang: dict[str, list[Mapping[str, Any]]] = {}
        for pod in pods:
            name = (pod["metadata"].get("labels") or {}).get(labels.LABEL_GANG)
            if name:
                by_gang.setdefault(name, []).append(pod)
        realised = {name: usage_of(rows) for name, rows in by_gang.items()}
        for name, entry in list(self._entries.items()):
            if entry.admitted is None:
                gone = now - entry.seen > _FORGET
            else:
                there = realised.get(name, {}).get("pods", Decimal(0))
                gone = there >= entry.demand.get("pods", Decimal("Infinity")) or now - entry.admitted > _HELD
            if gone:
                del self._entries[name]
        return realised


def _missing(demand: Amounts, there: Amounts) -> dict[str, Decimal]:
    return {name: max(Decimal(0), amount - there.get(name, Decimal(0))) for name, amount in demand.items()}


def _fits(demand: Amounts, quotas: Iterable[Quota], usage: Amounts, still_to_come: Amounts) -> Decision:
    zero = Decimal(0)
    short, never = [], []
    for quota in quotas:
        for name, limit in quota.hard.items():
            asked = demand.get(name, zero)
            if not asked:
                continue
            # The quota's own count may be behind the pods, and the pods behind it.
            used = max(quota.used.get(name, zero), usage.get(name, zero))
            held = still_to_come.get(name, zero)
            where = f"{name} of quota {quota.name}"
            if asked > limit:
                never.append(f"it asks for {_said(asked)} {where}, which has {_said(limit)} in all")
            elif asked + used + held > limit:
                promised = f" and {_said(held)} are promised to gangs that come up" if held else ""
                short.append(
                    f"it asks for {_said(asked)} {where}; {_said(used)} of {_said(limit)} are in use{promised}"
                )
    if never:
        return Decision(False, "; ".join(never), never=True)
    return Decision(not short, "; ".join(short))


def _said(amount: Decimal) -> str:
    """An amount for people: whole gibibytes for bytes, else the number."""
    if amount >= 1024**3:
        return f"{float(amount) / 1024**3:.4g}Gi"
    return f"{amount.normalize():f}"

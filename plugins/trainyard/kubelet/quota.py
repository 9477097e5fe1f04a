"""ResourceQuota: pods over it are refused with 403, in the words of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from trainyard.kubelet.errors import forbidden
from trainyard.kubelet.quantity import format_quantity, parse_quantity
from trainyard.kubelet.resources import PODS, RESOURCES
from trainyard.kubelet.store import Store

__all__ = ["check_quota"]

_MUST_BE_SAID = {
    "cpu",
    "memory",
    *(f"{p}.{key}" for p in ("requests", "limits") for key in ("cpu", "memory")),
}
QUOTAS = RESOURCES["resourcequotas"]


def check_quota(store: Store, pod: Mapping[str, Any]) -> None:
    """Raise 403 when the pod would break a quota of its namespace.

    Counted are pods, requests.* and limits.* (cpu and memory mean requests), over pods that are not finished;
    other names, and scopes, are left alone.
    """
    namespace = pod["metadata"]["namespace"]
    quotas, _ = store.list(QUOTAS, namespace)
    if not quotas:
        return
    pods, _ = store.list(PODS, namespace)
    for quota in quotas:
        unsaid = _unsaid(quota.get("spec", {}).get("hard") or {}, pod)
        if unsaid:
            why = f"failed quota: {quota['metadata']['name']}: must specify {','.join(unsaid)}"
            raise forbidden("pods", pod["metadata"]["name"], why)
    living = [other for other in pods if other["status"]["phase"] not in ("Succeeded", "Failed")]
    for quota in quotas:
        hard = quota.get("spec", {}).get("hard") or {}
        over = list(_over(hard, pod, living))
        if over:
            rows = ["exceeded quota: " + quota["metadata"]["name"]]
            for word, index in (("requested", 1), ("used", 2), ("limited", 3)):
                rows.append(f"{word}: " + ",".join(f"{row[0]}={row[index]}" for row in over))
            raise forbidden("pods", pod["metadata"]["name"], ", ".join(rows))


def _unsaid(hard: Mapping[str, Any], pod: Mapping[str, Any]) -> list[str]:
    """What is counted of CPU and memory, and some container doesn't say."""
    counted = [name for name in hard if name in _MUST_BE_SAID]
    containers = pod["spec"]["containers"]
    return sorted(
        name
        for name in counted
        if not all(_key(name)[1] in (row["resources"].get(_key(name)[0]) or {}) for row in containers)
    )


def _over(
    hard: Mapping[str, Any], pod: Mapping[str, Any], living: list[dict[str, Any]]
) -> Iterable[tuple[str, str, str, str]]:
    for name, limit in hard.items():
        asked = _amount(pod, name)
        if asked is None:
            continue
        used = sum((_amount(other, name) or Decimal(0) for other in living), Decimal(0))
        if asked + used > parse_quantity(limit):
            binary = _is_binary(pod, name) or str(limit).endswith("i")
            yield (
                name,
                format_quantity(asked, binary=binary),
                format_quantity(used, binary=binary),
                str(limit),
            )


def _amount(pod: Mapping[str, Any], name: str) -> Decimal | None:
    """How much of a quota's row a pod takes; None for rows that are not counted here."""
    if name in ("pods", "count/pods"):
        return Decimal(1)
    part, key = _key(name)
    if part not in ("requests", "limits"):
        return None
    rows = (container["resources"].get(part) or {} for container in pod["spec"]["containers"])
    return sum((parse_quantity(row[key]) for row in rows if key in row), Decimal(0))


def _is_binary(pod: Mapping[str, Any], name: str) -> bool:
    """Whether the pod says this amount in units of 1024."""
    part, key = _key(name)
    said = ((row["resources"].get(part) or {}).get(key) for row in pod["spec"]["containers"])
    return any(str(value).endswith("i") for value in said)


def _key(name: str) -> tuple[str, str]:
    """ "requests.memory" -> ("requests", "memory"); "cpu" and "memory" mean requests."""
    if name.startswith(("requests.", "limits.")):
        part, _, key = name.partition(".")
        return part, key
    part, _, key = name.rpartition(".")
    return ("requests" if not part and key in ("cpu", "memory") else part), key

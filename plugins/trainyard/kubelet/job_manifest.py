"""Jobs as values: what the API server checks and fills in, the pods that a Job is made of, what their ends mean.

Indexed Jobs only, with what gangs use of them: completions, parallelism, back-off limits, pod failure policy, deadline,
time to live and suspension.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.kubelet.errors import ApiError, bad_request, invalid
from trainyard.kubelet.objects import LABEL, LABEL_RULE, RANDOM, Causes
from trainyard.kubelet.pod_manifest import check_pod

__all__ = ["INDEX", "action_for", "check_job", "index_of", "pod_of", "ranges"]

INDEX = "batch.kubernetes.io/job-completion-index"
_NAME, _UID = "batch.kubernetes.io/job-name", "batch.kubernetes.io/controller-uid"
_ACTIONS = ("Count", "Ignore", "FailIndex", "FailJob")
_NUMBERS = (
    ("completions", 1),
    ("parallelism", 0),
    ("backoffLimit", 0),
    ("backoffLimitPerIndex", 0),
    ("activeDeadlineSeconds", 1),
    ("ttlSecondsAfterFinished", 0),
)


def check_job(job: dict[str, Any]) -> dict[str, Any]:
    """The Job with defaults; raises 400 or 422 for one that a cluster would refuse, or that has no indices."""
    name, spec = job["metadata"]["name"], job.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("template"), dict):
        raise invalid("Job", name, [("spec.template", "Required value")])
    causes: Causes = []
    for field, least in _NUMBERS:
        value = spec.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            causes.append((f"spec.{field}", f"Invalid value: {value!r}: must be at least {least}"))
    if spec.get("completionMode") != "Indexed":
        causes.append(("spec.completionMode", 'Unsupported value: the process kubelet has "Indexed" only'))
    if spec.get("completions") is None:
        causes.append(("spec.completions", "Required value: when completion mode is Indexed"))
    elif not causes and not LABEL.match(f"{name}-{spec['completions'] - 1}"):
        causes.append(("metadata.name", f'Invalid value: "{name}": with an index {LABEL_RULE}'))
    restart = (spec["template"].get("spec") or {}).get("restartPolicy")
    if restart not in ("Never", "OnFailure"):
        text = f'Unsupported value: "{restart or ""}": supported values: "OnFailure", "Never"'
        causes.append(("spec.template.spec.restartPolicy", text))
    _check_policy(spec, restart, causes)
    if causes:
        raise invalid("Job", name, causes)
    try:
        check_pod({"metadata": {"name": name}, "spec": copy.deepcopy(spec["template"].get("spec"))})
    except ApiError as e:
        raise bad_request(f"spec.template: {e.message}") from e
    spec.setdefault("parallelism", 1)
    spec.setdefault("backoffLimit", 6 if spec.get("backoffLimitPerIndex") is None else 2**31 - 1)
    spec.setdefault("suspend", False)
    job["status"] = {}
    return job


def _check_policy(spec: Mapping[str, Any], restart: str, causes: Causes) -> None:
    policy = spec.get("podFailurePolicy")
    if not policy:
        return
    if restart != "Never":
        causes.append(("spec.podFailurePolicy", "Invalid value: only with restartPolicy Never"))
    for i, rule in enumerate(policy.get("rules") or ()):
        where = f"spec.podFailurePolicy.rules[{i}].action"
        if rule.get("action") not in _ACTIONS:
            causes.append((where, f'Unsupported value: "{rule.get("action")}"'))
        if rule.get("action") == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
            causes.append((where, "Invalid value: requires backoffLimitPerIndex"))


def pod_of(job: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The manifest of the next pod of one index, named and labelled as on a cluster."""
    meta, template = job["metadata"], copy.deepcopy(job["spec"]["template"])
    said = template.get("metadata") or {}
    host = f"{meta['name']}-{index}"
    spec = {**template["spec"], "hostname": host}
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        env = container.setdefault("env", [])
        if all(row["name"] != "JOB_COMPLETION_INDEX" for row in env):
            origin = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
            env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": origin})
    own = {_NAME: meta["name"], "job-name": meta["name"], _UID: meta["uid"], "controller-uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{host}-{''.join(secrets.choice(RANDOM) for _ in range(5))}",
            "namespace": meta["namespace"],
            "labels": {**(said.get("labels") or {}), **own, INDEX: str(index)},
            "annotations": {**(said.get("annotations") or {}), INDEX: str(index)},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": meta["name"],
                    "uid": meta["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": spec,
    }


def index_of(pod: Mapping[str, Any]) -> int:
    """The index of a pod of a Job."""
    return int(pod["metadata"]["annotations"][INDEX])


def action_for(job: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
    """What a failed pod means by the Job's failure policy: Count, Ignore, FailIndex or FailJob; the first rule wins."""
    status = pod["status"]
    codes = {
        row["name"]: row["state"]["terminated"]["exitCode"]
        for row in status.get("containerStatuses") or ()
        if "terminated" in (row.get("state") or {})
    }
    conditions = {(row["type"], row["status"]) for row in status.get("conditions") or ()}
    for rule in (job["spec"].get("podFailurePolicy") or {}).get("rules") or ():
        wanted = rule.get("onExitCodes")
        if wanted:
            name = wanted.get("containerName")
            found = [code for of, code in codes.items() if code != 0 and name in (None, of)]
            inside = wanted["operator"] == "In"
            if any((code in wanted["values"]) == inside for code in found):
                return str(rule["action"])
        elif any((row["type"], row.get("status", "True")) in conditions for row in rule["onPodConditions"]):
            return str(rule["action"])
    return "Count"


def ranges(indices: Iterable[int]) -> str:
    """Indices as a Job's status has them.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7,8'
    """
    rows: list[list[int]] = []
    for index in sorted(indices):
        if rows and index == rows[-1][-1] + 1:
            rows[-1].append(index)
        else:
            rows.append([index])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in rows)

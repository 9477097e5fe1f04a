"""A plan as plan.json keeps it: what all replicas' TF_CONFIGs have in common is written once.

Every TF_CONFIG names every address. Written out for each of a thousand replicas that is 44 MB, which each of their
tasks would read; so a replica's TF_CONFIG holds the number of its cluster in "tf_clusters". A file without that list,
as versions before wrote it, is read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainers.job.plan import Plan

__all__ = ["plan_from_file", "plan_to_file"]

_CLUSTERS = "tf_clusters"


def plan_to_file(plan: Plan) -> dict[str, Any]:
    """A JSON value."""
    data = plan.to_dict()
    clusters: list[Any] = []
    for replica in data["replicas"]:
        cluster = replica["tf_config"].get("cluster")
        if cluster is None:
            continue
        if cluster not in clusters:
            clusters.append(cluster)
        replica["tf_config"] = {**replica["tf_config"], "cluster": clusters.index(cluster)}
    return {**data, _CLUSTERS: clusters}


def plan_from_file(data: Mapping[str, Any]) -> Plan:
    """The plan of `plan_to_file`, or of `Plan.to_dict`."""
    data = dict(data)
    clusters = data.pop(_CLUSTERS, None)
    if clusters is not None:
        data["replicas"] = [_whole(replica, clusters) for replica in data["replicas"]]
    return Plan.from_dict(data)


def _whole(replica: Mapping[str, Any], clusters: list[Any]) -> dict[str, Any]:
    config = dict(replica["tf_config"])
    if "cluster" in config:
        config["cluster"] = clusters[config["cluster"]]
    return {**replica, "tf_config": config}

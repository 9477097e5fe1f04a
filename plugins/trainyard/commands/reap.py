"""jobs reap: Jobs, pods and Services that nobody waits for any more."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trainyard.commands.platform import open_platform
from trainyard.platform.external import ClusterRefused, ClusterUnknown, core_api_of
from trainyard.platform.progress import duration

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

__all__ = ["reap"]


def reap(arguments: argparse.Namespace, console: Console) -> int:
    """List orphans; with `--delete` remove them. 0 unless the cluster can't be asked."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    from trainyard.reaper import find_orphans, remove_orphans

    platform = open_platform()
    namespace = arguments.namespace or platform.settings.namespace
    api = _core_api(platform)
    try:
        orphans = find_orphans(api, namespace, grace=arguments.grace, older_than=arguments.older_than)
        if not orphans:
            console.print(f"no orphans in namespace {namespace}")
            return 0
        console.print(_table(orphans))
        if not arguments.delete:
            console.print(f"{len(orphans)} would be removed; `--delete` removes them", markup=False)
            return 0
        removed = remove_orphans(api, namespace, orphans)
    except (ApiException, HTTPError) as e:
        raise ClusterRefused(
            f"namespace {namespace} can't be looked through: {e}",
            hint="check KUBECONFIG, the namespace, and the right to list and delete jobs, pods and services there",
        ) from e
    console.print(f"removed {len(removed)} of {len(orphans)}; the others were gone already")
    return 0


def _core_api(platform: Any) -> CoreV1Api:
    """The cluster of TRAINYARD_KUBECONFIG, of KUBECONFIG or of the pod this runs in; else the process kubelet."""
    from kubernetes import client, config

    settings = platform.settings
    if settings.cluster:
        return core_api_of(settings.kubeconfig)
    path = os.environ.get("KUBECONFIG") or (str(settings.kubeconfig) if settings.kubeconfig.exists() else "")
    try:
        if path:
            return client.CoreV1Api(config.new_client_from_config(path))
        config.load_incluster_config()
    except config.ConfigException as e:
        raise ClusterUnknown(
            f"no cluster to look at: {e}", hint="set KUBECONFIG, or start the platform by `trainyard up`"
        ) from e
    return client.CoreV1Api()


def _table(orphans: list[Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("kind", "name", "age", "why"):
        table.add_column(column, overflow="fold")
    for orphan in orphans:
        table.add_row(orphan.kind, orphan.name, duration(orphan.age), orphan.why)
    return table

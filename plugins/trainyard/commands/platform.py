"""up, down, status, env: the embedded platform's life."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainyard.platform.embedded import Platform, PlatformFailed
from trainyard.platform.pipeline_run import pause_leftovers
from trainyard.platform.preflight import check_room
from trainyard.platform.processes import memory_bytes
from trainyard.platform.progress import StartProgress, duration
from trainyard.platform.settings import Settings

__all__ = ["down", "env", "open_platform", "print_urls", "status", "tell_room", "up", "where_pods_run"]

_MIB = 1024**2
_STYLES = {"ready": "green", "starting": "yellow", "restarting": "yellow", "failed": "red"}


def open_platform() -> Platform:
    """The platform of this environment's settings."""
    return Platform(settings=Settings.from_environment())


def tell_room(platform: Platform, console: Console) -> None:
    """Say what there is too little of, and what will not work on the cluster; NoRoom when it is hopeless."""
    warnings = check_room([platform.settings.home, platform.storage])
    for warning in (*warnings, *platform.settings.warnings()):
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def print_urls(platform: Platform, console: Console) -> None:
    """Where to look, with the password."""
    urls, (user, password) = platform.urls, platform.credentials
    console.print(
        f"  Airflow  {urls['airflow']}  user {user}, password {password}", markup=False, soft_wrap=True
    )
    if "mlflow" not in platform.settings.without:
        console.print(f"  MLflow   {urls['mlflow']}", soft_wrap=True)
    if "model-server" not in platform.settings.without:
        console.print(f"  models   {urls['model-rest']} (REST), {urls['model-grpc']} (gRPC)", soft_wrap=True)
    if cluster := platform.state.get("cluster"):
        console.print(f"  pods     {where_pods_run(cluster)}", markup=False, soft_wrap=True)


def where_pods_run(cluster: Mapping[str, str]) -> str:
    """The cluster of a platform's state, for people."""
    server = cluster["server"] or "an unknown server"
    return f"on {server}, namespace {cluster['namespace']} (kubeconfig {cluster['kubeconfig']})"


def up(arguments: argparse.Namespace, console: Console) -> int:
    """Start the platform, detached; say where everything is."""
    platform = open_platform()
    if platform.is_up:
        console.print("the platform is up already")
    else:
        tell_room(platform, console)
        platform.start(on_progress=StartProgress(console))
        pause_leftovers(platform.airflow, platform.settings.pause_notes)
        console.print(f"the platform is up after {duration(platform.state['ready_seconds'])}")
    print_urls(platform, console)
    return 0


def down(arguments: argparse.Namespace, console: Console) -> int:
    """Stop the platform."""
    begun = time.monotonic()
    if open_platform().stop():
        console.print(f"the platform is down after {duration(time.monotonic() - begun)}")
    else:
        console.print("no platform is running")
    return 0


def status(arguments: argparse.Namespace, console: Console) -> int:
    """Say what runs; 1 unless everything answers."""
    platform = open_platform()
    state = platform.state
    for service in state.get("services", ()):
        service["memory"] = memory_bytes(service["pid"]) if service["pid"] else 0
    if arguments.json:
        console.print_json(json.dumps(state))
    else:
        _print_status(platform, state, console)
    whole = all(service["state"] in ("ready", "done") for service in state.get("services", ()))
    return 0 if state.get("state") == "running" and whole else 1


def env(arguments: argparse.Namespace, console: Console) -> int:
    """Print `export` lines for a shell."""
    platform = open_platform()
    if not platform.is_up:
        raise PlatformFailed("the platform is not up", hint="make up starts it")
    for name, value in platform.environment().items():
        console.print(f"export {name}={shlex.quote(value)}", markup=False, soft_wrap=True)
    return 0


def _print_status(platform: Platform, state: dict[str, Any], console: Console) -> None:
    word = state.get("state", "stopped")
    if word in ("stopped", "lost"):
        console.print(f"the platform of {platform.settings.home} is down; make up starts it", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("component", "state", "pid", "memory", "restarts", "address"):
        table.add_column(
            name, justify="right" if name in ("pid", "memory", "restarts") else "left", no_wrap=True
        )
    for service in state["services"]:
        restarts = f"{service['restarts']} ({service['last_exit']})" if service["restarts"] else ""
        memory = f"{service['memory'] / _MIB:.0f} MB" if service["memory"] else ""
        table.add_row(
            service["title"],
            Text(service["state"], _STYLES.get(service["state"], "")),
            str(service["pid"] or ""),
            memory,
            restarts,
            service["url"],
        )
    console.print(table)
    total = sum(service["memory"] for service in state["services"]) / _MIB
    since = duration(time.time() - state["started"])
    console.print(
        f"{word} since {since}, {total:.0f} MB in all, logs in {platform.settings.logs}", soft_wrap=True
    )
    if failure := state.get("failure"):
        console.print(f"{failure['title']} {failure['what']}; {failure['hint']}", style="red", soft_wrap=True)
    if word == "running":
        print_urls(platform, console)

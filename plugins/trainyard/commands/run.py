"""run: a pipeline from its trigger to its report, with the platform that it needs."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from trainers.job.errors import ConfigError
from trainyard.cli import EXIT_FAILED
from trainyard.commands.platform import open_platform, tell_room, where_pods_run
from trainyard.platform.airflow_api import AirflowClient, AirflowError, AirflowUnreachable, DagRun
from trainyard.platform.embedded import Platform, PlatformFailed
from trainyard.platform.failure_view import failed_task
from trainyard.platform.pipeline_run import Snapshot, end_early, follow, pause_leftovers, start_run, unpaused
from trainyard.platform.progress import StartProgress, duration, make_progress
from trainyard.platform.report import make_report, print_report
from trainyard.platform.state import Held, hold

__all__ = ["RunBusy", "run"]

_SILENCE_SECONDS = 120.0


class RunBusy(ConfigError):
    """The same pipeline is being run beside this."""

    code = "run.busy"


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run one pipeline; 0 when it succeeded."""
    platform = open_platform()
    with _alone(platform, arguments.dag):
        was_up = platform.is_up
        if was_up:
            console.print("using the platform that is up")
        else:
            tell_room(platform, console)
            console.print("starting the platform (the first time takes longest) ...")
        with contextlib.ExitStack() as stack:
            stack.callback(_stopped, platform, console, was_up=was_up)
            stack.enter_context(
                platform.running(on_progress=(lambda _: None) if was_up else StartProgress(console))
            )
            if not was_up:
                pause_leftovers(platform.airflow, platform.settings.pause_notes)
                console.print(f"the platform is up after {duration(platform.state['ready_seconds'])}")
            if cluster := platform.state.get("cluster"):
                console.print(f"pods run {where_pods_run(cluster)}", markup=False, soft_wrap=True)
            return _run_pipeline(platform, arguments, console, was_up=was_up)


def _run_pipeline(
    platform: Platform, arguments: argparse.Namespace, console: Console, *, was_up: bool = False
) -> int:
    client = platform.airflow
    dag = client.wait_for_dag(arguments.dag, parsed_after=_newest_change(platform))
    _settle_others(client, dag, console, was_up=was_up)
    started = start_run(client, dag, _input(arguments))
    page = client.page(started.dag_id, started.run_id)
    console.print(f"running {started.dag_id}: {page}", markup=False, soft_wrap=True)
    with unpaused(client, dag, platform.settings.pause_notes):
        last = _followed(platform, started, console)
    print_report(make_report(platform, last), console)
    if last.run.state == "success":
        return 0
    found = failed_task(client, last.run, last.tasks)
    if found is None:
        console.print("no task failed: somebody marked the run as failed")
    else:
        console.print()
        console.print(found.card(), markup=False, soft_wrap=True)
    return EXIT_FAILED


def _input(arguments: argparse.Namespace) -> dict[str, Any]:
    """The form's fields, with the name of who overrides the gate: Airflow only knows the platform's user."""
    if not arguments.override_reason:
        return dict(arguments.conf)
    return {
        **arguments.conf,
        "override_reason": arguments.override_reason,
        "override_author": getpass.getuser(),
    }


def _settle_others(client: AirflowClient, dag: Mapping[str, Any], console: Console, *, was_up: bool) -> None:
    """End runs that went down with an earlier platform; say when others will hold this one up."""
    others = client.unfinished(dag["dag_id"])
    if not was_up:
        for other in others:
            client.fail_run(other.dag_id, other.run_id)
            console.print(
                f"ended {other.run_id}, which was cut short when its platform went down", markup=False
            )
    elif len(others) >= (dag.get("max_active_runs") or len(others) + 1):
        names = ", ".join(other.run_id for other in others)
        console.print(f"{names} is still going on: this run begins after it", markup=False, soft_wrap=True)


def _followed(platform: Platform, started: DagRun, console: Console) -> Snapshot:
    """Show the run until it is over; Ctrl-C has Airflow fail it first."""
    progress = make_progress(console)
    last: Snapshot | None = None
    deaths = _Deaths(platform, console)
    silent_since: float | None = None
    try:
        while last is None or not last.run.is_over:
            try:
                for last in follow(platform.airflow, started, platform.storage):
                    progress.update(last)
                    deaths.tell()
                    silent_since = None
            except AirflowUnreachable:
                # The supervisor starts an api-server that died again; the run goes on meanwhile.
                deaths.tell()
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > _SILENCE_SECONDS:
                    raise
                time.sleep(1.0)
    except KeyboardInterrupt:
        progress.close()
        console.print("ending the run (Ctrl-C again: at once) ...")
        with contextlib.suppress(AirflowError):  # it may be on its way down itself
            end_early(platform.airflow, started)
        raise
    finally:
        progress.close()
    return last


class _Deaths:
    """Says which component died since the last look."""

    def __init__(self, platform: Platform, console: Console) -> None:
        self._platform = platform
        self._console = console
        self._told = {s["name"]: s["restarts"] for s in platform.state.get("services", ())}

    def tell(self) -> None:
        """Print news; PlatformFailed when the platform is going down."""
        state = self._platform.state
        for service in state.get("services", ()):
            if service["restarts"] > self._told.get(service["name"], 0):
                self._told[service["name"]] = service["restarts"]
                text = f"{service['title']} died ({service['last_exit']}) and is started again"
                self._console.print(text, style="yellow", markup=False)
        if state.get("state") not in ("running", "starting"):
            failure = state.get("failure") or {}
            what = (
                f"{failure['title']} {failure['what']}"
                if failure
                else "the platform went down during the run"
            )
            raise PlatformFailed(
                what, failure=failure, hint=failure.get("hint", "`make run` starts it again")
            )


def _newest_change(platform: Platform) -> float:
    """When a DAG file or what it imports changed last: the DAG must have been parsed since."""
    folders = (platform.settings.dags, platform.settings.repo / "plugins")
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return max((file.stat().st_mtime for file in files), default=0.0)


@contextlib.contextmanager
def _alone(platform: Platform, dag_id: str) -> Iterator[None]:
    """Hold the lock of this pipeline's run."""
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in dag_id)
    try:
        with hold(platform.settings.home / "locks" / f"run-{safe}.lock"):
            yield
    except Held as held:
        raise RunBusy(
            f"another `trainyard run {dag_id}` is going on with {platform.settings.home}",
            hint="wait until it ends, or give this one another TRAINYARD_HOME",
        ) from held


def _stopped(platform: Platform, console: Console, *, was_up: bool) -> None:
    if not was_up and not platform.is_up:
        console.print("the platform is down; make up keeps one running")

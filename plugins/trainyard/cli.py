"""`trainyard`: the command line of the embedded platform, of jobs and of models.

Every command is a function in `trainyard.commands` that takes the parsed arguments and a console and returns
the exit code: 0 done, 1 failed, 2 refused (nothing was started), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from rich.console import Console

from serving.errors import ServingError
from trainers.job.errors import TrainyardError
from trainyard.commands.models_parser import add_models

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_REFUSED", "main", "parser"]

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The whole command line; the documentation's check reads the commands from it."""
    top = argparse.ArgumentParser(
        prog="trainyard", description="From raw data to a served model, on one machine."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, help: str, function: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        command.set_defaults(function=function)
        return command

    add("up", "start the platform and keep it running", "platform:up")
    add("down", "stop the platform", "platform:down")
    status = add("status", "show what runs, where, with how much memory", "platform:status")
    status.add_argument("--json", action="store_true", help="as JSON")
    add("env", "print the variables by which programs find the platform, for a shell's eval", "platform:env")
    run = add("run", "run a pipeline and watch it; starts the platform if it isn't up", "run:run")
    run.add_argument("dag", nargs="?", default="digits_retrain", help="the pipeline (digits_retrain)")
    run.add_argument(
        "--conf", type=_json_object, default={}, metavar="JSON", help="the form's fields, as JSON"
    )
    run.add_argument(
        "--override-reason", metavar="WHY", help="release even what the gate would hold back, under your name"
    )

    jobs = add("jobs", "training jobs: their records", "jobs:list_jobs").add_subparsers(metavar="ACTION")
    listed = jobs.add_parser("list", help="all jobs, the newest first")
    listed.set_defaults(function="jobs:list_jobs")
    which = "PIPELINE/RUN as `jobs list` shows it, or a part of it that is enough"
    for name, text in (
        ("show", "one job: plan, replicas, attempts, outcome, where the time went"),
        ("plan", "one job's plan: its replicas, their addresses and commands"),
        ("logs", "what a job's replicas printed, in order of time, also after their pods are gone"),
        ("watch", "jobs while they train: every replica, the newest evaluation, the end"),
    ):
        command = jobs.add_parser(name, help=text)
        command.set_defaults(function=f"jobs:{name}_job")
        if name == "watch":
            command.add_argument("job", nargs="*", help=f"{which}; the newest job where none is named")
            command.add_argument("--once", action="store_true", help="show how they stand now, and end")
        else:
            command.add_argument("job", help=which)
        if name == "logs":
            command.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
            command.add_argument(
                "-r", "--replica", action="append", metavar="worker-1", help="of this one; may be said again"
            )
            command.add_argument(
                "-n", "--tail", type=_count, metavar="N", help="the last N lines, and what follows"
            )
            command.add_argument(
                "--timestamps", action="store_true", help="with the time of each line, in UTC"
            )
        if name == "plan":
            command.add_argument("--json", action="store_true", help="the whole plan, as JSON")

    reap = jobs.add_parser(
        "reap", help="pods and Services that nobody waits for any more; `--delete` removes them"
    )
    reap.set_defaults(function="reap:reap")
    reap.add_argument("--delete", action="store_true", help="remove them; without it they are only listed")
    reap.add_argument("--namespace", help="of the pods (TRAINYARD_NAMESPACE)")
    reap.add_argument(
        "--grace",
        type=_seconds,
        default=600.0,
        metavar="10m",
        help="how long after its end a job cleans up itself",
    )
    reap.add_argument(
        "--older-than", type=_seconds, metavar="24h", help="also what is older, whatever it does"
    )

    models = add("models", "served models: versions, predictions, promotions", "models:list_models")
    add_models(models.add_subparsers(metavar="ACTION"))
    _add_tracking(add)
    return top


def _add_tracking(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    tracking = add("tracking", "what MLflow was not told of jobs yet", "tracking:show_status")
    tracking.set_defaults(json=False)
    actions = tracking.add_subparsers(metavar="ACTION")
    status = actions.add_parser("status", help="jobs of which MLflow lacks something")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(function="tracking:show_status")
    deliver = actions.add_parser("deliver", help="tell it now, in order and once")
    deliver.add_argument(
        "job", nargs="?", default="", help="PIPELINE/RUN or a part of it; all jobs by default"
    )
    deliver.set_defaults(function="tracking:deliver_now")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of ours are printed as a sentence, never as a stack."""
    arguments = parser().parse_args(argv)
    out = Console(highlight=False, soft_wrap=True)  # a terminal wraps by itself, a log keeps its lines
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    # A supervisor of CI's ends us by SIGTERM: that stops things in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    module, name = arguments.function.split(":")
    try:
        function = getattr(import_module(f"trainyard.commands.{module}"), name)
        return int(function(arguments, out))
    except (TrainyardError, ServingError) as error:
        err.print(_told(error), markup=False, soft_wrap=True)
        return EXIT_REFUSED if error.failure_class == "CONFIG" else EXIT_FAILED
    except ValueError as error:  # a setting of the environment; the message names it
        err.print(f"trainyard: {error}", markup=False, soft_wrap=True)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        err.print("interrupted")
        return EXIT_INTERRUPTED


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _told(error: TrainyardError | ServingError) -> str:
    """An error as its card where it has one, else as a sentence and what to do."""
    card = getattr(error, "card", None)
    if card is not None:
        return str(card())
    lines = [f"trainyard: {error.message}"]
    failure = getattr(error, "failure", None) or {}
    if failure.get("log_tail"):
        lines += [f"  the end of {failure['log']}:", *(f"    {line}" for line in failure["log_tail"])]
    if error.hint:
        lines.append(f"  what to do: {error.hint}")
    return "\n".join(lines)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f'must be a time like 90, "10m", "24h" or "7d", got {text!r}')
    return float(int(number) * _UNITS[unit])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, got {text!r}")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be JSON like '{{\"steps\": 100}}', got {text!r}: {error}"
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {type(value).__name__}")
    return value


if __name__ == "__main__":
    sys.exit(main())

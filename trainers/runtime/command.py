"""The command that a replica of strategy `custom` runs in place of our trainer: its variables, and its start.

Beside those of the plan (`trainers.job.world`) the launcher gives it

    TF_CONFIG                                the cluster and its place in it, as TensorFlow reads it
    TRAINYARD_JOB, _ROLE, _INDEX             the job's folder, and which replica this is
    TRAINYARD_GENERATION, TRAINYARD_ATTEMPT  which life of the gang this is, and which process of this replica
    TRAINYARD_CHECKPOINTS                    a folder that all replicas share and that outlives them
    TRAINYARD_ARGS, TRAINYARD_ARG_<NAME>     the job's arguments: as one JSON object, and one by one
    TRAINYARD_INPUTS, TRAINYARD_RECORDS      the job's inputs as JSON; the manifest of its records, if it has some
    TRAINYARD_PROGRESS, TRAINYARD_RESULT     files to write (`trainers.job.reporting`)
    PYTHONPATH                               where its launcher finds modules, unless the pod has one

`$(NAME)` in the command stands for a variable, `$$` for a dollar, as in a Pod's command.
Standard library only, like all that the launcher imports.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.job import labels
from trainers.job.errors import ConfigError
from trainers.job.spec import TrainingJob
from trainers.runtime.process import Child, die_with_launcher

__all__ = ["CommandNotStarted", "command_env", "expand", "module_path", "start_command"]

_REFERENCE = re.compile(r"\$\$|\$\(([^()]*)\)")


class CommandNotStarted(ConfigError):
    """A role's command can't be started in the image of its pods."""

    code = "runtime.command"


def expand(word: str, env: Mapping[str, str]) -> str:
    """`word` with its variables; a name that is not there stays as it is.

    >>> expand("--rank=$(RANK) $$(RANK) $(NONE)", {"RANK": "3"})
    '--rank=3 $(RANK) $(NONE)'
    """
    return _REFERENCE.sub(lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), word)


def command_env(job: TrainingJob, folder: Path, progress: Path, result: Path) -> dict[str, str]:
    """What the launcher adds for a command; an argument that is text is given as it is, others as JSON."""
    env = {
        labels.ENV_CHECKPOINTS: str(folder / "checkpoints"),
        labels.ENV_PROGRESS: str(progress),
        labels.ENV_RESULT: str(result),
        "TRAINYARD_ARGS": json.dumps(dict(job.args)),
        "TRAINYARD_INPUTS": json.dumps(dict(job.inputs)),
    }
    if "records" in job.inputs:
        env["TRAINYARD_RECORDS"] = job.inputs["records"]
    for name, value in job.args.items():
        key = re.sub(r"\W", "_", name, flags=re.ASCII).upper()
        env[f"TRAINYARD_ARG_{key}"] = _text(value)
    return env


def module_path(places: Sequence[str], prefixes: Sequence[str], here: str) -> str:
    """What PYTHONPATH must be for a new interpreter to find the modules that one with the path `places` does.

    Without what is below `prefixes`, which an interpreter knows itself, and `here`, where it starts.

    >>> module_path(["/work", "/mine", "/usr/lib/python3.11", "/opt/venv/lib"], ["/usr", "/opt/venv"], "/work")
    '/mine'
    """
    own = [Path(prefix) for prefix in prefixes]
    found = [
        place
        for place in dict.fromkeys(places)
        if place not in ("", here) and not any(Path(place).is_relative_to(prefix) for prefix in own)
    ]
    return os.pathsep.join(found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def start_command(command: Sequence[str], env: Mapping[str, str]) -> Child:
    """Start a command with exactly the environment `env`, so that it never outlives this process.

    CommandNotStarted for one that is not there, or may not be run.
    """
    words = [expand(word, env) for word in command]
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            words,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
            # The launcher has no other threads; the wish outlives the exec.
            preexec_fn=functools.partial(die_with_launcher, os.getpid()),
        )
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        os.close(read)
        raise CommandNotStarted(
            f"can't start {words[0]!r}: {e}",
            hint="the command must be in the role's image, on its PATH or with its whole path",
        ) from e
    finally:
        os.close(write)
    return Child(process.pid, read, process)

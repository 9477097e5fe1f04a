"""Versions that come and go, for benchmarks/serving.py: swaps under load, releases and rollbacks by the real steps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import serving_peers
from serving_peers import PREDICT

from serving.client import PredictClient
from serving.release import steps

CLIENTS = 4
NAME = "cnn"


def swaps(
    folder: Path, ask: Callable[..., dict[str, Any]], rounds: int, seconds: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Windows of load by turns without and with a new version that replaces the old one.

    The clients ask for the latest version of the 10 MB model, one example a request. Each run holds the
    percentiles of both windows, errors, and the seconds from the rename until the new version answers.
    """
    base = folder / "swapped" / NAME
    base.mkdir(parents=True)
    shutil.copytree(folder / "exports" / "1", base / "1")
    server, ports = serving_peers.ours(folder, serving_peers.config_of(base.parent, [NAME]), name="swap")
    question = {
        "protocol": "grpc", "port": ports["grpc"], "path": PREDICT, "clients": CLIENTS,
        "body": str(folder / "requests" / f"{NAME}-1.grpc"),
    }  # fmt: skip
    found = []
    try:
        ask(**question, warm_up=0.5, seconds=0.5)
        for number in range(rounds):
            without = ask(**question, warm_up=0.2, seconds=seconds)
            version = number + 2
            staged = base / f".staged-{version}"
            shutil.copytree(folder / "exports" / str(1 + version % 3), staged)
            swap = Swap(staged, base / str(version), f"127.0.0.1:{ports['grpc']}", version)
            threading.Timer(0.2 + seconds / 5, swap).start()
            swapped = ask(**question, warm_up=0.2, seconds=seconds)
            swap.done.wait(60)
            for run in (without, swapped):
                if "error" in run:
                    raise SystemExit(f"the swaps' load failed: {run['error']}")
            found.append(
                {
                    "p50": without["p50"],
                    "p99": without["p99"],
                    "requests": without["requests"],
                    "swap_p50": swapped["p50"],
                    "swap_p99": swapped["p99"],
                    "swap_requests": swapped["requests"],
                    "errors": without["errors"] + swapped["errors"],
                    "available_s": swap.took,
                }
            )
            say(f"swap {number + 1} of {rounds}")
    finally:
        server.stop()
    return found


class Swap:
    """Shows a staged version by a rename, and waits until the server has it."""

    def __init__(self, staged: Path, target: Path, address: str, version: int) -> None:
        self._staged, self._target, self._address, self._version = staged, target, address, version
        self.took = float("nan")
        self.done = threading.Event()

    def __call__(self) -> None:
        with PredictClient(self._address, NAME, label=None) as client:
            began = time.monotonic()
            self._staged.rename(self._target)
            client.wait_available(self._version, began + 60)
            self.took = time.monotonic() - began
        self.done.set()


def releases(
    folder: Path, rounds: int, say: Callable[[str], None]
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Seconds of each step of releasing a second version beside a champion, and of the rollback to the first.

    And once the same by the command line: seconds of `trainyard models create` and `rollback`.
    """
    storage, config = folder / "storage", folder / "release.config"
    server, ports = serving_peers.ours(folder, "model_config_list {}\n", name="release")
    where = [f"127.0.0.1:{ports['grpc']}"], config
    found = []
    try:
        for number in range(rounds):
            name = f"{NAME}{number}"
            release(storage, name, folder / "exports" / "1", where)
            took = release(storage, name, folder / "exports" / "2", where)
            began = time.monotonic()
            steps.rollback(storage, name, *where, by="benchmark", why="measured")
            took["rollback"] = time.monotonic() - began
            found.append(took)
            say(f"release {number + 1} of {rounds}: " + ", ".join(f"{k} {v:.2f} s" for k, v in took.items()))
        by_command = commands(folder, storage, where)
        say("by the command line: " + ", ".join(f"{k} {v:.2f} s" for k, v in by_command.items()))
    finally:
        server.stop()
    return found, by_command


def commands(folder: Path, storage: Path, where: tuple[list[str], Path]) -> dict[str, float]:
    """Seconds of the commands that release the second version and go back, with the start of their processes."""
    environ = {
        **os.environ,
        "TRAINYARD_STORAGE": str(storage),
        "TRAINYARD_MODEL_SERVER": ",".join(where[0]),
        "TRAINYARD_MODEL_CONFIG": str(where[1]),
    }

    def run(*arguments: object) -> float:
        command = [sys.executable, "-m", "trainyard.cli", "models", *map(str, arguments)]
        began = time.monotonic()
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {done.stderr or done.stdout}")
        return time.monotonic() - began

    run("create", NAME, "--from", folder / "exports" / "1")
    return {
        "create": run("create", NAME, "--from", folder / "exports" / "2"),
        "rollback": run("rollback", NAME),
    }


def release(storage: Path, name: str, export: Path, where: tuple[list[str], Path]) -> dict[str, float]:
    """Publish, deploy, verify and promote an export; seconds a step."""
    took, began = {}, time.monotonic()

    def lap(step: str) -> None:
        nonlocal began
        now = time.monotonic()
        took[step], began = now - began, now

    version = steps.publish_step(storage, name, export)["version"]
    lap("publish")
    steps.deploy_step(storage, name, version, *where)
    lap("deploy")
    steps.verify_step(storage, name, version, *where)
    lap("verify")
    steps.promote_step(storage, name, version, *where, by="benchmark", why="measured")
    lap("promote")
    return took

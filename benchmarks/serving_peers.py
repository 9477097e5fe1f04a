"""The servers that benchmarks/serving.py compares: how each is started, where it listens, what it is asked."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
PREDICT = "/tensorflow.serving.PredictionService/Predict"
START_S = 180.0


class DidNotStart(Exception):
    """A server ended, or said nothing, before it served."""


class Server:
    """A server's processes, from start to end; its log is kept until it serves."""

    def __init__(
        self, command: Sequence[object], log: Path, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [str(part) for part in command], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(HERE.parent), **(env or {})}, cwd=cwd, start_new_session=True,
            )  # fmt: skip
        self._known = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _tree(self) -> list[psutil.Process]:
        return [self._known, *self._known.children(recursive=True)]

    def cpu(self) -> float:
        """CPU seconds of all its processes so far."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._tree()))

    def rss(self) -> int:
        """Resident bytes of all its processes."""
        return sum(process.memory_info().rss for process in self._tree())

    def wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                raise DidNotStart(lines[-1][:200] if lines else f"it ended with {self._process.returncode}")
            time.sleep(0.1)

    def stop(self) -> None:
        tree = self._tree() if self._process.poll() is None else []
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(tree, 15)
        for process in alive:
            process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def ours(folder: Path, config: str, *flags: str, name: str = "ours") -> tuple[Server, dict]:
    """Our server with the given config; the server and its ready file's content."""
    path, ready = folder / f"{name}.config", folder / f"{name}.ready"
    path.write_text(config)
    command = [
        sys.executable, "-m", "serving.server", "--port", 0, "--rest_api_port", 0, "--model_config_file", path,
        "--ready-file", ready, "--file_system_poll_wait_seconds", "0.2", *flags,
    ]  # fmt: skip
    server = Server(command, folder / f"{name}.log")
    try:
        server.wait(ready.exists)
    except DidNotStart:
        server.stop()
        raise
    return server, json.loads(ready.read_text())


def config_of(models: Path, names: Sequence[str]) -> str:
    return "model_config_list {\n" + "".join(
        f'  config {{ name: "{name}" base_path: "{models / name}" model_platform: "tensorflow" }}\n' for name in names
    ) + "}\n"  # fmt: skip


def noop(folder: Path, answer: Path) -> tuple[Server, int]:
    log = folder / f"noop-{answer.stem}.log"
    server = Server([sys.executable, HERE / "peers" / "noop_grpc.py", "--answer", answer], log)
    server.wait(lambda: log.read_text().strip().isdigit())
    return server, int(log.read_text())


def mlflow(folder: Path, model: Path) -> tuple[Server, int]:
    port = free_port()
    command = [
        sys.executable, "-m", "mlflow", "models", "serve", "-m", model, "-p", port, "--env-manager", "local",
    ]  # fmt: skip
    env = {
        "MLFLOW_DISABLE_TELEMETRY": "true", "TF_CPP_MIN_LOG_LEVEL": "3", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # it looks for uvicorn there
    }  # fmt: skip
    server = Server(command, folder / f"mlflow-{model.name}.log", env)
    try:
        server.wait(lambda: answers(f"http://127.0.0.1:{port}/ping"))
    except DidNotStart:
        server.stop()
        raise
    return server, port


def mlserver(folder: Path, python: Path, models: Path, names: Sequence[str]) -> tuple[Server, dict[str, int]]:
    """MLServer with MLflow's runtime: settings files and nothing of ours.

    The model runs in the server's own process, which is quicker here than the pool of worker processes.
    """
    ports = {"http": free_port(), "grpc": free_port(), "metrics": free_port()}
    home = folder / "mlserver"
    home.mkdir()
    settings = {
        "host": "127.0.0.1", "http_port": ports["http"], "grpc_port": ports["grpc"], "metrics_port": ports["metrics"],
        "debug": False, "parallel_workers": 0, "grpc_max_message_length": 128 << 20,
    }  # fmt: skip
    (home / "settings.json").write_text(json.dumps(settings))
    for name in names:
        (home / name).mkdir()
        model = {
            "name": name,
            "implementation": "mlserver_mlflow.MLflowRuntime",
            "parameters": {"uri": str(models / name)},
        }
        (home / name / "model-settings.json").write_text(json.dumps(model))
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    server = Server([python.parent / "mlserver", "start", "."], folder / "mlserver.log", env, home)
    ready = f"http://127.0.0.1:{ports['http']}/v2/models/{{}}/ready"
    try:
        server.wait(lambda: all(answers(ready.format(name)) for name in names))
    except DidNotStart:
        server.stop()
        raise
    return server, ports

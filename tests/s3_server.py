"""A real S3 server (moto's, a process of its own) for tests, behind a door that can be shut."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainers.job.ports import free_ports
from trainers.storage.objects import ObjectStore

SECRET = "not-for-any-log-0123456789"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class Door:
    """A way to a server on loopback that can be shut: then nobody gets an answer, or a connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.port = 0
        self.open()

    def open(self) -> None:
        """Let connections through."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        """Refuse new connections and end the others, in the middle of what they say."""
        if self._listener is None:
            return
        # A thread blocked in accept holds the port until it is woken.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        with self._lock:
            for end in self._open:
                _end(end)
            self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                inner, _ = listener.accept()
                outer = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            with self._lock:
                self._open += [inner, outer]
            for source, target in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass  # shut, or the other side has gone
        _end(source)
        _end(target)


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # ended already
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextlib.contextmanager
def running_moto(folder: Path, *, host: str = "127.0.0.1", **env: str) -> Iterator[int]:
    """The port of moto's server, a process that ends with the block, also when it doesn't come up."""
    (port,) = free_ports(1)
    with (folder / "moto.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)],
            env={**os.environ, **env},
            stdout=log,
            stderr=log,
        )
    try:
        _wait_for_moto(process, f"http://{host}:{port}", folder / "moto.log")
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_for_moto(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        else:
            return


@contextlib.contextmanager
def empty_store(folder: Path, *, host: str = "127.0.0.1") -> Iterator[ObjectStore]:
    """An empty place on a server of its own, which programs find by the environment; its keys are in a file alone."""
    with running_moto(folder, host=host) as port, pytest.MonkeyPatch.context() as patched:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patched.delenv(name)
        known = credentials(port, host=host)
        keys = {name: known.pop(name) for name in KEYS}
        for name, value in known.items():
            patched.setenv(name, value)
        file = folder / "credentials"
        file.touch(mode=0o600)
        file.write_text("\n".join(["[default]", *(f"{name.lower()} = {key}" for name, key in keys.items())]))
        patched.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        yield ObjectStore(make_bucket())


def credentials(port: int, *, host: str = "127.0.0.1", secret: str = SECRET) -> dict[str, str]:
    """The environment of who may use the server at a port, without a look for other credentials."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def make_bucket() -> str:
    """The URL of an empty place in the server that the environment names."""
    import boto3

    name = f"trainyard-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/yard"

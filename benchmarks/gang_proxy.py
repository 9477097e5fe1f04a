"""A loopback proxy before a Kubernetes API server that counts each request: exact, whoever asks."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import secrets
import ssl
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

__all__ = ["CountingProxy", "kind_of"]

_RESOURCE = re.compile(r"/(?:api|apis/[^/]+)/[^/]+/namespaces/[^/]+/(?P<plural>[^/]+)(?P<rest>.*)")
_VERBS = {"POST": "create", "PUT": "replace", "PATCH": "patch", "DELETE": "delete"}
_HEAD = 65536  # bytes of a request's head


def kind_of(method: str, target: str) -> str:
    """What a request is, in Kubernetes' words: "list pods", "get pods/log", "watch pods".

    >>> kind_of("GET", "/api/v1/namespaces/a/pods?labelSelector=x&watch=true")
    'watch pods'
    >>> kind_of("GET", "/api/v1/namespaces/a/pods/p/log?follow=true")
    'get pods/log'
    """
    url = urlsplit(target)
    match = _RESOURCE.fullmatch(url.path)
    if match is None:
        return f"{method.lower()} {url.path}"
    named = [part for part in match["rest"].split("/") if part]
    what = "/".join([match["plural"], *named[1:]])
    if method != "GET":
        return f"{_VERBS[method]} {what}"
    if parse_qs(url.query).get("watch", [""])[0] in ("1", "true", "True"):
        return f"watch {what}"
    return f"{'get' if named else 'list'} {what}"


class CountingProxy:
    """Forwards to the cluster of a kubeconfig and counts; its own kubeconfig is at `kubeconfig`.

    It knows the cluster's credentials, its clients know a token of its own. Runs on a thread, on loopback.
    """

    def __init__(self, upstream: str, kubeconfig: Path, namespace: str) -> None:
        from kubernetes import config

        found: Any = config.new_client_from_config(upstream).configuration
        url = urlsplit(found.host)
        self._host, self._port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        self._tls = _tls_of(found) if url.scheme == "https" else None
        self._bearer = next((row["value"] for row in found.auth_settings().values()), "")
        self._token = secrets.token_urlsafe(16)
        self._kubeconfig, self._namespace = kubeconfig, namespace
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server
        self._thread = threading.Thread(target=self._loop.run_forever, name="counting-proxy", daemon=True)

    def __enter__(self) -> CountingProxy:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD), self._loop
        ).result()
        self._write_kubeconfig(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Leave nobody waiting for an answer."""
        self._server.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.1)  # closed connections go with the loop's next turns

    def counts(self) -> collections.Counter[str]:
        """Requests so far, by kind."""
        with self._lock:
            return self._counts.copy()

    def _write_kubeconfig(self, port: int) -> None:
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "benchmark",
            "clusters": [{"name": "benchmark", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "benchmark", "user": {"token": self._token}}],
            "contexts": [
                {
                    "name": "benchmark",
                    "context": {"cluster": "benchmark", "user": "benchmark", "namespace": self._namespace},
                }
            ],
        }
        self._kubeconfig.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._kubeconfig.touch(mode=0o600)
        self._kubeconfig.write_text(yaml.safe_dump(value))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to: asyncio.StreamWriter | None = None
        answers: asyncio.Task[None] | None = None
        try:
            # A connection that is closed between two requests ends here, and so does the proxy.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    forwarded, length, chunked = self._head(head)
                    if to is None:
                        back, to = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
                        answers = asyncio.create_task(_pump(back, writer))
                    to.write(forwarded)
                    await _body(reader, to, length, chunked)
                    await to.drain()
        finally:
            if answers is not None:
                answers.cancel()
            for each in (writer, to):
                if each is not None:
                    each.close()

    def _head(self, head: bytes) -> tuple[bytes, int, bool]:
        """A request's head as it goes on, its body's length, and whether that comes in chunks."""
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (s.partition(":") for s in lines)
        }
        if headers.pop("authorization", "") != f"Bearer {self._token}":
            raise ConnectionError("a client without the proxy's token")
        with self._lock:
            self._counts[kind_of(method, target)] += 1
        headers["host"] = f"{self._host}:{self._port}"
        if self._bearer:
            headers["authorization"] = self._bearer
        sent = "\r\n".join([first, *(f"{name}: {value}" for name, value in headers.items()), "", ""])
        chunked = "chunked" in headers.get("transfer-encoding", "")
        return sent.encode("latin-1"), int(headers.get("content-length", "0")), chunked


def _tls_of(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _body(reader: asyncio.StreamReader, to: asyncio.StreamWriter, length: int, chunked: bool) -> None:
    if chunked:
        while True:
            size = await reader.readuntil(b"\r\n")
            to.write(size + await reader.readexactly(int(size, 16) + 2))
            if int(size, 16) == 0:
                return
    elif length:
        to.write(await reader.readexactly(length))


async def _pump(back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers in their order, as they come."""
    with contextlib.suppress(ConnectionError):
        while data := await back.read(_HEAD):
            writer.write(data)
            await writer.drain()
    writer.close()

"""TLS for both ports from TF Serving's --ssl_config_file (SSLConfig as text proto).

    server_key: "/run/secrets/tls.key"      # PEM itself, as TF Serving has it, or the path of a PEM file
    server_cert: "/run/secrets/tls.crt"
    custom_ca: "/run/secrets/ca.crt"        # who signs the clients' certificates
    client_verify: true                     # refuse clients without one

Certificates that change on disk are used for the connections that come after: no restart at renewal.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from serving.errors import ConfigInvalid
from serving.server.protos import SSLConfig, read_text

__all__ = ["Tls"]

log = logging.getLogger(__name__)

_WATCH_S = 5.0


@dataclass(frozen=True)
class _Pems:
    key: bytes
    cert: bytes
    ca: bytes | None
    client_verify: bool


class Tls:
    """Credentials of one config file. Raises ConfigInvalid where it or a file it names is wrong."""

    def __init__(self, path: Path, watch_s: float = _WATCH_S) -> None:
        self._path = path
        self._pems = _read(path)
        self.client_verify = self._pems.client_verify
        # One context for the server's life: a chain that is loaded again serves the next handshakes.
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        _fill(self.context, self._pems, path)
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(watch_s,), name="tls", daemon=True)
        self._watcher.start()

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files."""
        served = self._pems

        def fetch() -> Any:
            nonlocal served
            if self._pems is served:
                return None  # keep what is there
            served = self._pems
            return _grpc_config(served)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_config(served), fetch, require_client_authentication=self.client_verify
        )

    def close(self) -> None:
        """Stop following the files."""
        self._stopped.set()

    def _watch(self, every_s: float) -> None:
        while not self._stopped.wait(every_s):
            try:
                pems = _read(self._path)
                if pems == self._pems:
                    continue
                _fill(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pems, self._path)  # a bad pair must not get in
                _fill(self.context, pems, self._path)
            except ConfigInvalid as e:
                log.error("new certificates are not taken over, those before stay in use: %s", e)
                continue
            self._pems = pems
            log.info("certificates of %s have changed and are used from now on", self._path)


def _read(path: Path) -> _Pems:
    config = read_text(path, SSLConfig(), "ssl config file")
    for name in ("server_key", "server_cert"):
        if not getattr(config, name):
            raise ConfigInvalid(f"ssl config file {path} must have a {name}")
    if config.client_verify and not config.custom_ca:
        raise ConfigInvalid(f"ssl config file {path} has client_verify without a custom_ca to verify against")
    return _Pems(
        _pem(config.server_key, "server_key", path),
        _pem(config.server_cert, "server_cert", path),
        _pem(config.custom_ca, "custom_ca", path) if config.custom_ca else None,
        config.client_verify,
    )


def _pem(value: str, name: str, path: Path) -> bytes:
    if "-----BEGIN" in value:
        return value.encode()
    try:
        data = (path.parent / value).read_bytes()
    except (OSError, ValueError) as e:
        raise ConfigInvalid(
            f"{name} of {path} must be PEM or the path of a PEM file: {getattr(e, 'strerror', None) or e}"
        ) from None
    if b"-----BEGIN" not in data:
        raise ConfigInvalid(f"{name} of {path} names a file that is not PEM")
    return data


def _fill(context: ssl.SSLContext, pems: _Pems, path: Path) -> None:
    try:
        # OpenSSL wants a file; one in memory keeps the key off the disk.
        handle = os.memfd_create("tls")
        try:
            os.write(handle, pems.cert.rstrip() + b"\n" + pems.key.rstrip() + b"\n")
            context.load_cert_chain(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
        if pems.ca is not None:
            context.load_verify_locations(cadata=pems.ca.decode("ascii"))
    except (ssl.SSLError, OSError, ValueError) as e:
        raise ConfigInvalid(f"certificates of {path} can't be used: {e}") from None
    if pems.client_verify:
        context.verify_mode = ssl.CERT_REQUIRED


def _grpc_config(pems: _Pems) -> Any:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

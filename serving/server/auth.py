"""API tokens (`authorization: Bearer TOKEN` in gRPC metadata and HTTP headers), and who may do without.

The token file has one token a line (several, so that a new one can be handed out before the old one goes);
empty lines and lines that begin with # are skipped. It is read again when it changes. Tokens of an admin file may do
all that the others may, and change what is served.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from serving.errors import ConfigInvalid

__all__ = ["EXEMPT", "TokenInterceptor", "Tokens", "check_exposure", "tokens_of"]

log = logging.getLogger(__name__)

EXEMPT = ("health", "metrics", "metadata")
_HEALTH = "/grpc.health.v1.Health/"
_RELOAD = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
_SHORTEST = 16  # characters; shorter ones can be guessed over the network
_LOOK_S = 1.0
MISSING = "An API token is needed: send the header 'authorization: Bearer TOKEN'"
WRONG = "The API token is not valid here"
NOT_ADMIN = "Changing what is served needs an admin token"


class Tokens:
    """The tokens of a file. Raises ConfigInvalid where the file can't be read or holds a bad token at the start.

    With `admin`, tokens of that file are good here too, and are the only ones that may change what is served.
    """

    def __init__(
        self,
        path: Path,
        exempt: tuple[str, ...] = ("health",),
        clock: Callable[[], float] = time.monotonic,
        admin: Tokens | None = None,
    ) -> None:
        for name in exempt:
            if name not in EXEMPT:
                raise ConfigInvalid(f"api_token_exempt must be of {', '.join(EXEMPT)}, got {name!r}")
        self._path = path
        self._exempt = exempt
        self._clock = clock
        self._admin = admin
        self._lock = threading.Lock()
        self._looked = clock()
        self._identity, self._digests = self._read()

    def exempt(self, what: str) -> bool:
        """True where "health", "metrics", or "metadata" (signatures, over REST) need no token."""
        return what in self._exempt

    def refusal(self, header: str | bytes | None) -> str | None:
        """Why this authorization header is not good enough; None where it is."""
        refusal = self._own_refusal(header)
        return refusal if refusal is None or self._admin is None else self._admin._own_refusal(header)

    def refusal_to_change(self, header: str | bytes | None) -> str | None:
        """The same for a call that changes what is served."""
        if self._admin is None:
            return self._own_refusal(header)
        refusal = self._admin._own_refusal(header)
        return NOT_ADMIN if refusal is WRONG and self._own_refusal(header) is None else refusal

    def _own_refusal(self, header: str | bytes | None) -> str | None:
        if header is None:
            return MISSING
        text = header if isinstance(header, bytes) else header.encode("utf-8", "replace")
        scheme, _, token = text.partition(b" ")
        if scheme.lower() != b"bearer":
            return MISSING
        digest, found = hashlib.sha256(token.strip()).digest(), False
        for known in self._current():  # all of them, so that the time tells nothing of which one was near
            found |= hmac.compare_digest(known, digest)
        return None if found else WRONG

    def _current(self) -> tuple[bytes, ...]:
        if self._clock() - self._looked >= _LOOK_S and self._lock.acquire(blocking=False):
            try:
                self._looked = self._clock()
                if _identity(self._path) != self._identity:
                    self._identity, self._digests = self._read()
                    log.info("api token file %s is read again: %d tokens", self._path, len(self._digests))
            except (OSError, ConfigInvalid) as e:
                log.error("api token file is not taken over, the tokens before stay in force: %s", e)
            finally:
                self._lock.release()
        return self._digests

    def _read(self) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        try:
            identity = _identity(self._path)
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigInvalid(f"api token file {self._path} can't be read: {e}") from None
        tokens = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not tokens:
            raise ConfigInvalid(f"api token file {self._path} must hold one token a line, got none")
        if any(len(token) < _SHORTEST or not token.isascii() or " " in token for token in tokens):
            raise ConfigInvalid(
                f"tokens of {self._path} must be {_SHORTEST} or more ASCII characters without spaces",
                hint="make one by: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
        if self._path.stat().st_mode & 0o077:
            log.warning("api token file %s can be read by others than its owner: chmod 600 it", self._path)
        return identity, tuple(hashlib.sha256(token.encode()).digest() for token in tokens)


def tokens_of(path: Path | None, exempt: tuple[str, ...], admin: Path | None) -> Tokens | None:
    """The tokens of a server's flags, None without any. Raises ConfigInvalid as `Tokens` does."""
    if path is None:
        if admin is not None:
            raise ConfigInvalid("--admin_token_file needs --api_token_file: without it everybody may predict")
        return None
    return Tokens(path, exempt, admin=Tokens(admin) if admin is not None else None)


def check_exposure(host: str, *, tls: bool, authenticated: bool, insecure: bool) -> None:
    """Raises ConfigInvalid for an address that others reach without TLS and without proof of who they are."""
    if insecure or _is_loopback(host):
        return
    lacks = [
        text
        for there, text in (
            (tls, "--ssl_config_file"),
            (authenticated, "--api_token_file (or client_verify in the ssl config)"),
        )
        if not there
    ]
    if lacks:
        raise ConfigInvalid(
            f"--host {host} can be reached from other machines and needs {' and '.join(lacks)}",
            hint="--allow_insecure_host says that something else protects it, like a NetworkPolicy or a mesh",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _identity(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


class TokenInterceptor(grpc.ServerInterceptor):
    """Answers calls without a good token UNAUTHENTICATED before their message is read.

    A reload with a token that is not an admin's gets PERMISSION_DENIED.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        denied, unknown = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
        self._refusals = {
            text: _refuse(code, text)
            for text, code in ((MISSING, unknown), (WRONG, unknown), (NOT_ADMIN, denied))
        }

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        if details.method.startswith(_HEALTH) and self._tokens.exempt("health"):
            return continuation(details)
        header = next((v for k, v in details.invocation_metadata if k == "authorization"), None)
        changes = details.method == _RELOAD
        refusal = (self._tokens.refusal_to_change if changes else self._tokens.refusal)(header)
        return continuation(details) if refusal is None else self._refusals[refusal]


def _refuse(code: grpc.StatusCode, message: str) -> grpc.RpcMethodHandler:
    def abort(request: Any, context: grpc.ServicerContext) -> None:
        context.abort(code, message)

    return grpc.unary_unary_rpc_method_handler(abort)

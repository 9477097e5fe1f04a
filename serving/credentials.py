"""What a client needs to reach a server with TLS or tokens: files, named by arguments or the environment.

    TRAINYARD_SERVING_CA          PEM of who signed the server's certificate; means TLS
    TRAINYARD_SERVING_CERT, _KEY  PEM files of the client's own certificate, where the server verifies it
    TRAINYARD_SERVING_TOKEN_FILE  the API token, the first line of a file; never on a command line

Secrets are read from files when a connection is made (tokens again when the file changes), and never logged.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import ConfigInvalid

__all__ = ["Credentials"]


@dataclass(frozen=True)
class Credentials:
    """Paths of a client's secrets; all None is a plain connection without a token."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigInvalid("cert_file and key_file of a client must be given together")
        if self.cert_file is not None and self.ca_file is None:
            raise ConfigInvalid("cert_file of a client needs ca_file, which says that TLS is spoken")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Credentials:
        """What the TRAINYARD_SERVING_* variables name; empty ones count as not set."""

        def path(name: str) -> Path | None:
            value = environment.get(f"TRAINYARD_SERVING_{name}")
            return Path(value) if value else None

        return cls(path("CA"), path("CERT"), path("KEY"), path("TOKEN_FILE"))

    @property
    def tls(self) -> bool:
        return self.ca_file is not None

    def token(self) -> str | None:
        """The token, None where there is none; raises ConfigInvalid where its file can't be read."""
        if self.token_file is None:
            return None
        lines = _read(self.token_file).decode("ascii", "replace").split("\n")
        token = next((t for line in lines if (t := line.strip()) and not t.startswith("#")), "")
        if not token:
            raise ConfigInvalid(f"token file {self.token_file} must hold a token, got none")
        return token

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata, or HTTP headers, that show the token."""
        token = self.token()
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def grpc_credentials(self) -> Any:
        """grpc.ChannelCredentials, None for a plain channel."""
        if self.ca_file is None:
            return None
        import grpc

        return grpc.ssl_channel_credentials(
            _read(self.ca_file),
            None if self.key_file is None else _read(self.key_file),
            None if self.cert_file is None else _read(self.cert_file),
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """For HTTPS; None where the system's own certificates will do."""
        if self.ca_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=str(self.ca_file))
            if self.cert_file is not None:
                context.load_cert_chain(str(self.cert_file), str(self.key_file))
        except (OSError, ssl.SSLError) as e:
            raise ConfigInvalid(f"certificates of the client can't be used: {e}") from None
        return context


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise ConfigInvalid(f"{path} can't be read: {e.strerror or e}") from None

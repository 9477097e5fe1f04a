"""The platform's generated keys and passwords: made once, files of mode 0600, never on a command line."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["AIRFLOW_USER", "Keys", "make_keys"]

AIRFLOW_USER = "admin"


@dataclass(frozen=True)
class Keys:
    """What Airflow's processes share, and the password people log in with; nothing of it shows in a repr."""

    fernet_key: str = field(repr=False)
    api_secret_key: str = field(repr=False)
    jwt_secret: str = field(repr=False)
    airflow_password: str = field(repr=False)
    passwords_file: Path


def make_keys(folder: Path) -> Keys:
    """The keys of `folder`, made where they are missing; a second call gives the same ones.

    Files are written whole or not at all, readable by their owner only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    passwords_file = folder / "airflow-passwords.json"
    passwords = json.loads(
        _once(passwords_file, lambda: json.dumps({AIRFLOW_USER: secrets.token_urlsafe(12)}) + "\n")
    )
    return Keys(
        # Fernet's form: 32 random bytes in URL-safe base64.
        fernet_key=_once(
            folder / "airflow-fernet-key", lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
        ),
        api_secret_key=_once(folder / "airflow-api-secret-key", lambda: secrets.token_urlsafe(48)),
        # HS512 signs with 64 bytes.
        jwt_secret=_once(folder / "airflow-jwt-secret", lambda: secrets.token_urlsafe(64)),
        airflow_password=passwords[AIRFLOW_USER],
        passwords_file=passwords_file,
    )


def _once(path: Path, make: Callable[[], str]) -> str:
    """The text of a secret file, made if there is none; the first of two makers wins."""
    if not path.exists():
        temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(make())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temp, path)
            except FileExistsError:
                return path.read_text()
        finally:
            temp.unlink(missing_ok=True)
    path.chmod(0o600)
    return path.read_text()

"""The first step of the compose deployment: what must be in the volumes before anything else starts.

It runs once, without a network and without root: a named volume takes the owner of the image's folder that it is
first mounted over. Files that exist are left alone, except the password file, which follows `.env`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDERS = ("storage", "kubelet", "kubeconfig", "airflow-logs", "airflow-auth", "minio")
ADMIN = "admin"


class NotPrepared(Exception):
    """A volume can't be used; the message says what to do."""


def write(path: Path, text: str, mode: int) -> None:
    """Write a file whole or not at all."""
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    temp.unlink(missing_ok=True)
    with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temp.replace(path)


def prepare(root: Path, environ: Mapping[str, str]) -> list[str]:
    """Prepare the volumes under `root`; returns a line for each thing done.

    Raises:
        NotPrepared: a volume is missing or belongs to somebody else, or there is no password.
    """
    password = environ.get("AIRFLOW_ADMIN_PASSWORD", "")
    if not password:
        raise NotPrepared("AIRFLOW_ADMIN_PASSWORD must not be empty; run deploy/compose/make-env")
    for name in FOLDERS:
        folder = root / name
        if not folder.is_dir():
            raise NotPrepared(f"{folder} must be a folder: no volume is mounted there")
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise NotPrepared(
                f"{folder} must be writable by user {os.getuid()}, it belongs to {folder.stat().st_uid}; "
                f"chown the volume to {os.getuid()}:{os.getgid()}, or remove it if it holds nothing"
            )
    done = []
    passwords = root / "airflow-auth" / "passwords.json"
    write(passwords, json.dumps({ADMIN: password}) + "\n", 0o600)
    done.append(f"wrote {passwords}")
    config = root / "storage" / "serving" / "models.config"
    if not config.exists():
        # The model server does not start without the file; an empty one serves nothing yet.
        config.parent.mkdir(parents=True, exist_ok=True)
        write(config, "", 0o644)
        done.append(f"made an empty {config}")
    return done


def main() -> int:
    """The exit code of the step."""
    try:
        for line in prepare(Path(os.environ.get("TRAINYARD_HOME", "/var/lib/trainyard")), os.environ):
            print(line)
    except NotPrepared as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

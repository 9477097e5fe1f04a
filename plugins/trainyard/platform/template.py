"""Fresh databases made ahead: migrating empty ones costs 5 s of a first start, copying a file costs nothing.

`python -m trainyard.platform.template` makes them beside the installed packages (the Makefile does so after
an installation). Without them a first start migrates by itself.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from trainyard.platform.services import base_environment

__all__ = ["airflow_version", "copy_airflow_database", "main", "template_path"]


def airflow_version() -> str:
    """The version of Airflow whose database schema this installation needs."""
    return version("apache-airflow-core")


def template_path() -> Path:
    """Where this installation's migrated and empty Airflow database is, once it was made."""
    return Path(sys.prefix) / "share" / "trainyard" / f"airflow-{airflow_version()}.db"


def copy_airflow_database(target: Path) -> bool:
    """Put a migrated, empty database at `target`; False when there is no template."""
    source = template_path()
    if not source.exists():
        return False
    temp = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, temp)
    temp.chmod(0o600)
    temp.replace(target)
    return True


def main() -> int:
    """Make the template of this installation, unless it is there."""
    target = template_path()
    if target.exists():
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trainyard-template-") as folder:
        database = Path(folder) / "airflow.db"
        environ = base_environment() | {
            "AIRFLOW_HOME": folder,
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{database}",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        }
        airflow = str(Path(sys.executable).with_name("airflow"))
        done = subprocess.run(
            [airflow, "db", "migrate"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.stderr.write(done.stdout)
            sys.stderr.write("could not make the database template; the first start will take longer\n")
            return done.returncode
        temp = target.with_name(f".{target.name}.{os.getpid()}")
        connection = sqlite3.connect(database)
        try:
            connection.execute("VACUUM INTO ?", (str(temp),))  # whole, without a write-ahead log beside it
        finally:
            connection.close()
        temp.replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Check, without a network, that the locks are in step with their .in files and that every pin has hashes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parent.parent
LOCKS = {
    "requirements.txt": ("requirements.in",),
    "requirements-dev.txt": ("requirements.in", "requirements-dev.in"),
    "requirements-spark.txt": ("requirements-spark.in",),
    "scripts/uv.txt": ("scripts/uv.in",),
    "deploy/docker/requirements-airflow.txt": ("deploy/docker/requirements-airflow.in",),
    "deploy/docker/requirements-mlflow.txt": ("deploy/docker/requirements-mlflow.in",),
    "deploy/docker/requirements-serving.txt": ("deploy/docker/requirements-serving.in",),
    "deploy/docker/requirements-trainer.txt": ("deploy/docker/requirements-trainer.in",),
    "deploy/docker/requirements-trainer-cpu.txt": ("deploy/docker/requirements-trainer-cpu.in",),
}
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^ ;\\]+)(?P<rest>.*)$")


def wanted(path: Path) -> list[Requirement]:
    """The requirements of a .in file."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def pins(path: Path) -> dict[str, list[tuple[str, int]]]:
    """The pins of a lock: name to (version, number of hashes); one name may have a pin for each Python."""
    found: dict[str, list[tuple[str, int]]] = {}
    for line in path.read_text().splitlines():
        if match := _PIN.match(line):
            name = canonicalize_name(match["name"])
            found.setdefault(name, []).append((match["version"], 0))
        elif "--hash=" in line:
            version, hashes = found[name][-1]
            found[name][-1] = (version, hashes + 1)
    return found


def faults(repo: Path = REPO) -> list[str]:
    """One line for everything that is out of step; `make lock` mends it."""
    told = []
    for lock, inputs in LOCKS.items():
        locked = pins(repo / lock)
        told += [
            f"{lock}: {name} has no hash" for name, found in locked.items() if any(not n for _, n in found)
        ]
        for source in inputs:
            for requirement in wanted(repo / source):
                found = locked.get(canonicalize_name(requirement.name))
                if not found:
                    told.append(f"{lock}: {requirement.name} of {source} is not locked")
                elif not all(
                    requirement.specifier.contains(version, prereleases=True) for version, _ in found
                ):
                    told.append(
                        f"{lock}: {requirement.name} is locked at {found[0][0]}, {source} wants {requirement}"
                    )
    run, dev = pins(repo / "requirements.txt"), pins(repo / "requirements-dev.txt")
    told += [
        f"requirements-dev.txt: {name} differs from requirements.txt"
        for name in run
        if dev.get(name) != run[name]
    ]
    return told


def main() -> int:
    """Print what is out of step; 1 when something is."""
    told = faults()
    if told:
        print("\n".join([*told, "make lock renews them"]))
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())

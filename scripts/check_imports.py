"""Check who imports whom: the walls between the rooms, inside functions too (ruff guards module level only)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Wall:
    """Files below `room` must not import `banned`; with `only_standard`, only the standard library and itself."""

    room: str
    banned: tuple[str, ...] = ()
    only_standard: bool = False
    reason: str = ""


WALLS = (
    Wall("trainers/job", only_standard=True, reason="it is read everywhere, also where nothing is installed"),
    Wall("trainers", ("airflow", "trainyard", "serving"), reason="it runs in replicas, where Airflow isn't"),
    Wall(
        "serving", ("airflow", "trainyard", "trainers"), reason="it reads what the export wrote, nothing else"
    ),
    Wall("plugins/trainyard/kubelet", ("airflow",), reason="it stands for a cluster, which knows no Airflow"),
    Wall(
        "plugins/trainyard/platform",
        ("airflow",),
        reason="it starts Airflow; importing it costs seconds a command",
    ),
)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every absolute import of a file."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def breaches(repo: Path = REPO) -> list[str]:
    """One line for every import that goes through a wall."""
    found = []
    for wall in WALLS:
        own = wall.room.removeprefix("plugins/").replace("/", ".")
        for path in sorted((repo / wall.room).rglob("*.py")):
            for line, name in imported(path):
                top = name.split(".")[0]
                foreign = top not in sys.stdlib_module_names and not f"{name}.".startswith(f"{own}.")
                if top in wall.banned or (wall.only_standard and foreign):
                    where = path.relative_to(repo)
                    found.append(f"{where}:{line}: {wall.room} must not import {name}: {wall.reason}")
    return found


def main() -> int:
    """Print the breaches; 1 when there is one."""
    found = breaches()
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

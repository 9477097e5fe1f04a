"""docker-compose.yaml and .env.example as values, for the tests of this folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yaml"
ENV_EXAMPLE = ROOT / ".env.example"

# ${NAME}, ${NAME:-default}, ${NAME:?message}
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<how>[-?])(?P<rest>[^}]*))?\}")


def raw() -> dict[str, Any]:
    """The file with anchors and merges resolved and variables as they are written."""
    return yaml.safe_load(COMPOSE.read_text())


def services() -> dict[str, dict[str, Any]]:
    """The services by name, variables as they are written."""
    return raw()["services"]


def env_example() -> dict[str, str]:
    """The NAME=value lines of .env.example."""
    lines = [line for line in ENV_EXAMPLE.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def interpolated(value: Any, environ: dict[str, str]) -> Any:
    """`value` with its variables replaced as compose does it."""
    if isinstance(value, dict):
        return {key: interpolated(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, environ) for item in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda m: environ.get(m["name"]) or (m["rest"] if m["how"] == "-" else ""), value)
    return value


def is_one_shot(service: dict[str, Any]) -> bool:
    """Whether a service is a step that ends."""
    return service["restart"] == "no"


def command(service: dict[str, Any]) -> list[str]:
    """The service's whole command line."""
    return [*service.get("entrypoint", []), *service.get("command", [])]

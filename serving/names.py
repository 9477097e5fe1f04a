"""Names of models, as they may stand in URLs, paths and config files."""

from __future__ import annotations

import re

from serving.errors import ConfigInvalid

__all__ = ["check_name"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_name(name: str) -> str:
    """The name itself; raises ConfigInvalid where it could leave its folder or break a URL."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigInvalid(
            "a model's name must be 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter, digit "
            f"or '_', got {name!r}"
        )
    return name

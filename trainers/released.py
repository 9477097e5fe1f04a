"""A released version as pods find it: its SavedModel's folder, what its manifest says, and its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job.errors import DataError
from trainers.job.files import read_json
from trainers.records.manifest import MANIFEST, Manifest

__all__ = ["ReleaseUnreadable", "Released"]

_EXPORT = "export.json"


class ReleaseUnreadable(DataError):
    """A released version isn't there, or has no manifest."""

    code = "release.unreadable"


@dataclasses.dataclass(frozen=True)
class Released:
    """One version of a model; `info` is its export's manifest."""

    name: str
    version: int
    path: Path
    info: Mapping[str, Any]

    @classmethod
    def open(cls, name: str, path: Path | str) -> Released:
        """The version in a folder models/NAME/VERSION; ReleaseUnreadable when there is none."""
        path = Path(path)
        info = read_json(path / _EXPORT)
        if not isinstance(info, dict) or not path.name.isdigit() or not (path / "saved_model.pb").is_file():
            raise ReleaseUnreadable(
                f"{path} is no released version", hint="it may have been pruned; name one that is published"
            )
        return cls(name, int(path.name), path, info)

    @property
    def digest(self) -> str:
        """The digest of its files."""
        return str(self.info.get("digest", ""))

    def inputs(self, signature: str = "serving_default") -> Mapping[str, Any]:
        """Names, types and shapes that a signature takes; {} without that signature."""
        return dict((self.info.get("signatures") or {}).get(signature, {}).get("inputs", {}))

    def outputs(self, signature: str = "serving_default") -> Mapping[str, Any]:
        """The same of what it answers."""
        return dict((self.info.get("signatures") or {}).get(signature, {}).get("outputs", {}))

    def records(self, root: Path | str) -> Manifest | None:
        """The dataset that it was trained on, by its digest, of those under `root`; None when it is not there."""
        digest = self.info.get("records_digest")
        for path in sorted(Path(root).glob(f"*/*/{MANIFEST}")) if digest else ():
            if (read_json(path) or {}).get("digest") == digest:
                return Manifest.load(path)
        return None

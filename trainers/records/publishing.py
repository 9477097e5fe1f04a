"""The folder of a dataset: who may write it now, what it holds already, and what is cleared away.

A lock keeps two runs of one dataset apart; where there is none, both write the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainers.records.errors import DatasetCorrupt, DatasetMissing, RecordsError, UnitsMissing
from trainers.records.locks import exclusive
from trainers.records.manifest import MANIFEST, QUARANTINE, Manifest, told
from trainers.records.quality import DRIFT, REPORT
from trainers.records.write import TEMP_SUFFIX

__all__ = ["Prepared", "Progress", "existing", "lock_of", "publishing"]

Progress = Callable[[str], None]


class Prepared(NamedTuple):
    """A dataset, and whether it was there before."""

    manifest: Manifest
    reused: bool

    def answer(self) -> dict[str, Any]:
        """What a step answers, a JSON value."""
        return {
            "manifest": str(self.manifest.path),
            "digest": self.manifest.digest,
            "counts": dict(self.manifest.counts),
            "reused": self.reused,
            "quarantined": self.manifest.quarantined,
        }


def publishing(folder: Path, progress: Progress, make: Callable[[], Manifest]) -> Prepared:
    """The dataset of a folder: as it is, or as `make` publishes it. One run at a time, none beside slices."""
    folder.parent.mkdir(parents=True, exist_ok=True)

    def waiting() -> None:
        progress(f"another run is preparing {folder}; waiting for it")

    with exclusive(lock_of(folder), waiting) as locked:
        manifest = existing(folder, progress)
        if manifest is not None:
            if locked:
                _clear(folder)
            progress(f"nothing to do: {folder} holds this dataset, digest {manifest.digest[:16]}")
            return Prepared(manifest, reused=True)
        folder.mkdir(exist_ok=True)
        if locked:
            _clear(folder, TEMP_SUFFIX)
        try:
            manifest = make()
        except UnitsMissing:
            raise  # what is there is good: whoever writes the rest goes on from it
        except RecordsError:
            # The data must change, and then so does the fingerprint: nobody will go on from here.
            if locked:
                _discard(folder)
            raise
        if locked:
            _clear(folder)
    progress(
        f"published {folder}: {told(manifest.counts)} records, "
        f"{manifest.quarantined} quarantined, digest {manifest.digest[:16]}"
    )
    return Prepared(manifest, reused=False)


def lock_of(folder: Path) -> Path:
    """The file by whose lock runs of one dataset keep out of each other's way."""
    return folder.with_name(f".{folder.name}.lock")


def existing(folder: Path, progress: Progress) -> Manifest | None:
    """The dataset in a folder, None when there is none or it is damaged."""
    try:
        manifest = Manifest.load(folder / MANIFEST)
        manifest.verify()
    except DatasetMissing:
        return None
    except DatasetCorrupt as e:
        progress(f"{e.message}: writing the dataset anew")
        (folder / MANIFEST).unlink()
        return None
    return manifest


def _clear(folder: Path, suffix: str = "") -> None:
    """Remove what was needed on the way only: all hidden files, or those with a suffix."""
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith(suffix):
            path.unlink(missing_ok=True)


def _discard(folder: Path) -> None:
    """Remove everything but what says why there is no dataset: the quarantine, the drift and its report."""
    for path in folder.iterdir():
        if path.name not in (QUARANTINE, DRIFT, REPORT):
            path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()

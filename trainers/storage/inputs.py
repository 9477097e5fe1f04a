"""What a step or replica must have on its own disk before it starts: datasets, jobs, models, raw files.

A path of the storage root in a step's spec is looked up in the store: a manifest brings its shards, a job's folder
its record and the newest checkpoints with the records that it trains on, a file itself, a folder all that is in it.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainers.job.errors import ConfigError, InvalidSpec
from trainers.storage.checkpoints import CheckpointSets, identity_of
from trainers.storage.mirror import Mirror
from trainers.storage.places import key_below

__all__ = ["check_step", "fetch_checkpoints", "fetch_dataset", "fetch_step", "sets_of"]

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_HEAVY_IN_JOBS = ("checkpoints", "history", "stacks", "logs")
# Steps that look at a job, but not at its weights.
_NO_WEIGHTS = ("trainers.register",)
# Steps of ours that work on folders as a whole, by what each pod of several leaves for the next.
_UNSUPPORTED = {"trainers.score": "batch scoring", "trainers.monitor": "monitoring"}
_SLICED = ("plan", "encode", "publish")


def check_step(module: str, spec: Mapping[str, Any]) -> None:
    """Raise ConfigError for a step that can't work on an object store."""
    what = _UNSUPPORTED.get(module)
    if module == "trainers.records" and spec.get("step") in _SLICED:
        what = "preparing records in slices"
    if what:
        raise ConfigError(
            f"{what} needs a storage root that pods share, and TRAINYARD_STORE is an object store",
            hint="use a shared file system (TRAINYARD_STORAGE_CLAIM)"
            + ("; slices=1 works" if module == "trainers.records" else ""),
        )


def fetch_step(mirror: Mirror, module: str, spec: Mapping[str, Any]) -> None:
    """Bring what the spec of a step names; a place that is empty is left so, for the step to find or to fill."""
    check_step(module, spec)
    for field, key in _places(spec, mirror.root):
        if not key:
            raise InvalidSpec(field, "be a place below the storage root, not all of it", str(mirror.root))
        if module == "trainers.records" and field == "output":
            # What is known of datasets before, without their shards: for baselines, windows and spans.
            mirror.pull(key, lambda key: key.endswith(".json"))
            continue
        _fetch_place(mirror, key, weights=module not in _NO_WEIGHTS)


def _places(value: Any, root: Path, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        key = key_below(value, root)
        if key is not None:
            yield field, key
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _places(item, root, name)
    elif isinstance(value, list):
        for item in value:
            yield from _places(item, root, field)


def _fetch_place(mirror: Mirror, key: str, *, weights: bool) -> None:
    if posixpath.basename(key) == _MANIFEST:
        fetch_dataset(mirror, key)
        return
    listing = mirror.store.find(key)
    if f"{key}/plan.json" in listing and f"{key}/generations/0001.json" in listing:
        heavy = tuple(f"{key}/{name}/" for name in _HEAVY_IN_JOBS)
        mirror.pull(key, lambda k: not k.startswith(heavy), listing)
        if weights:
            fetch_checkpoints(mirror, key, count=2)
        job = json.loads((mirror.root / key / "plan.json").read_bytes())["job"]
        manifest = key_below(str(job.get("inputs", {}).get("records", "")), mirror.root)
        if weights and manifest:
            fetch_dataset(mirror, manifest)
    elif f"{key}/{_MANIFEST}" in listing:
        fetch_dataset(mirror, f"{key}/{_MANIFEST}")
    else:
        mirror.pull(key, lambda _: True, listing)


def fetch_dataset(mirror: Mirror, key: str) -> None:
    """Bring the dataset of the manifest at `key`: its shards, wherever they are, and what is beside the manifest."""
    folder = posixpath.dirname(key)
    mirror.pull(folder, lambda k: not k.endswith(".tfrecord"))
    path = mirror.root / key
    if not path.exists():
        return  # whoever opens it says so
    try:
        files = {
            posixpath.normpath(f"{folder}/{shard['file']}")
            for shard in json.loads(path.read_bytes())["shards"]
        }
    except (ValueError, KeyError, TypeError) as e:
        log.warning("%s is no manifest of records: %r; its folder is taken as it is", key, e)
        mirror.pull(folder, lambda _: True)
        return
    for place in sorted({posixpath.dirname(file) for file in files}):
        mirror.pull(place, lambda k: k in files or not k.endswith(".tfrecord"))


def sets_of(mirror: Mirror, job: str) -> CheckpointSets:
    """The checkpoints of the job whose folder is at the key `job`, whose plan is here."""
    folder = mirror.root / job
    return CheckpointSets(
        mirror.store, f"{job}/checkpoints", folder / "checkpoints", identity_of(folder, mirror.root)
    )


def fetch_checkpoints(mirror: Mirror, job: str, *, count: int) -> None:
    """Bring the newest checkpoints of a job, and its plan."""
    mirror.pull(job, lambda key: key == f"{job}/plan.json")
    found = sets_of(mirror, job).fetch(count)
    if found:
        log.info("brought %s of %s", ", ".join(saved.name for saved in found), job)

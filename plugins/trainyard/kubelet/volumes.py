"""Volumes as folders, and what stands for a mount where nothing can be mounted.

A process has no mount namespace of its own, so a volume that a manifest mounts at `/mnt/data` can't appear
there. Instead, every mention of that path in the container's env values, command, args and working directory is
replaced by the real folder: at path boundaries only, so `/mnt/data/x`, `file:///mnt/data` and `A=/mnt/data` are
changed and `/mnt/database` is not. A hostPath whose path is its mountPath needs nothing, nor does an emptyDir at
/tmp, the scratch of pods whose root can't be written: a process has the machine's. Read-only mounts are not enforced.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard.kubelet.resources import RESOURCES
from trainyard.kubelet.store import Store

__all__ = ["VOLUME_TYPES", "MountError", "Mounts", "VolumeManager"]

VOLUME_TYPES = ("emptyDir", "hostPath", "persistentVolumeClaim", "configMap", "secret")


_TMP = Path("/tmp")  # noqa: S108 - what a manifest says, not a file of ours


class MountError(Exception):
    """A volume can't be had now; it is tried again."""


@dataclasses.dataclass(frozen=True)
class Mounts:
    """Where a container's mount paths really are: (mount path, real path) pairs."""

    pairs: tuple[tuple[str, str], ...] = ()

    def resolve(self, text: str) -> str:
        """`text` with every mount path in it replaced by its real path.

        >>> Mounts((("/data", "/tmp/v"),)).resolve("cp /data/a file:///data /database a/data")
        'cp /tmp/v/a file:///tmp/v /database a/data'
        """
        real = {
            path.rstrip("/"): target for path, target in self.pairs if path.rstrip("/") not in ("", target)
        }
        if not real:
            return text
        # The longest first, so that a mount inside a mount wins; one pass, so that nothing is replaced twice.
        choices = "|".join(re.escape(path) for path in sorted(real, key=len, reverse=True))
        pattern = rf"(?:(?<=://)|(?<![\w./~-]))(?:{choices})(?![\w.~-])"
        return re.sub(pattern, lambda found: real[found[0]], text)


class VolumeManager:
    """Makes the folders of pods' volumes under `root`; claims keep theirs until they are deleted."""

    def __init__(self, root: Path, store: Store) -> None:
        self._root = root
        self._store = store

    def prepare(self, pod: Mapping[str, Any], folder: Path) -> dict[str, Path]:
        """The real path of each volume of the pod, by name; MountError when one can't be had yet."""
        namespace = pod["metadata"]["namespace"]
        return {
            volume["name"]: _TMP
            if _is_scratch(volume, pod["spec"])
            else self._prepare(volume, namespace, folder / volume["name"])
            for volume in pod["spec"].get("volumes") or ()
        }

    def mounts(
        self, container: Mapping[str, Any], paths: Mapping[str, Path], more: Sequence[tuple[str, str]] = ()
    ) -> Mounts:
        """The mounts of one container; makes the folders of their sub-paths."""
        pairs = list(more)
        for mount in container.get("volumeMounts") or ():
            target = paths[mount["name"]]
            if mount.get("subPath"):
                target = target / mount["subPath"]
                if not target.exists():
                    target.mkdir(parents=True)
            pairs.append((mount["mountPath"], str(target)))
        return Mounts(tuple(pairs))

    def claim_folder(self, namespace: str, name: str) -> Path:
        """The folder of a claim; MountError when there is no such claim."""
        claim = self._store.find(RESOURCES["persistentvolumeclaims"], namespace, name)
        if claim is None:
            raise MountError(f'persistentvolumeclaim "{name}" not found')
        bound = claim["spec"].get("volumeName")
        volume = self._store.find(RESOURCES["persistentvolumes"], None, bound) if bound else None
        if volume is not None and volume["spec"].get("hostPath"):
            folder = Path(volume["spec"]["hostPath"]["path"])
        else:
            folder = self._root / "claims" / namespace / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def drop_claim(self, namespace: str, name: str) -> None:
        """Remove the folder of a claim that was deleted; one that a hostPath volume names stays."""
        shutil.rmtree(self._root / "claims" / namespace / name, ignore_errors=True)

    def _prepare(self, volume: Mapping[str, Any], namespace: str, folder: Path) -> Path:
        if (host := volume.get("hostPath")) is not None:
            return _host_path(volume["name"], host)
        if (claim := volume.get("persistentVolumeClaim")) is not None:
            return self.claim_folder(namespace, claim["claimName"])
        folder.mkdir(parents=True, exist_ok=True)
        if (source := volume.get("configMap")) is not None:
            self._project("configmaps", namespace, source.get("name", ""), source, folder, 0o644)
        elif (source := volume.get("secret")) is not None:
            self._project("secrets", namespace, source.get("secretName", ""), source, folder, 0o600)
        return folder  # emptyDir, or a volume of no type, which is one

    def _project(
        self, plural: str, namespace: str, name: str, source: Mapping[str, Any], folder: Path, mode: int
    ) -> None:
        """Write the keys of a config map or secret as files."""
        kind = RESOURCES[plural].kind.lower()
        obj = self._store.find(RESOURCES[plural], namespace, name)
        if obj is None:
            if source.get("optional"):
                return
            raise MountError(f'{kind} "{name}" not found')
        data = contents(obj)
        chosen = source.get("items") or [{"key": key, "path": key} for key in data]
        if mode == 0o644:
            mode = source.get("defaultMode") or mode  # a secret stays 0600 whatever it says
        for item in chosen:
            if item["key"] not in data:
                raise MountError(f'{kind} "{name}" has no key "{item["key"]}"')
            if item["path"].startswith("/") or ".." in Path(item["path"]).parts:
                raise MountError(f'the path "{item["path"]}" of a {kind} leaves its volume')
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
                f.write(data[item["key"]])


def _is_scratch(volume: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """Whether a volume is empty at first and is /tmp wherever it is mounted."""
    mounts = [
        mount
        for container in (*(spec.get("initContainers") or ()), *spec["containers"])
        for mount in container.get("volumeMounts") or ()
        if mount["name"] == volume["name"]
    ]
    at_tmp = all(mount["mountPath"].rstrip("/") == str(_TMP) and not mount.get("subPath") for mount in mounts)
    return volume.get("emptyDir") is not None and bool(mounts) and at_tmp


def contents(obj: Mapping[str, Any]) -> dict[str, bytes]:
    """The keys of a config map or secret and their bytes."""
    encoded = "data" if obj["kind"] == "Secret" else "binaryData"
    found = {key: _decode(key, value) for key, value in (obj.get(encoded) or {}).items()}
    if obj["kind"] == "ConfigMap":
        found.update({key: value.encode() for key, value in (obj.get("data") or {}).items()})
    return found


def _decode(key: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as e:
        raise MountError(f'the value of key "{key}" is not base64: {e}') from e


def _host_path(name: str, source: Mapping[str, Any]) -> Path:
    path, kind = Path(source["path"]), source.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    checks = {"Directory": path.is_dir, "File": path.is_file, "Socket": path.is_socket}
    if kind in checks and not checks[kind]():
        raise MountError(
            f'MountVolume.SetUp failed for volume "{name}": hostPath {path} is not a {kind.lower()}'
        )
    return path

"""An export folder as the trainer side wrote it: a SavedModel, its manifest and its golden examples."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from serving.errors import ExportInvalid

__all__ = ["GOLDEN", "MANIFEST", "Export", "ExportedFile", "Golden", "GoldenTensor", "file_digest"]

MANIFEST = "export.json"
GOLDEN = "golden.json"
_FORMAT = 1
_CHUNK = 1 << 20
_HEX = frozenset("0123456789abcdef")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export: its path within the folder, size in bytes and SHA-256."""

    path: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if not parts or self.path.startswith("/") or ".." in parts or "\\" in self.path or "\0" in self.path:
            raise ExportInvalid(f"a file's path must lie within the export folder, got {self.path!r}")
        if not isinstance(self.bytes, int) or self.bytes < 0:
            raise ExportInvalid(f"bytes of {self.path} must be 0 or more, got {self.bytes!r}")
        _check_digest(f"sha256 of {self.path}", self.sha256)


def _check_digest(what: str, value: object) -> str:
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= _HEX:
        raise ExportInvalid(f"{what} must be 64 hex digits, got {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise ExportInvalid(
            f"{path} does not exist", hint="the export step writes it last: run the export again"
        ) from e
    except (OSError, ValueError) as e:
        raise ExportInvalid(f"{path} can't be read: {e}") from e
    if not isinstance(document, dict):
        raise ExportInvalid(f"{path} must hold a JSON object, got {type(document).__name__}")
    return document


@dataclass(frozen=True)
class Export:
    """A verified view of an export folder's manifest; `info` is the manifest itself (job, run, classes...)."""

    folder: Path
    digest: str
    files: tuple[ExportedFile, ...]
    info: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path | str) -> Export:
        """Read the manifest; raises ExportInvalid. Contents are checked by `verify`, or while copying."""
        folder = Path(folder)
        manifest = _read_json(folder / MANIFEST)
        if manifest.get("format") != _FORMAT:
            raise ExportInvalid(
                f"format of {folder / MANIFEST} must be {_FORMAT}, got {manifest.get('format')!r}"
            )
        listed = manifest.get("files")
        if not isinstance(listed, dict) or not all(isinstance(item, dict) for item in listed.values()):
            raise ExportInvalid(f"files of {folder / MANIFEST} must be an object of objects")
        files = tuple(
            ExportedFile(path, item.get("bytes", -1), item.get("sha256", ""))
            for path, item in sorted(listed.items())
        )
        if "saved_model.pb" not in listed:
            raise ExportInvalid(f"{folder / MANIFEST} lists no saved_model.pb: not a SavedModel")
        digest = _check_digest(f"digest of {folder / MANIFEST}", manifest.get("digest"))
        lines = "".join(f"{file.path} {file.sha256}\n" for file in files)
        if hashlib.sha256(lines.encode()).hexdigest() != digest:
            raise ExportInvalid(
                f"digest of {folder / MANIFEST} is not that of the files it lists",
                hint="run the export again",
            )
        return cls(folder, digest, files, manifest)

    @property
    def bytes(self) -> int:
        """Size of all files of the model."""
        return sum(file.bytes for file in self.files)

    def verify(self) -> None:
        """Compare every file with its size and digest; raises ExportInvalid naming the first that differs."""
        for file in self.files:
            path = self.folder / file.path
            try:
                size = path.stat().st_size
                digest = file_digest(path) if size == file.bytes else ""
            except OSError as e:
                raise ExportInvalid(f"{path} can't be read: {e.strerror}") from e
            if digest != file.sha256:
                raise ExportInvalid(
                    f"{path} is not what its exporter wrote: {size} bytes for {file.bytes}, or other content",
                    hint="run the export again",
                )

    def golden(self) -> Golden:
        """The golden examples of this export."""
        return Golden.load(self.folder / GOLDEN)


@dataclass(frozen=True)
class GoldenTensor:
    """An input or output of the golden examples: TensorFlow's type name, shape, nested values (bytes decoded)."""

    dtype: str
    shape: tuple[int, ...]
    values: Any

    @classmethod
    def parse(cls, name: str, document: Any) -> GoldenTensor:
        """Read one; raises ExportInvalid."""
        try:
            return cls(
                str(document["dtype"]), tuple(map(int, document["shape"])), _decoded(document["values"])
            )
        except (KeyError, TypeError, ValueError, binascii.Error) as e:
            raise ExportInvalid(f"golden tensor {name} must have dtype, shape and values: {e!r}") from e


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        return base64.b64decode(value["b64"], validate=True)
    return value


@dataclass(frozen=True)
class Golden:
    """Examples with the exporter's own outputs; a server must answer the same within the tolerance."""

    signature: str
    inputs: Mapping[str, GoldenTensor]
    outputs: Mapping[str, GoldenTensor]
    tolerance: float
    labels: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not self.inputs or not self.outputs:
            raise ExportInvalid("golden examples must have inputs and outputs, got none")
        if not 0 <= self.tolerance < float("inf"):
            raise ExportInvalid(f"tolerance of golden examples must be 0 or more, got {self.tolerance}")

    @property
    def examples(self) -> int:
        """How many examples there are."""
        shape = next(iter(self.inputs.values())).shape
        return shape[0] if shape else 1

    @classmethod
    def load(cls, path: Path) -> Golden:
        """Read golden.json; raises ExportInvalid."""
        document = _read_json(path)
        sides = {}
        for side in ("inputs", "outputs"):
            found = document.get(side)
            if not isinstance(found, dict):
                raise ExportInvalid(f"{side} of {path} must be an object, got {type(found).__name__}")
            sides[side] = {name: GoldenTensor.parse(name, tensor) for name, tensor in found.items()}
        tolerance = document.get("tolerance", 1e-4)
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
            raise ExportInvalid(f"tolerance of {path} must be a number, got {tolerance!r}")
        return cls(
            str(document.get("signature", "serving_default")),
            sides["inputs"],
            sides["outputs"],
            float(tolerance),
            tuple(document.get("labels") or ()),
        )

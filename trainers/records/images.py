# ruff: noqa: TID253 - runs in data pods only, never imported by a DAG file
"""Folders of pictures: <source>/<class>/<anything>.png or .jpg; the class is the first folder's name.

Classes that are all whole numbers are put in the order of their value, others in that of their names; the label
is a class's place in that order and its name stands in the schema's domain. With a label table (records.labels)
folders mean nothing: each picture has the label that the table says.

`raw` decodes each picture to 8-bit pixels [height, width, channels] of one common shape; a picture of another
shape is refused. `encoded` takes the files' bytes as they are, after a look at their head and tail.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image, UnidentifiedImageError

from trainers.records.errors import ColumnError, SourceEmpty, SourceMissing, SourceUnreadable
from trainers.records.format import Format
from trainers.records.labels import LabelTable, load_labels
from trainers.records.schema import Feature, Schema
from trainers.records.source import Batch, Reject, SourceFile, threads
from trainers.records.split import hash_text, shard_of

__all__ = ["IMAGE", "KEY", "ImageFolder"]

IMAGE = "image"
KEY = "key"

_SAMPLE = 1_000  # pictures whose heads are read to find the common shape
_BATCH_BYTES = 32 << 20  # pixels held at once

# Pillow's modes of 8 bits a channel: the mode that they are read as.
_MODES = {
    "1": "L",
    "L": "L",
    "LA": "LA",
    "P": "RGB",
    "RGB": "RGB",
    "RGBA": "RGBA",
    "CMYK": "RGB",
    "YCbCr": "RGB",
}
_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}

# The last bytes of a whole file.
_TAILS = {"PNG": b"IEND\xae\x42\x60\x82", "JPEG": b"\xff\xd9"}


class _BadImageError(Exception):
    """Why a picture isn't taken."""


def _open(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    except UnidentifiedImageError as e:
        raise _BadImageError("is no PNG or JPEG" if data else "is empty") from e
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
        raise _BadImageError(f"can't be read: {e}") from e
    if image.mode not in _MODES:
        raise _BadImageError(f"has mode {image.mode}, wants 8 bits a channel")
    return image


def _shape(image: Image.Image) -> tuple[int, int, int]:
    return image.height, image.width, _CHANNELS[_MODES[image.mode]]


def _pixels(data: bytes, shape: tuple[int, ...]) -> bytes:
    """The pixels of a picture; _BadImageError when it isn't whole or has another shape."""
    image = _open(data)
    if _shape(image) != shape:
        raise _BadImageError(f"has shape {list(_shape(image))}, wants {list(shape)}")
    try:
        return image.convert(_MODES[image.mode]).tobytes()
    # Pillow's decoders raise what they like on bytes that aren't a picture.
    except (OSError, ValueError, SyntaxError, IndexError) as e:
        raise _BadImageError(f"can't be decoded: {e}") from e


def _whole(data: bytes) -> bytes:
    """The file's own bytes; _BadImageError when its head or tail are wrong."""
    image = _open(data)
    if _TAILS[image.format or ""] not in data[-64:]:
        raise _BadImageError(f"is cut short: a {image.format} file ends otherwise")
    return data


class ImageFolder:
    """A source of pictures: in class folders, or with a label table among its files."""

    def __init__(
        self,
        source: Path | str,
        files: Sequence[SourceFile],
        *,
        label: str,
        image: str,
        format: Format | None = None,
    ) -> None:
        format = format or Format()
        self.source = source
        self.files = [file for file in files if file.name != format.labels]
        self.image = image
        if label in (IMAGE, KEY):
            raise ColumnError(
                label, "is taken: pictures have the features image and key", hint="rename the label"
            )
        if not self.files:
            raise SourceEmpty(f"{source} holds no picture", hint="check that it is the right data")
        self.table: LabelTable | None = None
        if format.labels:
            tables = [file for file in files if file.name == format.labels]
            if not tables:
                raise SourceMissing(f"{source} holds no {format.labels}", hint="check format.labels")
            names = [file.name for file in self.files]
            self.table = load_labels(source, tables[0], format, label, names)
            self.label, self._labels = self.table.feature, self.table.labels
        else:
            self.label, self._labels = _folders(source, self.files, label)
        self._hashes = hash_text([file.name for file in self.files])

    def infer(self) -> Schema:
        """image, label and key (the path below the source)."""
        if self.image == "raw":
            pixels = Feature(IMAGE, "uint8", self._common_shape(), "raw", source="8-bit pixels")
        else:
            pixels = Feature(IMAGE, "bytes", (), "image", source="PNG or JPEG file")
        return Schema((pixels, self.label, Feature(KEY, "string", source="path")))

    def _common_shape(self) -> tuple[int, int, int]:
        """The shape that most of an even sample of the pictures have."""
        step = max(1, len(self.files) // _SAMPLE)
        shapes: Counter[tuple[int, int, int]] = Counter()
        problem = ""
        for file in self.files[::step]:
            try:
                shapes[_shape(_open(file.read_bytes()))] += 1
            except _BadImageError as e:
                problem = problem or f"{file.location} {e}"
        if not shapes:
            raise SourceUnreadable(
                str(self.source),
                f"holds no picture that can be read: {problem}",
                hint="copy the pictures again",
            )
        return shapes.most_common(1)[0][0]

    def units(self, most: int) -> int:
        """Any number: pictures are apart from each other."""
        return most

    def unit_files(self, unit: int, units: int) -> list[SourceFile]:
        """A unit's pictures, and the label table."""
        return self._pictures(unit, units) + ([self.table.file] if self.table else [])

    def _pictures(self, unit: int, units: int) -> list[SourceFile]:
        """A unit's pictures: those whose path's hash falls to its shard, in the order of the hash.

        So classes are mixed within shards, and each shard is read on its own.
        """
        mine = np.flatnonzero(shard_of(self._hashes, units) == unit)
        return [self.files[i] for i in mine[np.argsort(self._hashes[mine], kind="stable")].tolist()]

    def read(self, unit: int, units: int, schema: Schema, batch_rows: int) -> Iterator[Batch]:
        """The pictures of a unit."""
        feature = schema[IMAGE]
        files = self._pictures(unit, units)
        if self.table and self.table.rejects and not unit:
            yield self._batch([], [], feature, self.table.rejects)
        if feature.encoding == "raw":
            step = max(1, min(batch_rows, _BATCH_BYTES // feature.size))
        else:
            mean = sum(file.size for file in files) // max(1, len(files))
            step = max(1, min(batch_rows, _BATCH_BYTES // max(1, mean)))
        with ThreadPoolExecutor(threads()) as pool:
            for first in range(0, len(files), step):
                chunk = files[first : first + step]
                yield self._batch(chunk, list(pool.map(lambda f: self._load(f, feature), chunk)), feature)

    def _load(self, file: SourceFile, feature: Feature) -> bytes | _BadImageError:
        if file.name not in self._labels:
            return _BadImageError(
                f"isn't in {self.table.file.name}" if self.table else "lies in no class folder"
            )
        try:
            data = file.read_bytes()
            return _pixels(data, feature.shape) if feature.encoding == "raw" else _whole(data)  # type: ignore[arg-type]
        except _BadImageError as e:
            return e
        except FileNotFoundError:
            file.check_unchanged()
            raise

    def _batch(
        self,
        files: Sequence[SourceFile],
        loaded: list[Any],
        feature: Feature,
        rejects: Sequence[Reject] = (),
    ) -> Batch:
        both = list(zip(files, loaded, strict=True))
        good = [(file, data) for file, data in both if isinstance(data, bytes)]
        bad = [Reject(f.name, None, IMAGE, str(data)) for f, data in both if not isinstance(data, bytes)]
        kind = pa.binary(feature.size) if feature.encoding == "raw" else pa.large_binary()
        label = pa.float64() if self.label.type == "float32" else pa.int64()
        data = pa.RecordBatch.from_arrays(
            [
                pa.array([data for _, data in good], kind),
                pa.array([self._labels[file.name] for file, _ in good], label),
                pa.array([file.name for file, _ in good], pa.string()),
            ],
            names=[IMAGE, self.label.name, KEY],
        )
        return Batch("", np.arange(1, len(good) + 1), data, [*rejects, *bad])


def _folders(source: Path | str, files: Sequence[SourceFile], label: str) -> tuple[Feature, dict[str, int]]:
    """The label's feature, and each picture's, from the folders."""
    found = {file.name: _class_of(file) for file in files}
    classes = set(found.values()) - {None}
    if not classes:
        raise SourceEmpty(
            f"{source} holds pictures, but not in class folders",
            hint="put each picture into a folder named after its class, or name a label table: format.labels",
        )
    names = sorted((str(c) for c in classes), key=_class_order(classes))
    index = {name: i for i, name in enumerate(names)}
    feature = Feature(
        label, "int64", domain={"min": 0, "max": len(names) - 1, "names": names}, source="folder"
    )
    return feature, {name: index[c] for name, c in found.items() if c is not None}


def _class_of(file: SourceFile) -> str | None:
    parts = file.name.split("/")
    return parts[0] if len(parts) > 1 else None


def _class_order(classes: set[str | None]) -> Any:
    if all(str(name).isdecimal() for name in classes):
        return lambda name: (int(name), name)
    return lambda name: (0, name)

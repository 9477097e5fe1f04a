"""A SavedModel in this process: its signatures, and answers by NumPy arrays, by the very session that servers use.

    model = SavedModel("models/digits/7")
    model.signatures["serving_default"].inputs       # {"image": TensorSpec("uint8", (None, 8, 8, 1))}
    model.run("serving_default", {"image": images})  # {"classes": ndarray, ...}

A SavedModel is a program: load only what may run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from serving import tensors
from serving.errors import ExportInvalid

__all__ = ["SavedModel", "Signature", "TensorSpec", "signatures_in"]

_INIT_OP = "__saved_model_init_op"


@dataclass(frozen=True)
class TensorSpec:
    """TensorFlow's name of a type, and a shape with None for any size; None for any rank."""

    dtype: str
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype} of any shape"
        return f"{self.dtype} [{', '.join('?' if size is None else str(size) for size in self.shape)}]"

    def to_json(self) -> dict[str, Any]:
        """As an export's manifest has it; null is any."""
        return {"dtype": self.dtype, "shape": None if self.shape is None else list(self.shape)}


@dataclass(frozen=True)
class Signature:
    """A signature's inputs and outputs by name."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def to_json(self) -> dict[str, Any]:
        """As an export's manifest has it."""
        return {
            side: {name: spec.to_json() for name, spec in sorted(specs.items())}
            for side, specs in (("inputs", self.inputs), ("outputs", self.outputs))
        }


def signatures_in(definitions: Mapping[str, Any]) -> dict[str, Signature]:
    """The signatures of SignatureDef messages; those with sparse or composite tensors are left out."""
    found = {}
    for name, definition in sorted(definitions.items()):
        sides = (definition.inputs, definition.outputs)
        if name == _INIT_OP or any(
            i.WhichOneof("encoding") != "name" for side in sides for i in side.values()
        ):
            continue
        found[name] = Signature(*({key: _spec(info) for key, info in sorted(side.items())} for side in sides))
    return found


def _spec(info: Any) -> TensorSpec:
    shape = info.tensor_shape
    sizes = None if shape.unknown_rank else tuple(None if d.size < 0 else d.size for d in shape.dim)
    return TensorSpec(tensors.dtype_name(info.dtype), sizes)


class SavedModel:
    """A loaded SavedModel; `threads` bounds what one run uses (0: all cores). Raises ExportInvalid."""

    def __init__(self, path: Path | str, *, threads: int = 0) -> None:
        from serving.server.runtime import load_runtime

        runtime = load_runtime()
        config = runtime.config_pb2.ConfigProto(intra_op_parallelism_threads=threads)
        graph = runtime.graph()
        self._op_error = runtime.op_error
        with graph.as_default():
            self._session = runtime.session(graph=graph, config=config)
            try:
                meta_graph = runtime.loader(str(path)).load(self._session, ["serve"])
            except (OSError, ValueError, RuntimeError, runtime.op_error) as e:
                self._session.close()
                raise ExportInvalid(f"the SavedModel in {path} can't be loaded: {e}") from e
        self._definitions = dict(meta_graph.signature_def)
        self.signatures = signatures_in(self._definitions)

    def __enter__(self) -> SavedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory."""
        self._session.close()

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A signature's answers by output name; ExportInvalid with TensorFlow's words when it refuses."""
        definition = self._definitions[signature]
        feeds = {definition.inputs[name].name: array for name, array in inputs.items()}
        fetches = {name: definition.outputs[name].name for name in self.signatures[signature].outputs}
        try:
            return {name: np.asarray(a) for name, a in self._session.run(fetches, feeds).items()}
        except (self._op_error, ValueError, TypeError) as e:
            said = str(getattr(e, "message", e)).splitlines()[0]
            raise ExportInvalid(f"signature {signature} refuses these inputs: {said}") from e

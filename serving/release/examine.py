"""Looking at a SavedModel in a process of its own, and making golden examples of it.

    python -m serving.release.examine --spec '{"model": FOLDER, "name": NAME, "out": FILE, "examples": FILE or null}'

loads the SavedModel, answers some inputs twice, and writes to `out` {"signatures", "load_s", "golden", "from"}, or
{"error": {"code", "message", "hint"}}. The inputs are, of these the first that there is: the examples given; the
model's own warm-up requests; random ones of the signature's types and shapes.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serving import tensors
from serving.errors import ExportInvalid, ServingError
from serving.files import write_atomic
from serving.payload import arrays_of, choose, takes
from serving.saved_model import SavedModel, Signature
from serving.server.tfrecord import CorruptRecord, read_records
from serving.stubs import prediction_log_pb2

__all__ = ["TOLERANCE", "examine", "main"]

TOLERANCE = 1e-4
WARM_UP = Path("assets.extra") / "tf_serving_warmup_requests"
_ROWS = 4
_FREE = 8  # for sizes that a signature leaves open, but for the first
_MOST_VALUES = 2_000_000
_DTYPES = {tensors.dtype_name(enum): dtype for enum, dtype in tensors.DTYPES.items()}


def examine(model: Path, examples: Any = None, *, signature: str = "") -> dict[str, Any]:
    """What the module's text says; raises ExportInvalid, BadRequest or ModelNotFound."""
    began = time.monotonic()
    with SavedModel(model) as loaded:
        load_s = time.monotonic() - began
        if not loaded.signatures:
            raise ExportInvalid(
                f"the SavedModel in {model} has no signature to serve",
                hint="save it with signatures=..., or by model.export()",
            )
        name, inputs, origin = _inputs(loaded, model, examples, signature)
        try:
            outputs = loaded.run(name, inputs)
        except ExportInvalid as e:
            if origin != "random":
                raise
            hint = f"give some inputs by --examples data.json; {takes(name, loaded.signatures[name])}"
            raise ExportInvalid(f"random inputs don't do: {e.message}", hint=hint) from e
        _check_again(outputs, loaded.run(name, inputs))
        return {
            "signatures": {key: found.to_json() for key, found in loaded.signatures.items()},
            "load_s": round(load_s, 3),
            "from": origin,
            "golden": {
                "signature": name,
                "inputs": {key: _tensor(value) for key, value in inputs.items()},
                "outputs": {key: _tensor(value) for key, value in outputs.items()},
                "tolerance": TOLERANCE,
            },
        }


def _inputs(
    loaded: SavedModel, model: Path, examples: Any, signature: str
) -> tuple[str, dict[str, np.ndarray], str]:
    if examples is not None:
        name = choose(loaded.signatures, signature)
        return name, arrays_of(examples, name, loaded.signatures[name]), "examples"
    warm_up = model / WARM_UP
    if warm_up.is_file():
        for name, inputs in _warm_up(warm_up):
            if name in loaded.signatures and set(inputs) == set(loaded.signatures[name].inputs):
                return name, inputs, "warm-up"
    name = choose(loaded.signatures, signature)
    return name, _random(loaded.signatures[name], name), "random"


def _warm_up(path: Path) -> Any:
    try:
        for record in read_records(path, max_bytes=64 << 20):
            request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
            name = request.model_spec.signature_name or "serving_default"
            yield name, {key: tensors.from_proto(proto) for key, proto in request.inputs.items()}
    except (CorruptRecord, tensors.TensorError, ValueError) as e:
        raise ExportInvalid(f"the warm-up requests in {path} can't be read: {e}") from e


def _random(signature: Signature, name: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    found = {}
    for key, spec in signature.inputs.items():
        dtype = _DTYPES.get(spec.dtype)
        if spec.shape is None or dtype is None:
            raise ExportInvalid(
                f"no random {key} can be made, it is {spec}",
                hint=f"give --examples; {takes(name, signature)}",
            )
        shape = [size or (_FREE if at else _ROWS) for at, size in enumerate(spec.shape)]
        if np.prod(shape) > _MOST_VALUES:
            raise ExportInvalid(
                f"random {key} would have {np.prod(shape)} values", hint="give a few rows by --examples"
            )
        if dtype.kind == "O":
            array = np.empty(int(np.prod(shape)), object)
            array[:] = [b""] * array.size  # an empty string is an empty Example too
            found[key] = array.reshape(shape)
        elif dtype.kind in "iu":
            found[key] = generator.integers(0, 256 if dtype == np.uint8 else 2, shape).astype(dtype)
        elif dtype.kind == "b":
            found[key] = generator.integers(0, 2, shape).astype(dtype)
        else:
            found[key] = generator.random(shape).astype(dtype)
    return found


def _check_again(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    for name, one in first.items():
        other = second[name]
        if one.dtype.kind in "fcV":
            wide = [a.astype(np.complex128 if a.dtype.kind == "c" else np.float64) for a in (one, other)]
            same = one.shape == other.shape and np.allclose(
                *wide, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
            )
        else:
            same = np.array_equal(one, other)
        if not same:
            raise ExportInvalid(
                f"the model gives different {name} for the same inputs, so that what is served can't be verified",
                hint="does it hold something random outside of training?",
            )


def _tensor(array: np.ndarray) -> dict[str, Any]:
    def shown(item: Any) -> Any:
        if isinstance(item, list):
            return [shown(i) for i in item]
        return {"b64": base64.b64encode(item).decode()} if isinstance(item, bytes) else item

    if array.dtype.kind == "c":
        raise ExportInvalid("golden examples can't hold complex numbers")
    if array.dtype.name == "bfloat16":
        return {"dtype": "bfloat16", "shape": list(array.shape), "values": array.astype(np.float32).tolist()}
    dtype = "string" if array.dtype.kind in "OSU" else array.dtype.name
    return {"dtype": dtype, "shape": list(array.shape), "values": shown(array.tolist())}


def main() -> int:
    """The command line; 0 when the model was found good."""
    parser = argparse.ArgumentParser(description="Look at a SavedModel.")
    parser.add_argument("--spec", required=True, help="what to do, as one JSON object")
    spec = json.loads(parser.parse_args().spec)
    code = 0
    try:
        examples = json.loads(Path(spec["examples"]).read_text()) if spec.get("examples") else None
        found = examine(Path(spec["model"]), examples, signature=spec.get("signature", ""))
    except ServingError as e:
        found, code = {"error": {"code": e.code, "message": e.message, "hint": e.hint}}, 1
    write_atomic(Path(spec["out"]), json.dumps(found).encode())
    return code


if __name__ == "__main__":
    sys.exit(main())

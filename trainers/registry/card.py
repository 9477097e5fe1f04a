"""What makes an export a model of MLflow's: an MLmodel file with its signature, and an input example.

Written beside the export's files, which stay as they were exported: `mlflow.pyfunc.load_model` and the registry's
page read these, TensorFlow Serving and Trainyard's own digests don't. MLflow's `log_model` is not used: of a Keras
model it would write .keras and not the SavedModel that was verified.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainers.exporting.package import GOLDEN
from trainers.job.files import read_json

__all__ = ["signature", "write_card"]

_SERVING = "serving_default"
_EXAMPLE_ROWS = 2
_MOST_NUMBERS = 100_000  # of an input example: some hundred kilobytes


def write_card(into: Path, export_folder: Path, export: Mapping[str, Any], ids: Mapping[str, str]) -> None:
    """Write MLmodel, input_example.json and serving_input_example.json into the folder `into`.

    `export` is the export's manifest, `ids` has "run_id", "model_id" and "location", the URI of the model's artifacts.
    """
    from mlflow.version import VERSION

    model = {
        "artifact_path": ids["location"],
        "flavors": _flavors(export),
        "metadata": {"trainyard.export_digest": export["digest"], "trainyard.step": export.get("step")},
        "mlflow_version": VERSION,
        "model_id": ids["model_id"],
        "model_size_bytes": int(export["bytes"]),
        "model_uuid": ids["model_id"],  # the same card at every try
        "run_id": ids["run_id"],
        "signature": {**signature(export), "params": None},
        "utc_time_created": _utc(float(export["created"])),
    }
    example = _write_example(into, export_folder)
    if example is not None:
        model["saved_input_example_info"] = example
    # JSON is YAML, and MLflow's classes for this want pandas, which pods don't have.
    (into / "MLmodel").write_text(json.dumps(model, indent=2) + "\n")


def signature(export: Mapping[str, Any]) -> dict[str, Any]:
    """The signature serving_default as MLflow writes one: tensors with dtype and shape, -1 for any size."""
    found = export["signatures"][_SERVING]
    return {
        side: json.dumps([_spec(name, spec) for name, spec in found[side].items()])
        for side in ("inputs", "outputs")
    }


def _spec(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    dtype = "object" if spec["dtype"] == "string" else spec["dtype"]
    shape = [-1 if size is None else size for size in spec["shape"] or [None]]
    return {"name": name, "type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}


def _flavors(export: Mapping[str, Any]) -> dict[str, Any]:
    packages = export.get("packages") or {}
    return {
        # MLflow's name for a SavedModel that is called by a signature.
        "tensorflow": {
            "model_type": "tf1-estimator",
            "saved_model_dir": ".",
            "meta_graph_tags": ["serve"],
            "signature_def_key": _SERVING,
            "code": None,
        },
        "python_function": {
            "loader_module": "mlflow.tensorflow",
            "python_version": packages.get("python", ""),
        },
    }


def _write_example(into: Path, export_folder: Path) -> dict[str, Any] | None:
    """The first golden examples as an input example; none where they are too large or not text."""
    document = read_json(export_folder / GOLDEN) or {}
    inputs = document.get("inputs") or {}
    size = sum(_size(tensor["shape"]) for tensor in inputs.values())
    if not inputs or size > _MOST_NUMBERS:
        return None
    try:
        values = {
            name: [_text(row) for row in tensor["values"][:_EXAMPLE_ROWS]] for name, tensor in inputs.items()
        }
    except ValueError:
        return None
    (into / "input_example.json").write_text(json.dumps(values))
    (into / "serving_input_example.json").write_text(json.dumps({"inputs": values}, indent=2))
    return {
        "artifact_path": "input_example.json",
        "type": "ndarray",
        "serving_input_path": "serving_input_example.json",
    }


def _size(shape: list[int]) -> int:
    size = _EXAMPLE_ROWS
    for dimension in shape[1:]:
        size *= dimension
    return size


def _text(value: Any) -> Any:
    """Values of golden.json with text for bytes; UnicodeDecodeError, a ValueError, for what is none."""
    if isinstance(value, list):
        return [_text(item) for item in value]
    return base64.b64decode(value["b64"]).decode() if isinstance(value, dict) else value


def _utc(seconds: float) -> str:
    return str(datetime.fromtimestamp(seconds, timezone.utc).replace(tzinfo=None))

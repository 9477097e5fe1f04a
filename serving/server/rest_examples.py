"""JSON bodies of REST classify and regress requests -> tf.train.Examples, as strict about types as TF Serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from serving.server.rest_json import MAX_FLOAT32, b64_bytes, invalid, is_b64, lossy, show, type_name
from serving.stubs import input_pb2

__all__ = ["examples_input"]


def examples_input(document: Mapping[str, Any]) -> Any:
    """The Input message of a classify or regress request."""
    message = input_pb2.Input()
    with_context = "context" in document
    if with_context:
        _example(document["context"], message.example_list_with_context.context)
    if "examples" not in document:
        raise invalid(
            f"JSON Value: {show(document)} When method is classify, key 'examples' is expected and was not found"
        )
    examples = document["examples"]
    if not isinstance(examples, list):
        raise invalid(f"JSON Value: {show(document)} Expecting 'examples' value to be an list/array")
    if not examples:
        raise invalid(f"JSON Value: {show(document)} 'examples' value is an empty array")
    listed = message.example_list_with_context if with_context else message.example_list
    for item in examples:
        _example(item, listed.examples.add())
    return message


def _example(value: Any, example: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(f"Example must be JSON object but got JSON {type_name(value)}")
    for name, content in value.items():
        feature = example.features.feature[name]
        for item in content if isinstance(content, list) else [content]:
            _add(name, feature, item)


def _add(name: str, feature: Any, item: Any) -> None:
    """Add a value to a feature, whose first value says what kind it has."""
    if isinstance(item, str) or is_b64(item):
        kind: str = "bytes"
        item = item.encode() if isinstance(item, str) else b64_bytes(item)
    elif isinstance(item, (bool, int)) and item < 1 << 64:
        kind, item = "int64", int(item)
    elif isinstance(item, (int, float)):  # whole numbers over 64 bits are floats for TF Serving
        kind, item = "float", float(item)
        if np.isfinite(item) and abs(item) > MAX_FLOAT32:
            raise lossy(item, "float")
    else:
        raise invalid(f"Feature: {name} has element with unexpected JSON type: {type_name(item)}")
    before = feature.WhichOneof("kind")
    if before not in (None, f"{kind}_list"):
        expected = before.removesuffix("_list")
        raise invalid(f"Unexpected element type in feature: {name} expecting type: {expected}")
    if kind == "int64" and item >= 1 << 63:
        raise invalid(f"Feature: {name} has uint64 element. Only int64 is supported.")
    getattr(feature, f"{kind}_list").value.append(item)

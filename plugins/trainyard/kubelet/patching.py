"""The three kinds of PATCH: JSON patch (RFC 6902), merge patch (RFC 7386), strategic merge patch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from trainyard.kubelet.errors import ApiError, bad_request

__all__ = ["apply_patch"]

# Strategic merge: lists of objects are merged by a key, which the API's Go types name; these are the lists
# of the kinds that we serve. All other lists are replaced.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "port",
    "imagePullSecrets": "name",
    "conditions": "type",
}


def apply_patch(obj: dict[str, Any], body: Any, content_type: str) -> dict[str, Any]:
    """A patched copy of `obj`; ApiError 400, 415 or 422 when the patch can't be applied."""
    kind = content_type.split(";")[0].strip().lower()
    result = copy.deepcopy(obj)
    if kind == "application/json-patch+json":
        if not isinstance(body, list):
            raise bad_request("a JSON patch must be a list of operations, got an object")
        for operation in body:
            result = _apply_operation(result, operation)
    elif kind in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
        if not isinstance(body, dict):
            raise bad_request("a merge patch must be an object")
        result = _merge(result, body, strategic=kind.startswith("application/strategic"))
    else:
        raise ApiError(
            415,
            "UnsupportedMediaType",
            f"the body of the request was in an unknown format - {kind or 'none'}: use application/json-patch+json, "
            "application/merge-patch+json or application/strategic-merge-patch+json",
        )
    if not isinstance(result, dict):
        raise bad_request("a patch must leave an object")
    return result


def _merge(target: Any, patch: Any, *, strategic: bool) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif strategic and key in _MERGE_KEYS and isinstance(value, list):
            result[key] = _merge_list(result.get(key) or [], value, _MERGE_KEYS[key])
        else:
            result[key] = _merge(result.get(key), value, strategic=strategic)
    return result


def _merge_list(target: list[Any], patch: list[Any], key: str) -> list[Any]:
    if not all(isinstance(item, dict) and key in item for item in [*target, *patch]):
        return patch
    rows = {item[key]: item for item in target}
    for item in patch:
        if item.get("$patch") == "delete":
            rows.pop(item[key], None)
        else:
            rows[item[key]] = _merge(rows.get(item[key]), item, strategic=True)
    return list(rows.values())


def _unprocessable(message: str) -> ApiError:
    return ApiError(
        422, "Invalid", f"the server rejected our request due to an error in our request: {message}"
    )


def _apply_operation(document: Any, operation: Any) -> Any:
    if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
        raise bad_request(f'a JSON patch operation must be an object with "op" and "path", got {operation!r}')
    name = operation.get("op")
    if name in ("move", "copy"):
        value = _lookup(document, _pointer(operation.get("from")))
        if name == "move":
            document = _edit(document, _pointer(operation["from"]), _remove)
        return _edit(document, _pointer(operation["path"]), _adder(copy.deepcopy(value)))
    path = _pointer(operation["path"])
    if name == "add":
        return _edit(document, path, _adder(operation.get("value")))
    if name == "remove":
        return _edit(document, path, _remove)
    if name == "replace":
        _lookup(document, path)
        return _edit(document, path, _setter(operation.get("value")))
    if name == "test":
        if _lookup(document, path) != operation.get("value"):
            raise _unprocessable(f"testing path {operation['path']} failed")
        return document
    raise bad_request(f'a JSON patch "op" must be add, remove, replace, move, copy or test, got {name!r}')


def _pointer(text: Any) -> list[str]:
    if not isinstance(text, str) or (text and not text.startswith("/")):
        raise bad_request(f'a JSON pointer must start with "/", got {text!r}')
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _lookup(document: Any, path: list[str]) -> Any:
    for part in path:
        if isinstance(document, dict) and part in document:
            document = document[part]
        elif isinstance(document, list) and part.isdigit() and int(part) < len(document):
            document = document[int(part)]
        else:
            raise _unprocessable(f"there is nothing at /{'/'.join(path)}")
    return document


def _edit(document: Any, path: list[str], change: Callable[[Any, str], None]) -> Any:
    """Apply `change(parent, last part of the path)`; the whole document can't be changed."""
    if not path:
        raise _unprocessable("the whole object can't be replaced by a patch")
    parent = _lookup(document, path[:-1])
    try:
        change(parent, path[-1])
    except (KeyError, IndexError, ValueError, TypeError) as e:
        raise _unprocessable(f"there is nothing at /{'/'.join(path)}") from e
    return document


def _adder(value: Any) -> Callable[[Any, str], None]:
    def add(parent: Any, key: str) -> None:
        if isinstance(parent, list):
            parent.insert(len(parent) if key == "-" else int(key), value)
        else:
            parent[key] = value

    return add


def _setter(value: Any) -> Callable[[Any, str], None]:
    def put(parent: Any, key: str) -> None:
        parent[int(key) if isinstance(parent, list) else key] = value

    return put


def _remove(parent: Any, key: str) -> None:
    del parent[int(key) if isinstance(parent, list) else key]

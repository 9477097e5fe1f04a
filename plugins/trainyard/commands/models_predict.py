"""models predict: ask a served model with JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from trainers.job.files import read_json
from trainyard.commands.models_target import NoServers, Target, find_target

__all__ = ["predict"]


def predict(arguments: argparse.Namespace, console: Console) -> int:
    """Ask; answers are printed a row a line, or as JSON by output name."""
    from serving.payload import arrays_of, choose, json_of

    document = _document(arguments.data)
    target = find_target()
    client, signatures = _connect(arguments, target)
    name = choose(signatures, arguments.signature)
    inputs = arrays_of(document, name, signatures[name], _types(target, arguments.name, arguments.version))
    answers = client.predict(inputs, signature=name, timeout=arguments.timeout)
    found = {key: json_of(array) for key, array in sorted(answers.items())}
    if arguments.json:
        sys.stdout.write(json.dumps({"outputs": found}) + "\n")
        return 0
    rows = {len(value) if isinstance(value, list) else -1 for value in found.values()}
    if len(rows) != 1 or -1 in rows:
        for key, value in found.items():
            sys.stdout.write(f"{key}\t{_short(value)}\n")
        return 0
    for index in range(rows.pop()):
        sys.stdout.write("\t".join(f"{key}={_short(value[index])}" for key, value in found.items()) + "\n")
    return 0


def _document(data: str) -> Any:
    """The JSON of a file, of standard input, or of the argument itself; ValueError says what is wrong."""
    if data == "-":
        text, where = sys.stdin.read(), "standard input"
    elif data.lstrip()[:1] in ("{", "[", '"') and not Path(data[:200]).is_file():
        text, where = data, "-d"
    else:
        try:
            text, where = Path(data).read_text(), data
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{data} can't be read: {getattr(e, 'strerror', '') or e}") from e
    try:
        return json.loads(text)
    except ValueError as e:
        raise ValueError(f"{where} must be JSON: {e}") from e


def _connect(arguments: argparse.Namespace, target: Target) -> tuple[Any, dict[str, Any]]:
    """A client of what was asked for, and the signatures there."""
    from serving.client import PredictClient
    from serving.errors import ModelNotFound
    from serving.rest_client import RestPredictClient
    from serving.saved_model import Signature, TensorSpec

    servers, _ = target.require_servers()
    if arguments.rest and not target.rest:
        raise NoServers(
            "there is no REST address", hint="set TRAINYARD_MODEL_SERVER_REST to http://host:port"
        )
    kind, address = (RestPredictClient, target.rest) if arguments.rest else (PredictClient, servers[0])
    label: str | None = arguments.label or "stable"

    def connect() -> tuple[Any, Any]:
        options: dict[str, Any] = {
            "version": arguments.version,
            "label": None if arguments.version else label,
        }
        client = kind(address, arguments.name, timeout=arguments.timeout, **options)
        return client, client.metadata()

    try:
        client, found = connect()
    except ModelNotFound as e:
        if arguments.label or arguments.version or "label" not in e.message:
            raise
        label = None  # a model that has no label yet, or is served by other hands
        client, found = connect()
    if arguments.rest:
        found = _from_rest(found)

    def specs(side: Any) -> dict[str, Any]:
        return {
            key: TensorSpec(
                spec["dtype"],
                None
                if spec["shape"] is None
                else tuple(None if n in (-1, None) else n for n in spec["shape"]),
            )
            for key, spec in side.items()
        }

    return client, {
        key: Signature(specs(sides["inputs"]), specs(sides["outputs"]))
        for key, sides in found.items()
        if key != "__saved_model_init_op"
    }


def _from_rest(document: Any) -> dict[str, Any]:
    """TF Serving's JSON of signatures as the gRPC client gives them."""
    names = {"DT_FLOAT": "float", "DT_DOUBLE": "double", "DT_HALF": "half"}

    def side(infos: Any) -> dict[str, Any]:
        return {
            key: {
                "dtype": names.get(info["dtype"], info["dtype"].removeprefix("DT_").lower()),
                "shape": None
                if info["tensor_shape"].get("unknown_rank")
                else [int(d["size"]) for d in info["tensor_shape"].get("dim", ())],
            }
            for key, info in infos.items()
        }

    definitions = document["metadata"]["signature_def"]["signature_def"]
    return {
        key: {"inputs": side(found.get("inputs", {})), "outputs": side(found.get("outputs", {}))}
        for key, found in definitions.items()
    }


def _types(target: Target, name: str, version: int | None) -> dict[str, str]:
    """The types of the features that a version was trained on, {} where they are not known here."""
    from serving.release.store import ReleaseStore

    if name not in target.names():
        return {}
    store = ReleaseStore(target.storage, name)
    stack = store.log.champions() or store.published()
    chosen = version if version is not None else stack[-1] if stack else None
    if chosen is None or chosen not in store.versions():
        return {}
    digest = (store.record(chosen).get("export") or {}).get("records_digest")
    if not digest:
        return {}
    for manifest in sorted((target.storage / "records").glob("*/*/manifest.json")):
        if (read_json(manifest) or {}).get("digest") == digest:
            schema = read_json(manifest.with_name("schema.json")) or {}
            return {feature["name"]: feature["type"] for feature in schema.get("features", ())}
    return {}


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return value if isinstance(value, str) else json.dumps(value)

"""A SavedModel that somebody else made, as an export that can be released: examined, with golden examples, digested.

A SavedModel is a program. It is loaded in a process of its own, which is ended when it takes too long or too much
memory, before anything of it is published; that guards against broken models, not against hostile ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import ConfigInvalid, ExportInvalid
from serving.release.exported import GOLDEN, MANIFEST, Export, file_digest

__all__ = ["Bounds", "adopt"]

_POLL_S = 0.05
_TAIL = 2000  # characters of a log
_WARM_UP = Path("assets.extra") / "tf_serving_warmup_requests"


@dataclass(frozen=True)
class Bounds:
    """What looking at a model may take: seconds, and bytes of memory (resident)."""

    seconds: float = 180.0
    memory: int = 8 << 30

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.memory <= 0:
            raise ConfigInvalid(f"bounds must be over 0, got {self.seconds} s, {self.memory} bytes")


def adopt(
    folder: Path,
    name: str,
    *,
    source: str,
    examples: Path | None = None,
    signature: str = "",
    records_digest: str | None = None,
    bounds: Bounds | None = None,
) -> Export:
    """Make the SavedModel in `folder` an export of the model `name`, in place.

    One that this platform exported is checked and taken as it is. Else golden examples (see release.examine),
    warm-up requests where it has none, and a manifest are written beside it. Raises ExportInvalid.
    """
    if (folder / MANIFEST).exists() and (folder / GOLDEN).exists():
        export = Export.load(folder)
        export.verify()
        return export
    if any(path.is_symlink() for path in folder.rglob("*")):
        raise ExportInvalid(f"{folder} holds links", hint="copy the files themselves")
    found = _examined(folder, examples, signature, bounds or Bounds())
    (folder / GOLDEN).write_text(json.dumps(found["golden"]))
    if not (folder / _WARM_UP).exists():
        _write_warm_up(folder, name)
    manifest = {
        "signatures": found["signatures"],
        "load_s": found["load_s"],
        "golden_from": found["from"],
        "source": source,
        "records_digest": records_digest,
        "created": time.time(),
    }
    _describe(folder, manifest)
    return Export.load(folder)


def _examined(folder: Path, examples: Path | None, signature: str, bounds: Bounds) -> dict[str, Any]:
    """What the examining process found; ExportInvalid with its words, or how it ended."""
    with tempfile.TemporaryDirectory(prefix="trainyard-examine-") as scratch:
        out, log = Path(scratch) / "out.json", Path(scratch) / "log"
        spec = {
            "model": str(folder),
            "examples": str(examples) if examples else None,
            "signature": signature,
            "out": str(out),
        }
        command = [sys.executable, "-m", "serving.release.examine", "--spec", json.dumps(spec)]
        with log.open("wb") as opened:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"},
            )
            try:
                ended = _watch(process, bounds)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if ended:
            raise ExportInvalid(
                f"looking at the model {ended}", hint="raise the limit if the model is that large"
            )
        try:
            found: dict[str, Any] = json.loads(out.read_bytes())
        except (FileNotFoundError, ValueError) as e:
            tail = log.read_bytes()[-_TAIL:].decode("utf-8", "replace").strip()
            raise ExportInvalid(
                f"the process that looked at the model ended with {process.returncode}: {tail}"
            ) from e
    if "error" in found:
        raise ExportInvalid(found["error"]["message"], hint=found["error"]["hint"])
    return found


def _watch(process: subprocess.Popen[bytes], bounds: Bounds) -> str:
    """Wait for the process; why it must be ended, "" when it ended by itself."""
    deadline = time.monotonic() + bounds.seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            return f"took more than {bounds.seconds:g} s"
        used = _resident(process.pid)
        if used > bounds.memory:
            return f"took {used >> 20} MB, more than {bounds.memory >> 20} MB"
        time.sleep(_POLL_S)
    return ""


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0  # it has just ended, or this system has no such file: the time is bounded all the same


def _write_warm_up(folder: Path, name: str) -> None:
    """One request, of the golden inputs: no user waits for the first run of the graph."""
    from serving.server.tfrecord import framed
    from serving.stubs import prediction_log_pb2
    from serving.tensors import to_proto
    from serving.tfserving.probe import golden_inputs

    golden = Export(folder, "", (), {}).golden()
    log = prediction_log_pb2.PredictionLog()
    request = log.predict_log.request
    request.model_spec.name = name
    request.model_spec.signature_name = golden.signature
    for key, array in golden_inputs(golden).items():
        if golden.inputs[key].dtype == "bfloat16":
            return  # its golden values are float32: the request would be refused
        to_proto(array, request.inputs[key])
    (folder / _WARM_UP).parent.mkdir(exist_ok=True)
    (folder / _WARM_UP).write_bytes(framed(log.SerializeToString()))


def _describe(folder: Path, facts: Mapping[str, Any]) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    lines = "".join(f"{path} {files[path]['sha256']}\n" for path in sorted(files))
    manifest = {
        "format": 1,
        "files": files,
        "digest": hashlib.sha256(lines.encode()).hexdigest(),
        "bytes": sum(int(file["bytes"]) for file in files.values()),
        **facts,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))

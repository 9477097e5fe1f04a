"""Turn raw data into a dataset of TFRecords.

    python -m trainers.records --spec '{"source": ..., "output": ..., "name": ..., "label": ..., ...}'

The keys are the arguments of `trainers.records.build.prepare`. The result is
{"manifest": path, "digest": ..., "counts": {"train": n, "eval": m}, "reused": bool, "quarantined": n}.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trainers.job.errors import ConfigError
from trainers.job.termination import run_step
from trainers.records.options import Options

__all__ = ["main"]

_REQUIRED = ("source", "output", "name", "label")
_OPTIONAL = ("key", "eval_fraction", "shards", "image", "quarantine_threshold", "batch_rows", "schema")


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the dataset that a spec asks for."""
    unknown = sorted(set(spec) - {*_REQUIRED, *_OPTIONAL})
    missing = [name for name in _REQUIRED if not spec.get(name)]
    if unknown or missing:
        problem = f"has unknown keys {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"
        raise ConfigError(
            f"the spec {problem}",
            hint=f"it takes {', '.join(_REQUIRED)}, and may have {', '.join(_OPTIONAL)}",
        )
    # Arrow is imported only now, so that a wrong spec is told at once.
    from trainers.records.build import build

    manifest, reused = build(Options.parse(**spec), _say)
    return {
        "manifest": str(manifest.path),
        "digest": manifest.digest,
        "counts": dict(manifest.counts),
        "reused": reused,
        "quarantined": manifest.quarantined,
    }


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run_step(main))

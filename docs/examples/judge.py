"""Judge an evaluation by hand: python docs/examples/judge.py [evaluation.json]."""

import json
import sys
from pathlib import Path

from serving.release.gate import Thresholds, decide

EVALUATION = {
    "metrics": {"accuracy": 0.962},
    "examples": 4200,
    "champion": {
        "version": 7,
        "metrics": {"accuracy": 0.965},
        "difference": {"accuracy": {"value": -0.003, "low": -0.009, "high": 0.002}},
    },
    "slices": [
        {"slice": "carrier=UA", "examples": 900, "metrics": {"accuracy": 0.97}},
        {"slice": "carrier=HA", "examples": 12, "metrics": {"accuracy": 0.5}},
    ],
}

evaluation = json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else EVALUATION
for change in (
    {"max_drop": 0.001},
    {"max_drop": 0.001, "drop_test": "significantly_worse"},
    {"max_drop": 0.01, "drop_test": "non_inferior"},
    {"slice_min": 0.9},
    {"slice_min": 0.9, "small_slices": "unknown"},
):
    print(change, "->", decide(evaluation, Thresholds(min_accuracy=0.9, **change)).words())

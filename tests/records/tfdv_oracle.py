"""What TensorFlow Data Validation says of a small table: written to tfdv_oracle.json, an oracle for our own.

TFDV has pins that don't go with ours, so it is run by hand in an environment of its own:

    python3.11 -m venv tfdv && tfdv/bin/pip install tensorflow-data-validation==1.16.1
    tfdv/bin/python tests/records/tfdv_oracle.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).with_suffix(".json")
ROWS = 5000


def columns(shifted: bool = False) -> dict[str, list[Any]]:
    """A table by formulas, the same everywhere; `shifted` is a later span of it that has drifted."""
    # Golden-ratio steps fill [0, 1) evenly; the normal's inverse by a logistic curve is near enough.
    even = [(i * 0.6180339887498949) % 1 for i in range(1, ROWS + 1)]
    again = [(i * 0.7548776662466927) % 1 for i in range(1, ROWS + 1)]
    move = 0.75 if shifted else 0.0
    bell = [math.log(u / (1 - u)) + move for u in even]
    heavy = [math.exp(3 * math.log(v / (1 - v))) for v in again]
    words = ["red", "green", "blue", "white"] + (["black"] if shifted else [])
    return {
        "bell": [None if i % 10 == 3 else float(x) for i, x in enumerate(bell)],
        "heavy": heavy,
        "same": [float(x) for x in again],
        "count": [int(10 * u * u) for u in even],
        "color": [words[int(len(words) * u * u)] for u in even],
    }


def _describe(feature: Any) -> dict[str, Any]:
    common = (feature.num_stats if feature.HasField("num_stats") else feature.string_stats).common_stats
    out: dict[str, Any] = {"present": common.num_non_missing, "missing": common.num_missing}
    if feature.HasField("num_stats"):
        numbers = feature.num_stats
        out |= {"mean": numbers.mean, "std": numbers.std_dev, "zeros": numbers.num_zeros}
        out |= {"min": numbers.min, "max": numbers.max, "median": numbers.median}
        quantiles = next(h for h in numbers.histograms if h.type == h.QUANTILES)
        out["deciles"] = [quantiles.buckets[0].low_value, *(b.high_value for b in quantiles.buckets)]
    else:
        out["distinct"] = feature.string_stats.unique
        out["mean_length"] = feature.string_stats.avg_length
        ranks = feature.string_stats.rank_histogram.buckets
        out["top"] = [[bucket.label, int(bucket.sample_count)] for bucket in ranks]
    return out


def main() -> None:
    import numpy as np
    import pandas as pd
    import tensorflow_data_validation as tfdv
    from tensorflow_metadata.proto.v0 import schema_pb2

    def statistics(shifted: bool) -> Any:
        frame = pd.DataFrame(
            {
                name: [np.nan if v is None else np.float32(v) for v in values]
                if isinstance(values[0], float)
                else values
                for name, values in columns(shifted).items()
            }
        )
        for name in ("bell", "heavy", "same"):
            frame[name] = [None if v is None else np.float32(v) for v in columns(shifted)[name]]
            frame[name] = frame[name].astype("float32")
        return tfdv.generate_statistics_from_dataframe(frame)

    before, after = statistics(False), statistics(True)
    schema = tfdv.infer_schema(before)
    for feature in schema.feature:
        comparator = feature.drift_comparator
        if feature.type == schema_pb2.BYTES:
            comparator.infinity_norm.threshold = 1e-9
        else:
            comparator.jensen_shannon_divergence.threshold = 1e-9
    drift = tfdv.validate_statistics(after, schema, previous_statistics=before)
    found = {
        "tfdv": tfdv.__version__,
        "statistics": {f.path.step[0]: _describe(f) for f in before.datasets[0].features},
        "drift": {
            info.path.step[0]: info.drift_measurements[0].value
            for info in drift.drift_skew_info
            if info.drift_measurements
        },
        "anomalies": {name: a.description for name, a in drift.anomaly_info.items()},
    }
    ORACLE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

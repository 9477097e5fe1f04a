"""Writes the models and config files that the conformance suite asks a server for.

    python tests/serving/conformance/models.py FOLDER

- `half_plus_two`, `half_plus_three`: TF Serving's own examples (y = x / 2 + 2 and + 3), version 123, with their
  signatures serving_default, regress_x_to_y, regress_x_to_y2, regress_x2_to_y3, classify_x_to_y.
- `versions`: version 1 is half_plus_two and labelled stable, version 2 is half_plus_three and labelled canary.
- `named`: the inputs `tag`, `signal` and `sensor` of the REST page, given back under other names.
- `types`: a signature for each type that JSON can carry, which gives back what it is given.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

TYPES = (
    "bool",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint32",
    "uint64",
    "string",
)

CONFIG = """model_config_list {{
  config {{ name: "half_plus_two" base_path: "{root}/half_plus_two" model_platform: "tensorflow" }}
  config {{ name: "half_plus_three" base_path: "{root}/half_plus_three" model_platform: "tensorflow" }}
  config {{ name: "named" base_path: "{root}/named" model_platform: "tensorflow" }}
  config {{ name: "types" base_path: "{root}/types" model_platform: "tensorflow" }}
  config {{
    name: "versions"
    base_path: "{root}/versions"
    model_platform: "tensorflow"
    model_version_policy {{ all {{}} }}
    version_labels {{ key: "stable" value: 1 }}
    version_labels {{ key: "canary" value: 2 }}
  }}
}}
"""
MONITORING = 'prometheus_config { enable: true path: "/monitoring/prometheus/metrics" }\n'
BATCHING = "max_batch_size { value: 32 }\nbatch_timeout_micros { value: 0 }\nnum_batch_threads { value: 2 }\n"


def _half_plus(path: Path, b: float, c: float) -> None:
    """y = x / 2 + b, y2 = x / 2 + c, y3 = x2 / 2 + c: in a graph of TensorFlow 1, whose heads share their input."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        a = v1.get_variable("a", initializer=0.5, use_resource=True)
        b_ = v1.get_variable("b", initializer=b, use_resource=True)
        c_ = v1.get_variable("c", initializer=c, use_resource=True)
        example = v1.placeholder(tf.string, [None], name="tf_example")
        spec = {
            "x": tf.io.FixedLenFeature([1], tf.float32),
            "x2": tf.io.FixedLenFeature([1], tf.float32, default_value=[0.0]),
        }
        parsed = tf.io.parse_example(example, spec)
        x = tf.identity(parsed["x"], name="x")
        x2 = tf.identity(parsed["x2"], name="x2")
        y, y2, y3 = a * x + b_, a * x + c_, a * x2 + c_

        def signature(method: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
            info = v1.saved_model.build_tensor_info
            return v1.saved_model.build_signature_def(
                {k: info(t) for k, t in inputs.items()},
                {k: info(t) for k, t in outputs.items()},
                f"tensorflow/serving/{method}",
            )

        signatures = {
            "serving_default": signature("predict", {"x": x}, {"y": y}),
            "regress_x_to_y": signature("regress", {"inputs": example}, {"outputs": y}),
            "regress_x_to_y2": signature("regress", {"inputs": example}, {"outputs": y2}),
            "regress_x2_to_y3": signature("regress", {"inputs": x2}, {"outputs": y3}),
            "classify_x_to_y": signature("classify", {"inputs": example}, {"scores": y}),
        }
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(path))
        builder.add_meta_graph_and_variables(
            session, [v1.saved_model.tag_constants.SERVING], signature_def_map=signatures
        )
        builder.save()


def _save_module(path: Path, functions: dict[str, Any]) -> None:
    import tensorflow as tf

    tf.saved_model.save(tf.Module(), str(path), signatures=functions)


def _named(path: Path) -> None:
    import tensorflow as tf

    @tf.function(
        input_signature=[
            tf.TensorSpec(None, tf.string, name="tag"),
            tf.TensorSpec(None, tf.int64, name="signal"),
            tf.TensorSpec(None, tf.int64, name="sensor"),
        ]
    )
    def back(tag, signal, sensor):
        return {
            "tag_out": tf.identity(tag),
            "tag_bytes": tf.identity(tag),
            "signal_out": tf.identity(signal),
            "sensor_out": tf.identity(sensor),
        }

    _save_module(path, {"serving_default": back})


def _types(path: Path) -> None:
    import tensorflow as tf

    functions = {}
    for name in TYPES:
        spec = tf.TensorSpec(None, tf.dtypes.as_dtype(name), name="x")
        functions[name] = tf.function(lambda x: {"y": tf.identity(x)}, input_signature=[spec])
    functions["serving_default"] = functions["float32"]
    _save_module(path, functions)


def write(folder: Path) -> None:
    """Write all models and config files; what was written before is replaced."""
    writers = {
        "half_plus_two/123": lambda path: _half_plus(path, 2.0, 3.0),
        "half_plus_three/123": lambda path: _half_plus(path, 3.0, 3.0),
        "versions/1": lambda path: _half_plus(path, 2.0, 3.0),
        "versions/2": lambda path: _half_plus(path, 3.0, 3.0),
        "named/1": _named,
        "types/1": _types,
    }
    for name, writer in writers.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        writer(folder / name)
    (folder / "models.config").write_text(CONFIG.format(root=folder))
    (folder / "monitoring.config").write_text(MONITORING)
    (folder / "batching.config").write_text(BATCHING)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]).resolve())

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, time
start = time.process_time()
import serving.client, serving.rest_client
spent = time.process_time() - start
assert "tensorflow" not in sys.modules and "tensorflow.python" not in sys.modules, "tensorflow is imported"
assert spent < 3, f"the client costs {spent:.1f} CPU-s to import"
import warnings
warnings.simplefilter("ignore")
import tensorflow as tf
from serving.stubs import predict_pb2
assert tf.constant(2) + 3 == 5 and tf.keras.layers.Dense
request = predict_pb2.PredictRequest()
request.inputs["x"].CopyFrom(tf.make_tensor_proto([1.0]))
assert tf.train.Example is serving.stubs.example_pb2.Example
print("fine")
"""


def test_the_client_needs_no_tensorflow_and_leaves_it_importable():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


def test_what_a_dag_file_imports_is_light():
    script = (
        "import sys, serving.release.steps, serving.release.gate, serving.release.mlflow_aliases\n"
        "heavy = {'tensorflow', 'numpy', 'grpc', 'google.protobuf', 'mlflow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr

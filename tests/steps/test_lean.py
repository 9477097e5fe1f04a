"""Imports for less: what is hidden comes back, and the libraries work without."""

import gc
import json
import os
import subprocess
import sys

import pytest

from trainers import lean


def test_hidden_names_are_not_found_and_come_back(tmp_path, monkeypatch):
    (tmp_path / "lean_probe.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with lean.without("lean_probe", "json"):
        assert not gc.isenabled()
        with pytest.raises(ModuleNotFoundError):
            __import__("lean_probe")
        assert __import__("json") is json  # here already: stays
    assert gc.isenabled()
    assert __import__("lean_probe").value == 1
    monkeypatch.delitem(sys.modules, "lean_probe")


def test_an_error_inside_leaves_nothing_hidden(monkeypatch):
    with pytest.raises(ZeroDivisionError), lean.without("lean_nothing"):
        raise ZeroDivisionError
    assert "lean_nothing" not in sys.modules
    assert gc.isenabled()
    gc.disable()
    try:
        with lean.without("lean_nothing"):
            pass
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()


def test_tensorflow_that_is_here_already_is_given_as_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", json)
    assert lean.import_tensorflow() is json


PROBE = """
import json, os, sys
from trainers.lean import import_tensorflow
tf = import_tensorflow()
hidden = [name for name in ("sklearn", "matplotlib", "pandas") if name in sys.modules]
import keras, pandas
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
out = float(model(tf.ones((1, 2)))[0, 0])
print(json.dumps({"hidden": hidden, "out": out, "backend": keras.backend.backend(),
                  "level": os.environ["TF_CPP_MIN_LOG_LEVEL"], "pandas": pandas.Series([1]).sum().item()}))
"""


def test_a_process_that_imports_tensorflow_so():
    env = {k: v for k, v in os.environ.items() if k not in ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND")}
    run = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    expected = {"hidden": [], "out": 2.0, "backend": "tensorflow", "level": "3", "pandas": 1}
    assert json.loads(run.stdout.splitlines()[-1]) == expected

"""The package as a whole: standard library only, quick to import, its names and examples true."""

import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainers.job

ROOT = Path(trainers.job.__file__).parents[2]
MODULES = sorted(m.name for m in pkgutil.iter_modules(trainers.job.__path__, "trainers.job."))

BARE = """
import json, sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [sys.argv[1]]
before = set(sys.modules)
for name in sys.argv[2:]:
    __import__(name)
print(json.dumps(sorted({m.partition(".")[0] for m in set(sys.modules) - before})))
"""


def test_a_bare_interpreter_imports_it():
    # -I: no PYTHONPATH, no user site; -S: no site-packages at all.
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", BARE, str(ROOT), *MODULES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert set(json.loads(run.stdout)) - {"trainers"} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", MODULES)
def test_examples_and_names(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert doctest.testmod(module).failed == 0
    for public in module.__all__:
        value = getattr(module, public)
        assert not callable(value) or value.__doc__, f"{name}.{public} has no docstring"


def test_the_index_names_every_room():
    rooms = {line.split()[0] for line in trainers.job.__doc__.splitlines() if line.startswith("    ")}
    helpers = {"checks", "files", "ports"}
    assert rooms == {m.rpartition(".")[2] for m in MODULES} - helpers

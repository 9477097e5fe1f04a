"""Fifty steps of each strategy that steps together are fifty steps of one process with the batch of all.

The cases of equal_cases.py: schedules, clipping, moving averages, mixed precision, XLA, embeddings, sample weights,
plain modules, variables cut over parameter servers. What each process says is compared here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainers.job.ports import free_ports

# Several processes that import TensorFlow, on a machine that may be busy.
pytestmark = pytest.mark.timeout(1200)

CASES = ("clip_norm_cosine_ema", "module_clip_value", "float16", "bfloat16_subclassed", "jit", "state")
STRATEGIES = ("mirrored", "multi_worker", "servers", "sync_servers")
# Each replica rounds sums of its own batch: relative, of a loss. 8 bits of mantissa make bfloat16 coarse.
TOLERANCES = {"bfloat16_subclassed": 0.02}
ENV = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def start(*strategies: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.equal_cases", *strategies],
        env={**os.environ, **ENV, **env},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What each case gave under each strategy; four processes for all."""
    chief, worker = (f"127.0.0.1:{port}" for port in free_ports(2))
    cluster = {"chief": [chief], "worker": [worker]}
    configs = [json.dumps({"cluster": cluster, "task": {"type": t, "index": 0}}) for t in cluster]
    peers = [start("multi_worker", TF_CONFIG=config) for config in configs]
    try:
        outputs = [peer.communicate(timeout=900) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
    for strategies in (("local", "mirrored", "servers"), ("sync_servers",)):
        alone = start(*strategies)
        try:
            outputs.append(alone.communicate(timeout=900))
        finally:
            alone.kill()
    values: dict[str, Any] = {}
    for output, errors in reversed(outputs):
        assert output, errors.decode()[-4000:]
        values |= json.loads(output.splitlines()[-1])
    return values


def off(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(
        (abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours, theirs, strict=True)),
        default=0.0,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_do_what_one_does_with_the_whole_batch(
    found: dict[str, Any], strategy: str, case: str
) -> None:
    if "servers" in strategy and case == "jit":
        refused = found[f"{strategy}/jit"]["error"]
        assert "jit_compile does not work with strategy parameter_server" in refused
        return
    ours, local = found[f"{strategy}/{case}"], found[f"local/{case}"]
    assert "error" not in ours, ours
    assert len(ours["losses"]) == 50
    if strategy != "servers" and case == "state":
        # Dropout and the statistics of a batch are each replica's own: it learns, but other numbers.
        assert sum(ours["losses"][-10:]) < 0.6 * sum(ours["losses"][:10])
        return
    if strategy != "servers" and case == "float16":
        # What overflows, and is passed over while the scale is found, depends on a replica's batch.
        assert ours["losses"][-1] == pytest.approx(local["losses"][-1], rel=0.01)
        assert 45 <= ours["iterations"] <= 50
        return
    tolerance = TOLERANCES.get(case, 2e-5)
    assert ours["iterations"] == local["iterations"]
    for name in ("losses", "weights", "averages", "state"):
        assert off(ours[name], local[name]) < tolerance, name


@pytest.mark.parametrize("case", CASES)
def test_the_losses_of_a_case_say_that_it_learns(found: dict[str, Any], case: str) -> None:
    losses = found[f"local/{case}"]["losses"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_variables_were_cut_over_two_servers(found: dict[str, Any]) -> None:
    cut = {case: found[f"servers/{case}"]["cut"] for case in CASES if case != "jit"}
    assert cut["clip_norm_cosine_ema"] == found["sync_servers/clip_norm_cosine_ema"]["cut"] == 1
    assert cut["module_clip_value"] == 1


def test_averages_are_not_the_weights(found: dict[str, Any]) -> None:
    values = found["servers/clip_norm_cosine_ema"]
    assert len(values["averages"]) == len(values["weights"])
    assert off(values["averages"], values["weights"]) > 0.001

"""benchmarks/serving.py: its clients ask rightly, its verdicts follow the figures, and it runs whole."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from serving.stubs import predict_pb2
from serving.tensors import from_proto, to_proto

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def serving_page():
    spec = importlib.util.spec_from_file_location("serving_page", BENCHMARKS / "serving_page.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving_page"] = module  # its dataclasses look there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["serving_page"]


@pytest.fixture
def ask():
    """Asks the clients' process to measure."""
    process = subprocess.Popen(
        [sys.executable, BENCHMARKS / "serving_load.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def measure(**what):
        process.stdin.write(json.dumps({"clients": 3, "warm_up": 0.05, "seconds": 0.1, **what}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield measure
    process.kill()
    process.communicate()


@pytest.mark.parametrize("rows", [1, 4000])
def test_the_clients_get_the_models_answer_over_both_protocols(
    shared_server, images, expected, ask, tmp_path, rows
):
    many = np.resize(images, (rows, 8, 8, 1))
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.version.value = "digits", 1
    request.output_filter.append("logits")
    to_proto(many, request.inputs["image"])
    (tmp_path / "grpc").write_bytes(request.SerializeToString())
    (tmp_path / "json").write_text(json.dumps({"instances": many[:1000].tolist()}))  # the server takes 1 MB
    right = np.resize(expected[1]["logits"], (rows, 10))

    path = "/tensorflow.serving.PredictionService/Predict"
    got = ask(protocol="grpc", port=shared_server.port, path=path, body=str(tmp_path / "grpc"))
    assert got["errors"] == 0
    assert got["requests"] >= 1
    assert 0 < got["p50"] <= got["p99"]
    answer = predict_pb2.PredictResponse.FromString(bytes.fromhex(got["answer"]))
    np.testing.assert_allclose(from_proto(answer.outputs["logits"]), right, rtol=1e-3)

    path = "/v1/models/digits/versions/1:predict"
    got = ask(protocol="http", port=shared_server.rest_port, path=path, body=str(tmp_path / "json"))
    assert got["errors"] == 0
    predictions = json.loads(bytes.fromhex(got["answer"]))["predictions"]
    np.testing.assert_allclose([row["logits"] for row in predictions], right[:1000], rtol=1e-3)


def test_the_clients_count_failures_and_say_the_first(shared_server, ask, tmp_path):
    (tmp_path / "body").write_bytes(b"{}")
    wrong = ask(
        protocol="grpc", port=shared_server.port, path="/tensorflow.serving.Nothing/No", body=str(tmp_path / "body")
    )  # fmt: skip
    assert wrong["errors"] > 0
    assert "without a message" in wrong["first_error"]
    path = "/v1/models/nobody:predict"
    wrong = ask(protocol="http", port=shared_server.rest_port, path=path, body=str(tmp_path / "body"))
    assert wrong["errors"] > 0
    assert "http/1.1 404" in wrong["first_error"]


def _results(page, ours_rate=1000.0, p99=0.002):
    def run(rate, p99=0.002):
        return {"rate": rate, "p50": 0.001, "p99": p99, "cpu": 1e-4, "client_cpu": 1e-5}

    cell = "mlp | 1 | 16"
    runs = {
        f"ours: gRPC | {cell}": [run(ours_rate, p99)] * 3,
        f"ours: REST | {cell}": [run(900.0)] * 3,
        f"no-op: gRPC | {cell}": [run(1500.0)] * 3,
        f"MLflow: REST | {cell}": [run(150.0)] * 3,
    }
    calls = {
        f"{road} | mlp | 1 | {n}": [{"rate": 9e3, "cpu": 5e-5}]
        for road in ("session", "signature")
        for n in (1, 16)
    }
    swap = {"requests": 10, "swap_requests": 9, "errors": 0, "p50": 0.001, "p99": 0.002, "swap_p50": 0.001}
    release = {"publish": 0.1, "deploy": 1.0, "verify": 0.5, "promote": 0.1, "rollback": 0.2}
    return page.Results(
        runs, calls, {"MLServer: gRPC": "left out"}, {"ours: gRPC": 5e8},
        [{**swap, "swap_p99": 0.003, "available_s": 0.3}], [release],
        {"create": 3.0, "rollback": 6.0}, {"mlp": 1_600_000, "cnn": 10_000_000},
    )  # fmt: skip


def test_verdicts_follow_the_figures(serving_page):
    verdicts = {goal.what: goal for goal in serving_page.goals(_results(serving_page))}
    assert verdicts["ours, gRPC, to MLflow in requests/s, 1 example a request"].found == "6.7 times"
    assert verdicts["ours, gRPC, to MLflow in requests/s, 1 example a request"].reached is True
    assert verdicts["ours, to the gRPC ceiling in requests/s, 1 example, 16 clients"].found == "67%"
    assert verdicts["p99 under load with a version swap, to without"].reached is False
    assert verdicts["rollback, 10 MB"].reached is True
    assert verdicts["rollback by `trainyard models rollback`"].reached is False
    worse = {g.what: g.reached for g in serving_page.goals(_results(serving_page, ours_rate=500.0, p99=0.01))}
    assert worse["ours, to the gRPC ceiling in requests/s, 1 example, 16 clients"] is False
    assert worse["ours, gRPC, to MLflow in requests/s, 1 example a request"] is False
    assert worse["ours, gRPC: p99 to p50, 1 example"] is False
    assert worse["ours with batching, to the gRPC ceiling in requests/s, 1 example, 16 clients"] is None


def test_the_page_says_what_was_not_measured_and_holds_the_raw_numbers(serving_page):
    options = argparse.Namespace(rounds=3, seconds=0.1, quick=True, busy=0.5)
    text = serving_page.page(_results(serving_page), options)
    assert "Not measured: MLServer: gRPC, left out." in text
    assert "**not reached**" in text
    assert "quick run" in text
    raw = json.loads(text.split("```json")[1].split("```")[0])
    assert raw["runs"]["ours: gRPC | mlp | 1 | 16"][0]["rate"] == 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_benchmark_runs_whole(tmp_path):
    """Without the peers, which need an environment of their own, and with figures that mean nothing."""
    command = [sys.executable, BENCHMARKS / "serving.py", "--quick", "--no-peers", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--seconds", "0.05", "--markdown", tmp_path / "page.md"],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.md").read_text()
    assert text + "\n" == done.stdout
    for title in (
        "## Goals",
        "## MLP, 784-500-10: 32 examples",
        "## Memory",
        "## A release",
        "## What bounds it",
    ):
        assert title in text
    assert "requests lost in swaps | 0 | 0 | reached" in text

"""How fast models are served: our server, MLflow's, MLServer, and the limits, side by side.

    .venv/bin/python benchmarks/serving.py [--quick] [--rounds 5] [--seconds 0.8] [--no-peers]
                                           [--markdown benchmarks/serving.md]

Two models (784-500-10, and a convolutional one of 10 MB), 1 and 32 examples a request, 1, 4 and 16 clients, over gRPC
and REST. All servers run at once, each in processes of its own, and are asked by turns, so that a slow moment of the
machine meets all of them; the figures are medians of the rounds. The clients are a process of their own too
(serving_load.py). Before anything is measured, every server's answer is compared with the model's own. Then versions
are swapped under load, and released and rolled back by the release steps (serving_release.py). The page's words and
verdicts are made from the figures (serving_page.py). About 11 minutes; --quick takes 1 and is for trying it out.

MLServer runs in an environment of its own, made at the first run (peers/make_mlserver.py); where it can't be made, the
page says so. It needs no network otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import serving_page
import serving_peers
import serving_release
from peers import make_mlserver
from serving_peers import PREDICT, DidNotStart, Server

HERE = Path(__file__).resolve().parent
MODELS, BATCHES, CLIENTS = ("mlp", "cnn"), (1, 32), (1, 4, 16)

Say = Callable[[str], None]
Run = dict[str, Any]


class Clients:
    """The process that asks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "serving_load.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip

    def ask(self, **what: Any) -> Run:
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the clients' process ended"}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Contender:
    """A server over one protocol: where it is asked for a model, with what, and how its answer is read."""

    def __init__(
        self, server: Server, protocol: str, port: int | Mapping[Any, int], path: str, body: str,
        read: Callable[[bytes], np.ndarray] | None,
    ) -> None:  # fmt: skip
        self.server, self.protocol, self._port, self._path, self._body, self.read = (
            server, protocol, port, path, body, read
        )  # fmt: skip

    def question(self, folder: Path, model: str, batch: int) -> dict[str, Any]:
        port = self._port if isinstance(self._port, int) else self._port[model]
        return {
            "protocol": self.protocol, "port": port, "path": self._path.format(model=model),
            "body": str(folder / "requests" / f"{model}-{batch}.{self._body}"),
        }  # fmt: skip


def read_predict(answer: bytes) -> np.ndarray:
    from serving.stubs import predict_pb2
    from serving.tensors import from_proto

    return from_proto(predict_pb2.PredictResponse.FromString(answer).outputs["probabilities"])


def read_rest(answer: bytes) -> np.ndarray:
    return np.array(json.loads(answer)["predictions"], "f4")


def read_v2_json(answer: bytes) -> np.ndarray:
    return np.array(json.loads(answer)["outputs"][0]["data"], "f4")


def read_v2_grpc(answer: bytes) -> np.ndarray:
    """The raw values, which MLServer writes last, 10 a row: as many as divide the message's end."""
    size = 1280 if len(answer) > 1280 else 40
    return np.frombuffer(answer[-size:], "f4")


def start(folder: Path, stack: ExitStack, peers: bool, say: Say) -> dict[str, Contender | str]:
    """Start every server; the contenders by name, or why one is missing."""
    found: dict[str, Contender | str] = {}

    def started(server: Server) -> Server:
        stack.callback(server.stop)
        return server

    kinds = {"ours": (), "ours, batching": ("--enable_batching",), "ours, pool": ("--grpc_direct=false",)}
    for name, flags in kinds.items():
        config = serving_peers.config_of(folder / "models", MODELS)
        server, ports = serving_peers.ours(folder, config, *flags, name=name.replace(", ", "-"))
        started(server)
        found[f"{name}: gRPC"] = Contender(server, "grpc", ports["grpc"], PREDICT, "grpc", read_predict)
        if not flags:
            path = "/v1/models/{model}:predict"
            found[f"{name}: REST"] = Contender(server, "http", ports["rest"], path, "json", read_rest)
    for batch in BATCHES:
        server, port = serving_peers.noop(folder, folder / "requests" / f"mlp-{batch}.answer")
        found[f"no-op {batch}: gRPC"] = Contender(started(server), "grpc", port, PREDICT, "grpc", None)
    if not peers:
        return found | dict.fromkeys(
            ("MLflow: REST", "MLServer: gRPC", "MLServer: REST"), "left out by --no-peers"
        )
    say("starting MLflow")
    try:
        running = {}
        for model in MODELS:
            running[model] = serving_peers.mlflow(folder, folder / "mlflow" / model)
            started(running[model][0])
        found["MLflow: REST"] = Contender(
            Together([server for server, _ in running.values()]), "http",
            {model: port for model, (_, port) in running.items()}, "/invocations", "json", read_rest,
        )  # fmt: skip
    except DidNotStart as e:
        found["MLflow: REST"] = f"did not start: {e}"
    say("looking for MLServer's environment, or making it")
    python, problem = make_mlserver.make()
    try:
        if python is None:
            raise DidNotStart(problem)
        server, ports = serving_peers.mlserver(folder, python, folder / "mlflow", MODELS)
        started(server)
        grpc_path, rest_path = "/inference.GRPCInferenceService/ModelInfer", "/v2/models/{model}/infer"
        found["MLServer: gRPC"] = Contender(server, "grpc", ports["grpc"], grpc_path, "v2grpc", read_v2_grpc)
        found["MLServer: REST"] = Contender(server, "http", ports["http"], rest_path, "v2json", read_v2_json)
    except DidNotStart as e:
        found |= dict.fromkeys(("MLServer: gRPC", "MLServer: REST"), f"did not start: {e}")
    return found


class Together:
    """Servers that are one contender: MLflow has one for each model."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers

    def cpu(self) -> float:
        return sum(server.cpu() for server in self._servers)

    def rss(self) -> int:
        return sum(server.rss() for server in self._servers)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    for model in MODELS:
        for batch in BATCHES:
            for clients in CLIENTS:
                if not options.quick or (model == "mlp" and clients != 4):
                    yield model, batch, clients


def check(contenders: Mapping[str, Contender | str], clients: Clients, folder: Path) -> None:
    """Ask everyone once for everything; a wrong answer ends the run."""
    for model in MODELS:
        for batch in BATCHES:
            right = np.load(folder / "requests" / f"{model}-{batch}.npy")
            for name, contender in contenders.items():
                if isinstance(contender, str) or contender.read is None:
                    continue
                question = contender.question(folder, model, batch)
                got = clients.ask(**question, clients=1, warm_up=0.5, seconds=0.5)
                if "error" in got or got["errors"] or not got["answer"]:
                    sys.exit(f"{name} does not answer {model} {batch}: {got.get('error') or got}")
                answer = contender.read(bytes.fromhex(got["answer"])).reshape(right.shape)
                if not np.allclose(answer, right, rtol=1e-3, atol=1e-5):
                    sys.exit(f"{name} answers {model} {batch} wrongly")


def asked(name: str, model: str, batch: int) -> bool:
    """Each no-op server answers one batch size; grpcio's pool is compared with ours by small requests only."""
    if name.startswith("no-op"):
        return name == f"no-op {batch}: gRPC"
    return not name.startswith("ours, pool") or (model, batch) == ("mlp", 1)


def measure(
    contenders: Mapping[str, Contender | str],
    clients: Clients,
    folder: Path,
    options: argparse.Namespace,
    say: Say,
) -> dict[str, list[Run]]:
    """Runs by "contender | model | batch | clients"."""
    found: dict[str, list[Run]] = {}
    for number in range(options.rounds):
        for model, batch, count in cells(options):
            for name, contender in contenders.items():
                if isinstance(contender, str) or not asked(name, model, batch):
                    continue
                question = contender.question(folder, model, batch)
                clients.ask(**question, clients=count, warm_up=options.seconds / 4, seconds=0.001)
                used = contender.server.cpu()
                run = clients.ask(**question, clients=count, warm_up=0, seconds=options.seconds)
                used = contender.server.cpu() - used
                if "error" in run or run["errors"]:
                    sys.exit(
                        f"{name}, {model}, {batch}, {count} clients: {run.get('error') or run['first_error']}"
                    )
                shown = name.replace(f"no-op {batch}", "no-op")
                found.setdefault(f"{shown} | {model} | {batch} | {count}", []).append(
                    {
                        "rate": run["requests"] / run["seconds"],
                        "p50": run["p50"],
                        "p99": run["p99"],
                        "cpu": used / run["requests"],
                        "client_cpu": run["cpu"] / run["requests"],
                    }
                )
        say(f"round {number + 1} of {options.rounds}")
    return found


def in_process(folder: Path, options: argparse.Namespace) -> dict[str, list[Run]]:
    """The function without a server: see serving_calls.py."""
    done = subprocess.run(
        [sys.executable, str(HERE / "serving_calls.py"), str(folder), str(options.rounds), str(options.seconds / 4)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="fewer of everything, to try it out")
    parser.add_argument("--no-peers", action="store_true", help="leave out MLflow and MLServer, and say so")
    parser.add_argument("--markdown", type=Path, help="write the page there too")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = min(options.rounds, 2), min(options.seconds, 0.2)

    options.busy = os.getloadavg()[0]

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name, ExitStack() as stack:
        folder = Path(name) / "serving"
        say("making the models")
        subprocess.run(
            [sys.executable, str(HERE / "serving_models.py"), str(folder)], check=True, stderr=subprocess.DEVNULL
        )  # fmt: skip
        say("releasing and rolling back")
        releases, commands = serving_release.releases(folder, options.rounds, say)
        clients = Clients()
        stack.callback(clients.close)
        say("swapping versions under load")
        swaps = serving_release.swaps(folder, clients.ask, options.rounds, 1.5 if options.quick else 3.0, say)
        say("measuring without a server")
        calls = in_process(folder, options)
        contenders = start(folder, stack, not options.no_peers, say)
        check(contenders, clients, folder)
        runs = measure(contenders, clients, folder, options, say)
        missing = {name: why for name, why in contenders.items() if isinstance(why, str)}
        memory = {
            name.replace("no-op 1:", "no-op:"): contender.server.rss()
            for name, contender in contenders.items()
            if not isinstance(contender, str) and name != "no-op 32: gRPC"
        }
        sizes = {
            model: sum(path.stat().st_size for path in (folder / "models" / model).rglob("*"))
            for model in MODELS
        }
    text = serving_page.page(
        serving_page.Results(runs, calls, missing, memory, swaps, releases, commands, sizes), options
    )
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()

"""What a gang costs beside its pods: by hand, by Trainyard, as plain mapped pod operators; then 1,000 deferred.

    .venv/bin/python benchmarks/gang.py [--part gangs] [--part deferred] [--sizes 4,16,64] [--repeats 1]
        [--replicas 1000] [--out benchmarks/gang.md]

Pods run on the cluster that KUBECONFIG names, in a namespace of the benchmark's own, or on a process kubelet.
Every replica's pod does nothing until it is told to end. On a cluster its nodes must see this machine's folder
`--shared` (a hostPath), and have `--image`. All requests at the API server go through a proxy that counts them.
The part `deferred` always uses a process kubelet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from gang_deferred import measure_deferred
from gang_page import page
from gang_pause import manifest
from gang_proxy import CountingProxy
from gang_ways import AirflowWay, Figures, Limit, Place
from trainyard.platform import Platform
from trainyard.platform.settings import Settings

HERE = Path(__file__).resolve().parent
NAMESPACE = "gang-benchmark"
SLOTS = 8
"""Tasks that Airflow runs at once, in both ways."""


def set_up(folder: Path, shared: Path, image: str, *, cluster: bool) -> None:
    """What `gang_pause` reads, here and in Airflow's processes."""
    shared.mkdir(parents=True, exist_ok=True)
    shared.chmod(0o755)
    os.environ.update(
        GANG_BENCH_TOLD=str(shared),
        GANG_BENCH_IMAGE=image,
        GANG_BENCH_NAMESPACE=NAMESPACE,
        GANG_BENCH_MOUNT="1" if cluster else "",
        GANG_BENCH_PIPES="" if cluster else "1",
        GANG_BENCH_MEMORY="32Mi" if cluster else "16Mi",
        PYTHONPATH=str(folder / "modules"),  # alone: other files here have names of packages
    )
    (folder / "bare").mkdir()
    (folder / "modules").mkdir()
    shutil.copy(HERE / "gang_pause.py", folder / "modules")


@contextlib.contextmanager
def process_kubelet(folder: Path, pods: int) -> Iterator[str]:
    """A process kubelet of its own; its kubeconfig."""
    kubeconfig = folder / "kubelet/kubeconfig"
    command = [sys.executable, "-m", "trainyard.kubelet", f"--root={folder / 'kubelet'}"]
    with subprocess.Popen(
        [*command, f"--namespace={NAMESPACE}", f"--max-pods={pods}"], stdout=subprocess.DEVNULL
    ) as process:
        try:
            while not kubeconfig.exists():
                if process.poll() is not None:
                    raise SystemExit(f"the process kubelet ended with {process.returncode}")
                time.sleep(0.1)
            yield str(kubeconfig)
        finally:
            process.terminate()


@contextlib.contextmanager
def place_of(upstream: str, kubeconfig: Path, *, cluster: bool) -> Iterator[Place]:
    """The cluster behind a counting proxy; on a real one with a namespace that goes at the end."""
    from kubernetes import client, config

    api = client.CoreV1Api(config.new_client_from_config(upstream))
    if cluster:
        api.create_namespace({"metadata": {"name": NAMESPACE}})
        until_ready(api)
    try:
        with CountingProxy(upstream, kubeconfig, NAMESPACE) as proxy:
            yield Place(proxy, str(kubeconfig), api, NAMESPACE)
    finally:
        if cluster:
            api.delete_namespace(NAMESPACE)


def until_ready(api: Any) -> None:
    """A new namespace takes pods once its service account is there."""
    from kubernetes.client.exceptions import ApiException

    for _ in range(60):
        try:
            api.create_namespaced_pod(NAMESPACE, manifest("try", 0), dry_run="All")
        except ApiException as e:
            if e.status not in (403, 500):
                raise
            time.sleep(1)
        else:
            return
    raise SystemExit(f"namespace {NAMESPACE} takes no pods")


@contextlib.contextmanager
def airflow(folder: Path, kubeconfig: str, *, ours: bool) -> Iterator[Platform]:
    """An embedded platform's Airflow, ours or with Airflow's defaults, on the cluster of a kubeconfig."""
    home = folder / ("ours" if ours else "plain")
    settings = Settings(
        home,
        home / "storage",
        **({} if ours else {"repo": folder / "bare"}),
        dags=HERE / "gang_dags" / ("ours" if ours else "plain"),
        namespace=NAMESPACE,
        parallelism=SLOTS,
        deferrable=ours,
        triggerer=True,
        without=("kubelet", "mlflow", "model-server"),
    )
    settings.make_folders()
    shutil.copy(kubeconfig, settings.kubeconfig)
    host = () if ours else (sys.executable, str(HERE / "gang_plain_host.py"))
    platform = Platform(settings=settings, **({"host": host} if host else {}))
    with platform.running():
        yield platform


def measure_gangs(folder: Path, options: argparse.Namespace) -> list[Figures]:
    """All ways at all sizes, `--repeats` times each."""
    found: list[Figures] = []
    upstream, cluster = options.kubeconfig, bool(options.kubeconfig)
    with contextlib.ExitStack() as stack:
        if not cluster:
            upstream = stack.enter_context(process_kubelet(folder, 110))
        place = stack.enter_context(place_of(upstream, folder / "proxy/kubeconfig", cluster=cluster))
        shared = Path(os.environ["GANG_BENCH_TOLD"])

        def measure(way: Limit | AirflowWay) -> None:
            for repeat in range(options.repeats):
                for size in options.sizes:
                    run = f"{way.name}-{size}-{repeat}"
                    make_word(shared, run)
                    found.append(way.measure(size, run, options.hold))
                    told(found[-1])

        make_word(shared, "limit-first")
        limit = stack.enter_context(Limit(place))
        limit.measure(4, "limit-first", 0.0)
        measure(limit)
        for name in ("ours", "plain"):
            with airflow(folder, place.kubeconfig, ours=name == "ours") as platform:
                way = AirflowWay(name, f"gang_{name}", platform, place)
                make_word(shared, f"{name}-first")
                way.prepare(4)
                measure(way)
    return found


def make_word(shared: Path, run: str) -> None:
    """The pipe that a run's pods wait at, where they wait at pipes."""
    if os.environ["GANG_BENCH_PIPES"]:
        os.mkfifo(shared / run)


def told(figures: Figures) -> None:
    """One line of progress."""
    print(
        f"{figures.way:6} {figures.size:3}: running after {figures.running:6.1f} s, gone after {figures.gone:6.1f} s, "
        f"{figures.calls_a_replica():5.1f} calls and {figures.cpu_a_replica():5.2f} CPU-s a replica "
        f"(idle {figures.idle / figures.size:.2f})",
        flush=True,
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--part", action="append", choices=("gangs", "deferred"), help="both, if none is named"
    )
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")], default=[4, 16, 64])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--hold", type=float, default=10.0, help="seconds that all replicas wait")
    parser.add_argument("--replicas", type=int, default=1000, help="of the part `deferred`")
    parser.add_argument("--image", default="python:3.11-slim-bookworm", help="any with a shell, on a cluster")
    parser.add_argument("--shared", type=Path, help="a folder that the cluster's nodes see at this path")
    parser.add_argument(
        "--raw", type=Path, help="keep what was measured there, and take parts not measured from it"
    )
    parser.add_argument("--out", type=Path, help="write the page there too")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, and write the page."""
    options = parse()
    # Taken away: the provider's trigger refuses an environment that names a cluster beside the connection.
    options.kubeconfig = os.environ.pop("KUBECONFIG", "")
    raw: dict[str, Any] = json.loads(options.raw.read_text()) if options.raw and options.raw.exists() else {}
    parts = options.part or ["gangs", "deferred"]
    with tempfile.TemporaryDirectory(prefix="trainyard-gang-") as text:
        folder = Path(text)
        folder.chmod(0o711)  # pods of another user look for their file in it
        if "gangs" in parts:
            cluster = bool(options.kubeconfig)
            set_up(folder, options.shared or folder / "told", options.image, cluster=cluster)
            raw["gangs"] = {
                "cluster": cluster,
                "hold": options.hold,
                "slots": SLOTS,
                "runs": [vars(figures) for figures in measure_gangs(folder, options)],
            }
        if "deferred" in parts:
            apart = folder / "deferred"
            apart.mkdir()
            set_up(apart, apart / "told", "none", cluster=False)
            os.environ["GANG_BENCH_RETRIES"] = "0"
            make_word(apart / "told", "deferred")
            with (
                process_kubelet(apart, options.replicas + 10) as upstream,
                place_of(upstream, apart / "proxy/kubeconfig", cluster=False) as place,
                airflow(apart, place.kubeconfig, ours=True) as platform,
            ):
                kubelet = [p for p in psutil.Process().children() if "trainyard.kubelet" in p.cmdline()]
                raw["deferred"] = measure_deferred(platform, place, options.replicas, kubelet) | {
                    "slots": SLOTS
                }
        if options.raw:
            options.raw.write_text(json.dumps(raw, indent=1))
    text = page(raw)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()

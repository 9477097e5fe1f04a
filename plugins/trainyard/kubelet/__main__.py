"""`python -m trainyard.kubelet --root DIR`: run the process kubelet until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence

from trainyard.kubelet.kubelet import KubeletInUse, ProcessKubelet
from trainyard.kubelet.scheduler import MAX_PODS

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to stop; the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stopped = threading.Event()
    # Before anything is started, so that an early signal still ends it in good order.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        kubelet = _kubelet(args)
        kubelet.start()
    except (KubeletInUse, OSError, ValueError) as e:
        print(f"process kubelet: {e}", file=sys.stderr)
        return 1
    print(f"process kubelet ready at {kubelet.url} (kubeconfig {kubelet.kubeconfig})", flush=True)
    stopped.wait()
    kubelet.stop()
    return 0


def _kubelet(args: argparse.Namespace) -> ProcessKubelet:
    return ProcessKubelet(
        args.root,
        args.port,
        host=args.host,
        advertise=args.advertise,
        kubeconfig=args.kubeconfig,
        namespace=args.namespace,
        gpus=args.gpus,
        max_pods=args.max_pods,
        node_labels=dict(args.node_label),
        workdir=args.workdir,
        shutdown_grace=args.shutdown_grace,
        preload=args.preload,
        preload_for=args.preload_for or ["trainers"],
    )


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"a label must be KEY=VALUE, got {text!r}")
    return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard.kubelet",
        description="Serve the Kubernetes API on loopback and run pods as processes of this machine.",
    )
    parser.add_argument("--root", required=True, metavar="DIR", help="its folder: objects, logs, volumes")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="what to listen on (127.0.0.1); anything else is for a private network of containers: plain HTTP "
        "with a token, and whoever has the token runs commands here",
    )
    parser.add_argument(
        "--advertise", default="", metavar="NAME", help="what clients on that network call it by"
    )
    parser.add_argument(
        "--kubeconfig", metavar="PATH", help="where to write how to reach it (DIR/kubeconfig)"
    )
    parser.add_argument("--namespace", default="default", help="the kubeconfig's namespace (default)")
    parser.add_argument("--gpus", type=int, default=0, help="devices that pods may ask for (0)")
    parser.add_argument(
        "--max-pods", type=int, default=MAX_PODS, help=f"pods that run at once, others wait ({MAX_PODS})"
    )
    parser.add_argument(
        "--node-label",
        type=_label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one more label of the node; may be given again",
    )
    parser.add_argument("--workdir", metavar="DIR", help="where containers start (the current directory)")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE[:FUNCTION]",
        help="keep a warm process with this imported, and fork Python containers from it; may be given again",
    )
    parser.add_argument(
        "--preload-for",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="containers that are forked from it: `python -m PACKAGE...` (trainers); may be given again",
    )
    parser.add_argument(
        "--shutdown-grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="that all pods have to end when the kubelet stops (10)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

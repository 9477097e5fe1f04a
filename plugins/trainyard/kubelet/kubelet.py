"""The process kubelet as an object: start, stop, and the files in its folder.

root/
  kubelet.lock        held by the kubelet that uses the folder
  identity            in the environment of every process it starts, so that they are found after a crash
  token               the bearer token that clients must send (0600)
  objects/            the objects, one file each (0600)
  pods/<uid>/         logs, termination messages and volumes of a pod
  claims/<ns>/<name>/ volumes of persistent volume claims
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from trainyard.kubelet.api import Api
from trainyard.kubelet.environment import base_environment
from trainyard.kubelet.events import EventRecorder
from trainyard.kubelet.kubeconfig import write_kubeconfig
from trainyard.kubelet.logs import LogPump
from trainyard.kubelet.machine import Machine
from trainyard.kubelet.memory import MemoryWatcher
from trainyard.kubelet.node import Node
from trainyard.kubelet.prefork_starter import PreforkStarter
from trainyard.kubelet.processes import Guardian, PopenStarter, ProcessStarter, end_all
from trainyard.kubelet.recovery import recover
from trainyard.kubelet.resources import NODES
from trainyard.kubelet.scheduler import MAX_PODS, NodeSpec
from trainyard.kubelet.server import Server
from trainyard.kubelet.store import Store
from trainyard.kubelet.version import GIT_VERSION
from trainyard.kubelet.volumes import VolumeManager

__all__ = ["KubeletInUse", "ProcessKubelet"]

log = logging.getLogger(__name__)


class KubeletInUse(RuntimeError):
    """Another kubelet uses the folder."""


class ProcessKubelet:
    """A loopback Kubernetes API that runs pods as local processes.

        with ProcessKubelet("/tmp/kubelet") as kubelet:
            print(kubelet.url, kubelet.kubeconfig)

    Args:
        root: its folder, made if needed; a second kubelet on the same one is refused with KubeletInUse.
        port: what it listens on; 0 takes a free one.
        host: the address it listens on; any but loopback needs `advertise`.
        advertise: the name that clients on other machines or in other containers call it by.
        kubeconfig: where to write how to reach it (0600); `root/kubeconfig` if not given.
        namespace: the default namespace of that kubeconfig.
        gpus: devices that pods may request as nvidia.com/gpu.
        max_pods: how many pods run at once; others wait.
        node_labels: more labels of the node, for `nodeSelector`.
        workdir: where containers without a workingDir start; the current directory if not given.
        shutdown_grace: seconds that all pods together have to end in `stop`.
        backoff: the first and the longest wait in seconds before a container is restarted.
        starter: how processes are started.
        preload: what a warm process imports ("MODULE" or "MODULE:FUNCTION"), for containers that run
            `python -m` with a module of `preload_for` to be forked from; nothing by default.
        environ: what `environment.PASSED_THROUGH` is taken from; os.environ if not given.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        advertise: str = "",
        kubeconfig: str | os.PathLike[str] | None = None,
        namespace: str = "default",
        gpus: int = 0,
        max_pods: int = MAX_PODS,
        node_labels: Mapping[str, str] | None = None,
        workdir: str | os.PathLike[str] | None = None,
        shutdown_grace: float = 10.0,
        backoff: tuple[float, float] = (10.0, 300.0),
        starter: ProcessStarter | None = None,
        preload: Sequence[str] = (),
        preload_for: Sequence[str] = ("trainers",),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {port}")
        if host != "127.0.0.1" and not advertise:
            raise ValueError(f"advertise must name this kubelet for its clients when host is {host}")
        if shutdown_grace < 0:
            raise ValueError(f"shutdown_grace must not be negative, got {shutdown_grace}")
        self.root = Path(root).absolute()
        self.kubeconfig = Path(kubeconfig).absolute() if kubeconfig else self.root / "kubeconfig"
        self.namespace = namespace
        self.token = ""
        self._port, self._host, self._advertise = port, host, advertise
        self._node_spec = NodeSpec.of_this_machine(gpus=gpus, labels=node_labels, max_pods=max_pods)
        self._workdir = str(Path(workdir).absolute() if workdir else Path.cwd())
        self._grace = shutdown_grace
        self._backoff = backoff
        self._starter: ProcessStarter = starter or PopenStarter()
        self._preload = tuple(preload)
        self._preload_for = tuple(preload_for)
        self._environ = environ
        self._undo = contextlib.ExitStack()
        self._server: Server | None = None

    @property
    def url(self) -> str:
        """Where it listens; only while it runs."""
        if self._server is None:
            raise RuntimeError("the process kubelet is not running: call start() first")
        return self._server.url

    def start(self) -> ProcessKubelet:
        """Clean up after an earlier life, listen, write the kubeconfig."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.ExitStack() as undo:
            undo.enter_context(_lock(self.root))
            for name in ("objects", "pods", "claims"):
                (self.root / name).mkdir(exist_ok=True, mode=0o700)
            mark = _kept_secret(self.root / "identity")
            self.token = _kept_secret(self.root / "token")
            self.store = Store(self.root / "objects")
            lost = recover(self.root, mark, self.store)
            if lost:
                log.warning("%d pods of an earlier kubelet are marked Failed", lost)
            undo.callback(Guardian(mark).stop)
            undo.callback(end_all, mark)
            machine = self._machine(mark, undo)
            node = Node(machine)
            node.forget_old()
            api = Api(machine, node)
            self._server = Server(api, self.token, self._port, self._host, self._advertise)
            undo.callback(self._server.stop)
            undo.callback(self.store.close)
            undo.callback(node.shut_down, self._grace)
            api.jobs.start()
            undo.callback(api.jobs.stop)
            self._server.start()
            write_kubeconfig(self.kubeconfig, self.url, self.token, self.namespace)
            self._undo = undo.pop_all()
        return self

    def _machine(self, mark: str, undo: contextlib.ExitStack) -> Machine:
        pump, memory = LogPump(), MemoryWatcher()
        undo.callback(pump.stop)
        undo.callback(memory.stop)
        self.store.create(NODES, self._node_spec.manifest(GIT_VERSION))
        return Machine(
            root=self.root,
            mark=mark,
            workdir=self._workdir,
            base_env=base_environment(self._environ),
            node=self._node_spec,
            store=self.store,
            events=EventRecorder(self.store, self._node_spec.name),
            volumes=VolumeManager(self.root, self.store),
            starter=self._warm_starter(mark, undo) if self._preload else self._starter,
            pump=pump,
            memory=memory,
            backoff=self._backoff,
        )

    def _warm_starter(self, mark: str, undo: contextlib.ExitStack) -> ProcessStarter:
        starter = PreforkStarter(
            self._starter,
            packages=self._preload_for,
            preload=self._preload,
            mark=f"{mark}/prefork",
            cwd=self._workdir,
        )
        undo.callback(starter.stop)
        return starter

    def stop(self) -> None:
        """End all pods within the grace period, then the server; does nothing when it does not run."""
        self._undo.close()
        self._server = None

    def __enter__(self) -> ProcessKubelet:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _lock(root: Path) -> IO[str]:
    file = (root / "kubelet.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise KubeletInUse(
            f"another process kubelet (pid {owner}) uses {root}: stop it, or choose another folder with --root"
        ) from e
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _kept_secret(path: Path) -> str:
    """A random word that stays the same over restarts, so that clients need no new kubeconfig."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        text = ""
    if not text:
        text = secrets.token_hex(32)
        temp = path.with_suffix(".tmp")
        with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
            f.write(text)
        temp.replace(path)
    return text

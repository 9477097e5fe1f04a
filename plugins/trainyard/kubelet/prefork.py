"""A warm interpreter that forks: containers that run Python modules of a known package start without its imports.

Importing TensorFlow costs 7 to 17 CPU-seconds in every process; a gang of four with its evaluation and export
pays it six times. `python -m trainyard.kubelet.prefork --fd N --preload tensorflow` imports it once, runs no
operation (a fork after one hangs), and forks a child for each request on the socket N that it inherited:

    -> {"id": 1, "argv": ["-m", "trainers.evaluate", ...], "env": {...}, "cwd": "..."}  + the descriptor for output
    <- {"id": 1, "pid": 4711}
    <- {"id": 1, "exit": 0}                                    (minus the signal's number, if one ended it)

Messages are JSON behind a length of four bytes. The child leads a session of its own, has exactly the asked
environment, and runs the module as `python -m` does. All children die with this process, and it dies when the
other end of the socket is closed.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import gc
import importlib
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["main", "receive", "send"]

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message, with open descriptors that the receiver gets its own copies of."""
    data = json.dumps(message).encode()
    head = _LENGTH.pack(len(data))
    if fds:
        sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    else:
        sock.sendall(head)
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, or None when the other side is gone."""
    size = array.array("i").itemsize
    head, ancillary, _flags, _address = sock.recvmsg(_LENGTH.size, socket.CMSG_SPACE(4 * size))
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % size])
    head += _exactly(sock, _LENGTH.size - len(head)) if head else b""
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = _exactly(sock, length)
    return (json.loads(body), list(fds)) if len(body) == length else None


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = []
    while count > 0 and (part := sock.recv(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class _Server:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._children: dict[int, int] = {}  # pid -> id of its request

    def serve(self) -> tuple[dict[str, Any], int] | None:
        """Answer requests until the other side is gone (None); in a child, return what it is to run."""
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # only to wake up
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        parent = os.getpid()
        while True:
            for fd, _event in poll.poll():
                if fd == wake_read.fileno():
                    wake_read.recv(4096)
                    self._reap()
                    continue
                got = receive(self._sock)
                if got is None:
                    return None
                request, fds = got
                if request.get("end"):
                    return None
                # Told only once the child leads its session, so that signals to its group reach it.
                leads, leading = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    os.close(leads)
                    os.close(leading)
                    signal.set_wakeup_fd(-1)
                    for end in (wake_read, wake_write, self._sock):
                        end.close()
                    return {**request, "parent": parent}, fds[0]
                os.close(leading)
                os.read(leads, 1)  # returns at the close in the child, or at its end
                for fd_ in (leads, *fds):
                    os.close(fd_)
                self._children[pid] = request["id"]
                send(self._sock, {"id": request["id"], "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._children.pop(pid, None)
            if number is not None:
                send(self._sock, {"id": number, "exit": os.waitstatus_to_exitcode(status)})

    def end_children(self) -> None:
        """SIGKILL all children; each leads its own process group."""
        for pid in self._children:
            os.killpg(pid, signal.SIGKILL)


def _become(request: dict[str, Any], out: int) -> NoReturn:
    """In the child: turn into a fresh `python -m module` as far as anybody can tell, run it, and exit."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != request["parent"]:
            sys.exit(1)  # it died before the kernel knew
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)
    # Logs are followed live: lines must not wait in a buffer.
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]  # as `python -m` does
    module, *arguments = request["argv"][1:]
    sys.argv = [module, *arguments]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else every child draws the same numbers
    logging.root.handlers.clear()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _tensorflow_has_run() -> bool:
    context = sys.modules.get("tensorflow.python.eager.context")
    return bool(context is not None and context.context()._initialized)


def main(argv: Sequence[str] | None = None) -> None:
    """Import, say so, fork."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        help="MODULE or MODULE:FUNCTION to import and call first; may be repeated",
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the kubelet's to handle
    sock = socket.socket(fileno=options.fd)
    os.set_inheritable(options.fd, False)
    for name in options.preload:
        try:
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        except ImportError as e:
            send(sock, {"failed": f"could not import {name}: {e}"})
            return
    if _tensorflow_has_run():
        send(sock, {"failed": "TensorFlow has run an operation at import; a fork would hang"})
        return
    gc.collect()
    gc.freeze()  # so that the children's collector does not copy every page
    send(sock, {"ready": True})
    server = _Server(sock)
    job = server.serve()
    if job is None:
        server.end_children()
        return
    # Out of all frames of the server: what the module raises is reported as in any interpreter.
    try:
        _become(*job)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - reported below, as the interpreter would
        # The frames of this file and of runpy say nothing to whoever reads the log.
        kind, error, tb = sys.exc_info()
        while tb is not None and tb.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            tb = tb.tb_next
        traceback.print_exception(kind, error, tb)
        sys.exit(130 if kind is KeyboardInterrupt else 1)


if __name__ == "__main__":
    main()

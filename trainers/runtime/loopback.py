"""Keeps TensorFlow's gRPC server on the loopback interface.

TensorFlow's server (tf.distribute.Server, and the one that ParameterServerStrategy and
MultiWorkerMirroredStrategy start in the process) binds every interface, whatever host its ClusterSpec names, and
has no authentication: whoever reaches the port runs code. On a cluster a NetworkPolicy stands before it; on a
machine of one's own nothing does, and TensorFlow has no setting for it. So the `bind` that its shared libraries
call is replaced in their procedure linkage table by one that turns "any address" into loopback. Nothing outside
these libraries is touched.

Source of the layout: System V ABI, chapter 5 (dynamic linking); `dl_iterate_phdr(3)`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import mmap
import os
import platform
import socket
import struct
import sys
from pathlib import Path

import numpy as np

from trainers.job.errors import ConfigError

__all__ = ["UnprotectedServer", "bind_loopback_only", "check_listeners", "is_loopback", "listeners"]

log = logging.getLogger(__name__)

# Set to 1 where the machine's network is known to be safe and its listeners can't be kept on loopback.
ENV_ALLOW_OPEN = "TRAINYARD_ALLOW_OPEN_SERVER"

_LIBRARIES = ("libtensorflow_framework.so", "libtensorflow_cc.so")
_JUMP_SLOT = {"x86_64": 7, "aarch64": 1026}  # R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT
_PT_DYNAMIC = 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_JMPREL = 2, 5, 6, 10, 23
_TCP_LISTEN = "0A"

_V4_LOOPBACK = ipaddress.ip_address("127.0.0.1").packed
_V6_LOOPBACK = ipaddress.ip_address("::1").packed
_V4_IN_V6 = ipaddress.ip_address("::ffff:127.0.0.1").packed  # a dual-stack socket that answers 127.0.0.1
_V6_ANY = (bytes(16), ipaddress.ip_address("::ffff:0.0.0.0").packed)

_Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_installed: list[object] = []  # the native callback must live as long as the process


class UnprotectedServer(ConfigError):
    """TensorFlow's server would listen beyond loopback; the message says why it can't be kept from it."""

    code = "runtime.unprotected_server"


class _Phdr(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("vaddr", ctypes.c_uint64),
        ("paddr", ctypes.c_uint64),
        ("filesz", ctypes.c_uint64),
        ("memsz", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    ]


class _PhdrInfo(ctypes.Structure):
    _fields_ = [
        ("addr", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("phdr", ctypes.POINTER(_Phdr)),
        ("phnum", ctypes.c_uint16),
    ]


_RELA = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_SYM = np.dtype([("name", "<u4"), ("rest", "V20")])


def is_loopback(address: str) -> bool:
    """Whether "host:port" names this machine's loopback: 127.0.0.0/8, [::1] or localhost."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind_loopback_only(address: str) -> bool:
    """Keep the servers that TensorFlow starts in this process from now on, on loopback.

    `address` is the replica's own "host:port"; when it is no loopback address nothing is done. Call it after
    TensorFlow is imported and before its first server or strategy; again is harmless. Returns whether servers
    are kept on loopback. Raises UnprotectedServer where that is not known how (not Linux on x86-64 or AArch64),
    unless TRAINYARD_ALLOW_OPEN_SERVER=1 takes the risk, which is logged as a warning.
    """
    if not is_loopback(address):
        return False
    if _installed:
        return True
    try:
        _install(v6=address.startswith("["))
    except UnprotectedServer as e:
        if os.environ.get(ENV_ALLOW_OPEN) != "1":
            raise
        log.warning("%s; going on, as %s=1 says", e.message, ENV_ALLOW_OPEN)
        return False
    return True


def _install(*, v6: bool) -> None:
    hint = f"train with strategy local, on Linux or on Kubernetes; {ENV_ALLOW_OPEN}=1 takes the risk"
    unsafe = "TensorFlow's server, which has no authentication, can't be kept on loopback: "
    jump_slot = _JUMP_SLOT.get(platform.machine())
    if not sys.platform.startswith("linux") or jump_slot is None:
        raise UnprotectedServer(f"{unsafe}not known how on {sys.platform} {platform.machine()}", hint=hint)
    slots = [slot for base, dynamic in _loaded_tensorflow() for slot in _bind_slots(base, dynamic, jump_slot)]
    if not slots:
        raise UnprotectedServer(f"{unsafe}found no call of bind in its libraries", hint=hint)
    replacement = _make_bind(v6=v6)
    target = ctypes.cast(replacement, ctypes.c_void_p).value
    assert target is not None
    libc = ctypes.CDLL(None, use_errno=True)
    for slot in slots:
        page = slot & ~(mmap.PAGESIZE - 1)
        # Libraries linked with full RELRO keep their table read-only.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), protection):
            why = os.strerror(ctypes.get_errno())
            raise UnprotectedServer(f"{unsafe}mprotect: {why}", hint=hint)
        ctypes.c_uint64.from_address(slot).value = target
    _installed.append(replacement)


def _loaded_tensorflow() -> list[tuple[int, int]]:
    """(load address, address of the dynamic section) of each of TensorFlow's libraries in this process."""
    found: list[tuple[int, int]] = []
    visitor = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_PhdrInfo), ctypes.c_size_t, ctypes.c_void_p)

    def visit(info: ctypes._Pointer[_PhdrInfo], _size: int, _data: int) -> int:
        name = (info.contents.name or b"").decode()
        if any(library in name for library in _LIBRARIES):
            for i in range(info.contents.phnum):
                if info.contents.phdr[i].type == _PT_DYNAMIC:
                    found.append((info.contents.addr, info.contents.addr + info.contents.phdr[i].vaddr))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(visitor(visit), None)
    return found


def _bind_slots(base: int, dynamic: int, jump_slot: int) -> list[int]:
    """Addresses of the table entries through which one library calls `bind`."""
    entries: dict[int, int] = {}
    pair = ctypes.c_int64 * 2
    while (entry := pair.from_address(dynamic))[0] != 0:
        entries[entry[0]] = entry[1]
        dynamic += ctypes.sizeof(pair)
    count = entries.get(_DT_PLTRELSZ, 0) // _RELA.itemsize
    if not count:
        return []
    # By numpy: the table has 170,000 entries, which plain Python walks in a second.
    relocations = np.frombuffer(_memory(entries[_DT_JMPREL], count * _RELA.itemsize), _RELA)
    calls = relocations[(relocations["info"] & 0xFFFFFFFF) == jump_slot]
    symbols = (calls["info"] >> 32).astype(np.int64)
    size = (int(symbols.max()) + 1) * _SYM.itemsize
    names = np.frombuffer(_memory(entries[_DT_SYMTAB], size), _SYM)["name"][symbols].astype(np.int64)
    strings = np.frombuffer(_memory(entries[_DT_STRTAB], entries[_DT_STRSZ]), np.uint8)
    found = np.arange(len(calls))
    for i, letter in enumerate(b"bind\0"):
        found = found[strings[names[found] + i] == letter]
    return [base + int(offset) for offset in calls["offset"][found]]


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size).from_address(address)


def loopback_of(data: bytes, *, v6: bool = False) -> bytes:
    """A socket address in which "any" has become loopback; all others stay as they are."""
    (family,) = struct.unpack_from("=H", data)
    if family == socket.AF_INET and data[4:8] == bytes(4):
        return data[:4] + _V4_LOOPBACK + data[8:]
    if family == socket.AF_INET6 and data[8:24] in _V6_ANY:
        # gRPC listens on a dual-stack socket; the IPv4-mapped loopback takes IPv4 connections on it.
        return data[:8] + (_V6_LOOPBACK if v6 else _V4_IN_V6) + data[24:]
    return data


def _make_bind(*, v6: bool) -> ctypes._FuncPointer:
    real = ctypes.CDLL(None, use_errno=True).bind
    real.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32]

    def bind(fd: int, address: int | None, length: int) -> int:
        if not address or length < 16:  # shorter than any address of the two families
            return int(real(fd, address, length))
        data = ctypes.create_string_buffer(loopback_of(ctypes.string_at(address, length), v6=v6), length)
        return int(real(fd, ctypes.addressof(data), length))

    return _Bind(bind)


def listeners(pid: int | str = "self") -> list[tuple[str, int]]:
    """The addresses and ports that a process of this machine listens on over TCP; [] where /proc isn't."""
    if not Path(f"/proc/{pid}/net/tcp").exists():
        return []
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] != _TCP_LISTEN or parts[9] not in inodes:
                continue
            host, port = parts[1].split(":")
            words = (int(host[i : i + 8], 16) for i in range(0, len(host), 8))
            found.append(
                (str(ipaddress.ip_address(b"".join(struct.pack("=I", w) for w in words))), int(port, 16))
            )
    return found


def check_listeners(address: str) -> None:
    """Raise UnprotectedServer if this replica belongs on loopback and this process listens beyond it."""
    if not is_loopback(address) or os.environ.get(ENV_ALLOW_OPEN) == "1":
        return
    for host, port in listeners():
        ip = ipaddress.ip_address(host)
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        if not (mapped or ip).is_loopback:
            raise UnprotectedServer(
                f"this process listens on {host} port {port}, beyond loopback",
                hint=f"{ENV_ALLOW_OPEN}=1 takes the risk",
            )

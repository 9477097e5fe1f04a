"""Keep TensorFlow's servers on the loopback interface.

`tf.distribute.Server` (and the server that ParameterServerStrategy and MultiWorkerMirroredStrategy start in
the process) binds every interface, whatever host the ClusterSpec names, and speaks a protocol without
authentication: on a machine without a cluster that would hand the machine to its network. TensorFlow has no
setting for it, so the `bind` that its shared libraries call is replaced in their procedure linkage table by
one that turns the wildcard address into 127.0.0.1. On a cluster, where peers are on other machines, nothing is
replaced: there a NetworkPolicy keeps strangers out.

Source of the layout: System V ABI, chapter 5 (dynamic linking); `dl_iterate_phdr(3)`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import mmap
import platform
import socket
import sys

import numpy as np

__all__ = ["LoopbackUnavailable", "bind_loopback_only", "is_loopback"]

_LIBRARIES = ("libtensorflow_framework.so", "libtensorflow_cc.so")
_JUMP_SLOT = {"x86_64": 7, "aarch64": 1026}  # R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT
_PT_DYNAMIC = 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_JMPREL = 2, 5, 6, 10, 23
_PROT = mmap.PROT_READ | mmap.PROT_WRITE

_Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)


class LoopbackUnavailable(OSError):
    """TensorFlow's listeners could not be kept on loopback on this system; the message says why."""


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
    """Whether "host:port" names this machine's loopback interface."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def _make_bind() -> ctypes._FuncPointer:
    real = ctypes.CDLL(None, use_errno=True).bind
    real.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32]

    def bind(fd: int, address: int, length: int) -> int:
        family = ctypes.c_uint16.from_address(address).value
        if family == socket.AF_INET and length >= 8:
            host = ctypes.c_char * 4
            if ctypes.string_at(address + 4, 4) == bytes(4):
                host.from_address(address + 4).raw = bytes([127, 0, 0, 1])
        elif family == socket.AF_INET6 and length >= 24 and ctypes.string_at(address + 8, 16) == bytes(16):
            # gRPC listens on a dual-stack socket; the IPv4-mapped loopback takes IPv4 connections on it.
            mapped = bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1])
            (ctypes.c_char * 16).from_address(address + 8).raw = mapped
        return int(real(fd, address, length))

    return _Bind(bind)


_installed: list[object] = []  # the native callback must live as long as the process


def bind_loopback_only() -> int:
    """From now on, let TensorFlow's listeners in this process bind 127.0.0.1 instead of every interface.

    Call after `import tensorflow` and before the first server or strategy. Returns how many table entries were
    replaced; calling it again replaces none. Raises LoopbackUnavailable where it can't be done.
    """
    if _installed:
        return 0
    jump_slot = _JUMP_SLOT.get(platform.machine())
    if not sys.platform.startswith("linux") or jump_slot is None:
        raise LoopbackUnavailable(f"not known how on {sys.platform} {platform.machine()}")
    replacement = _make_bind()
    target = ctypes.cast(replacement, ctypes.c_void_p).value
    assert target is not None
    slots = [slot for base, dynamic in _loaded_tensorflow() for slot in _bind_slots(base, dynamic, jump_slot)]
    if not slots:
        raise LoopbackUnavailable("found no call of bind in TensorFlow's libraries; is tensorflow imported?")
    libc = ctypes.CDLL(None, use_errno=True)
    for slot in slots:
        page = slot & ~(mmap.PAGESIZE - 1)
        # Libraries linked with full RELRO keep their table read-only.
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), _PROT):
            raise LoopbackUnavailable(f"mprotect failed with errno {ctypes.get_errno()}")
        ctypes.c_uint64.from_address(slot).value = target
    _installed.append(replacement)
    return len(slots)

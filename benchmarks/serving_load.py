"""Closed-loop clients of benchmarks/serving.py, in a process of their own: gRPC and HTTP/1.1 over plain sockets.

Each client has a connection and one request in flight. Requests are bytes made beforehand, and answers are only
measured and counted, so that a request costs the clients about 50 us and the figures are the server's. A gRPC call is
spoken as HTTP/2 frames by hand for that reason: a channel of grpcio costs as much as the server's side of a call.

Reads a JSON line for each measurement, answers with a JSON line:

    {"protocol": "grpc"|"http", "port": N, "path": "/...", "body": FILE, "clients": N, "warm_up": SECONDS,
     "seconds": SECONDS}
    {"requests": N, "errors": N, "first_error": "...", "seconds": S, "p50": S, "p99": S, "cpu": S, "answer": HEX}

`answer` is the body of the first answer; p50 and p99 are of the requests answered in the measured time. Standard
library only.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time
from pathlib import Path

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
OURS = (1 << 31) - 1  # what servers may send before we say more
PATIENCE_S = 30.0


class Refused(Exception):
    """An answer that is no success."""


class Http:
    """HTTP/1.1 with keep-alive: one request in flight."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self.socket = connect(port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._got = bytearray()
        self.unsent: memoryview | bytes = b""

    def ask(self) -> None:
        self._got.clear()
        self.unsent = memoryview(self._request)

    def take(self, data: bytes) -> bytes | None:
        """The answer's body once it is whole."""
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._got[:end]).lower()
        at = head.find(b"content-length:")
        if at >= 0:
            size = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._got) < end + 4 + size:
                return None
            body = bytes(self._got[end + 4 :])
        elif b"transfer-encoding: chunked" in head:
            if not self._got.endswith(b"0\r\n\r\n"):
                return None
            body = b"".join(chunks(bytes(self._got[end + 4 :])))
        else:
            raise Refused(f"an answer without a length: {head[:200]!r}")
        if not head.startswith(b"http/1.1 200"):
            raise Refused(f"{head[:40].decode()} {body[:200]!r}")
        return body


def chunks(data: bytes) -> list[bytes]:
    found, at = [], 0
    while True:
        line = data.index(b"\r\n", at)
        size = int(data[at:line], 16)
        if not size:
            return found
        found.append(data[line + 2 : line + 2 + size])
        at = line + 4 + size


class Grpc:
    """One unary call after the other on one HTTP/2 connection (RFC 9113), within the windows the server grants."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self.socket = connect(port)
        self._headers = (
            b"\x83\x86"  # :method POST, :scheme http
            + b"\x04" + text(path) + b"\x01" + text(f"127.0.0.1:{port}")  # :path, :authority
            + b"\x0f\x10" + text("application/grpc") + b"\x00" + text("te") + text("trailers")
        )  # fmt: skip
        self._message = struct.pack(">BI", 0, len(body)) + body
        self._stream = -1
        self._window = self._stream_window = self._initial = 65_535
        self._frame = 16_384
        self._sent = 0
        self._got = bytearray()
        self._answer = bytearray()
        self._taken = 0
        self.unsent: memoryview | bytes = (
            PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, OURS)) + self._grant(OURS - 65_535)
        )

    def _grant(self, size: int) -> bytes:
        return frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", size))

    def ask(self) -> None:
        self._stream += 2
        self._sent, self._stream_window = 0, self._initial
        self._answer.clear()
        self.unsent = bytes(self.unsent) + frame(HEADERS, END_HEADERS, self._stream, self._headers)
        self._push()

    def _push(self) -> None:
        """Queue as much of the message as the windows allow."""
        parts = [bytes(self.unsent)]
        while self._sent < len(self._message):
            size = min(self._frame, self._window, self._stream_window, len(self._message) - self._sent)
            if size <= 0:
                break
            part = self._message[self._sent : self._sent + size]
            self._sent += size
            self._window -= size
            self._stream_window -= size
            parts.append(frame(DATA, END_STREAM * (self._sent == len(self._message)), self._stream, part))
        self.unsent = b"".join(parts)

    def take(self, data: bytes) -> bytes | None:
        """The answer's message once its stream has ended."""
        self._got += data
        at, done = 0, False
        got = self._got
        while len(got) >= at + 9:
            size = int.from_bytes(got[at : at + 3], "big")
            if len(got) < at + 9 + size:
                break
            kind, flags = got[at + 3], got[at + 4]
            stream = int.from_bytes(got[at + 5 : at + 9], "big")
            payload = got[at + 9 : at + 9 + size]
            at += 9 + size
            if kind == DATA:
                self._answer += payload
                self._taken += size
            if kind in (DATA, HEADERS):
                done = done or (stream == self._stream and bool(flags & END_STREAM))
            else:
                self._control(kind, flags, stream, bytes(payload))
        del got[:at]
        if self._taken > OURS // 2:
            self.unsent = bytes(self.unsent) + self._grant(self._taken)
            self._taken = 0
        if not done:
            return None
        if len(self._answer) < 5:
            raise Refused("the call ended without a message")
        return bytes(self._answer[5:])

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                key, value = struct.unpack_from(">HI", payload, at)
                if key == 4:
                    self._stream_window += value - self._initial
                    self._initial = value
                elif key == 5:
                    self._frame = value
            self.unsent = bytes(self.unsent) + frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self.unsent = bytes(self.unsent) + frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
        elif kind in (RST_STREAM, GOAWAY):
            raise Refused(
                f"the server ended the {'stream' if kind == RST_STREAM else 'connection'}: {payload!r}"
            )
        if self._stream > 0:
            self._push()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def text(value: str) -> bytes:
    """A literal string of HPACK, not Huffman coded, of fewer than 127 bytes."""
    encoded = value.encode()
    if len(encoded) > 126:
        raise ValueError(f"a header value must have fewer than 127 bytes, got {len(encoded)}")
    return bytes((len(encoded),)) + encoded


def connect(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setblocking(False)
    return made


class Load:
    """Clients in one thread: each asks again as soon as it has its answer."""

    def __init__(self, protocol: str, port: int, path: str, body: bytes, clients: int) -> None:
        self._make = lambda: (Grpc if protocol == "grpc" else Http)(port, path, body)
        self._selector = selectors.DefaultSelector()
        self._begun: dict[Grpc | Http, float] = {}
        self.errors = 0
        self.first_error = ""
        self.answer = b""
        for _ in range(clients):
            self._open()

    def _open(self) -> None:
        client = self._make()
        self._selector.register(client.socket, selectors.EVENT_READ, client)
        self._ask(client)

    def _ask(self, client: Grpc | Http) -> None:
        client.ask()
        self._begun[client] = time.monotonic()
        self._send(client)

    def _send(self, client: Grpc | Http) -> None:
        try:
            while client.unsent:
                client.unsent = client.unsent[client.socket.send(client.unsent) :]
        except BlockingIOError:
            self._selector.modify(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)

    def run(self, seconds: float) -> list[float]:
        """Latencies of the requests answered in the time, at least one; raises OSError where a server is gone."""
        found: list[float] = []
        until = time.monotonic() + seconds
        quiet = time.monotonic()
        while (now := time.monotonic()) < until or not (found or self.errors):
            events = self._selector.select(0.1)
            if not events and now - quiet > PATIENCE_S:
                raise Refused(f"no answer in {PATIENCE_S:.0f} s")
            for key, mask in events:
                client = key.data
                quiet = now
                if mask & selectors.EVENT_WRITE:
                    self._selector.modify(client.socket, selectors.EVENT_READ, client)
                    self._send(client)
                if mask & selectors.EVENT_READ:
                    self._receive(client, found)
        return found

    def _receive(self, client: Grpc | Http, found: list[float]) -> None:
        try:
            data = client.socket.recv(1 << 18)
            if not data:
                raise Refused("the server closed the connection")
            answer = client.take(data)
        except (BlockingIOError, InterruptedError):
            return
        except (Refused, OSError) as e:
            self.errors += 1
            self.first_error = self.first_error or str(e)
            self._selector.unregister(client.socket)
            client.socket.close()
            del self._begun[client]
            self._open()
            return
        if answer is not None:
            found.append(time.monotonic() - self._begun[client])
            self.answer = self.answer or answer
            self._ask(client)
        elif client.unsent:
            self._send(client)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()


def measure(asked: dict) -> dict:
    load = Load(
        asked["protocol"], asked["port"], asked["path"], Path(asked["body"]).read_bytes(), asked["clients"]
    )
    try:
        load.run(asked["warm_up"])
        load.errors = 0
        start, used = time.monotonic(), time.process_time()
        latencies = sorted(load.run(asked["seconds"]))
        took, used = time.monotonic() - start, time.process_time() - used
    finally:
        load.close()
    return {
        "requests": len(latencies), "errors": load.errors, "first_error": load.first_error, "seconds": took,
        "cpu": used, "answer": load.answer.hex(),
        "p50": percentile(latencies, 0.5), "p99": percentile(latencies, 0.99),
    }  # fmt: skip


def percentile(ordered: list[float], share: float) -> float:
    """The nearest-rank percentile of values in order, NaN of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def main() -> None:
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except (OSError, Refused) as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

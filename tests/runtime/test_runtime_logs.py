"""What passes from a trainer to the log of its replica."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from trainers.runtime.logs import LogPump


def test_the_log_passes_whole_lines_and_drops_known_noise(tmp_path: Path) -> None:
    read, write = os.pipe()
    out = (tmp_path / "log").open("wb")
    pump = LogPump(read, out.fileno(), keep=2)
    os.write(
        write, b"first\nI0000 00:00:1 1 cudart_stub.cc:31] Could not find cuda drivers on your machine\nsec"
    )
    pump.pump()
    assert (tmp_path / "log").read_bytes() == b"first\n"
    os.write(write, "ond é\nthird".encode())
    pump.pump()
    os.close(write)
    assert not pump.at_end
    pump.pump()
    assert pump.at_end
    pump.close()
    out.close()
    assert (tmp_path / "log").read_text(encoding="utf-8") == "first\nsecond é\nthird\n"
    assert pump.tail == ("second é", "third")


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    read, write = os.pipe()
    out = (tmp_path / "log").open("wb")
    pump = LogPump(read, out.fileno())
    writer = threading.Thread(target=lambda: (os.write(write, b"x" * 200_000), os.close(write)))
    writer.start()
    while not pump.at_end:
        pump.pump()
    writer.join()
    pump.close()
    out.close()
    assert (tmp_path / "log").read_bytes().count(b"x") == 200_000
    assert max(map(len, pump.tail)) == 500

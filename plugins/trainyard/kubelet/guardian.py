"""The kubelet's last will: `guardian.py MARK PACKAGES` waits until the kubelet is gone, then ends its containers.

Run by `processes.Guardian` as a file, without site packages; it loads what it needs only at the end, so that it
stays small while it waits.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def main(mark: str, packages: str) -> None:
    """Wait for the end of standard input, then SIGKILL every process that carries `mark`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it must outlive the kubelet
    while sys.stdin.buffer.read(4096):
        pass
    sys.path += [packages, str(Path(__file__).resolve().parent)]
    import processes

    processes.end_all(mark)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

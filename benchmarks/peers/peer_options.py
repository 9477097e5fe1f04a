"""The command line that the contenders of benchmarks/training.py have in common."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["peer_parser"]

# Where training_models is.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def peer_parser(description: str | None) -> argparse.ArgumentParser:
    """What is trained, and for how many windows of how many seconds."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("--manifest", "--model"):
        parser.add_argument(name, required=True)
    for name in ("--batch", "--windows"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    return parser

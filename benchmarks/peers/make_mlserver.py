"""Make the environment of MLServer, apart from ours, and print its Python: benchmarks/peers/make_mlserver.py.

It goes into a cache folder ($XDG_CACHE_HOME/trainyard, else ~/.cache/trainyard), about 3 GB, and is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers import environments


def make() -> tuple[Path | None, str]:
    """The environment's Python, or None and what stood in the way."""
    requirements = Path(__file__).with_name("requirements-mlserver.txt")
    return environments.make("mlserver", requirements, ((3, 11), (3, 10), (3, 12)))


if __name__ == "__main__":
    made, problem = make()
    print(made or problem)
    sys.exit(0 if made else 1)

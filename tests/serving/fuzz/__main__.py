"""A long campaign against the embedded server: python -m tests.serving.fuzz --examples 20000 --seed 7

Sends malformed requests of every kind to a real server process; after each, the process must live and answer
good requests on both ports, within bounded memory. Prints what came back, and, where something is wrong, the
smallest request that shows it. Exit code 1 then.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.serving.conformance import models
from tests.serving.fuzz.attacks import Attack, attacks
from tests.serving.fuzz.target import Target


def campaign(target: Target, kind: str, examples: int, number: int) -> collections.Counter[str]:
    """Statuses of all requests of one kind; raises what went wrong, with the smallest request in its notes."""
    seen: collections.Counter[str] = collections.Counter()

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(attack=attacks[kind])
    def strike(attack: Attack) -> None:
        seen[target.attack(attack)] += 1

    strike()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.serving.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=2000, help="requests of each kind")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="the same one sends the same requests"
    )
    parser.add_argument("--only", choices=sorted(attacks), help="one kind of requests")
    parser.add_argument(
        "--server_flag", action="append", default=[], help="for the server: =--enable_batching"
    )
    arguments = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        models.write(folder / "models")
        for kind in [arguments.only] if arguments.only else attacks:
            with Target(folder / "models", folder, *arguments.server_flag) as target:
                start, before = time.monotonic(), target.memory()
                try:
                    seen = campaign(target, kind, arguments.examples, arguments.seed)
                except Exception as e:  # noqa: BLE001  # told, and the other kinds go on
                    failed.append(kind)
                    print(f"{kind}: {e}", *getattr(e, "__notes__", ()), sep="\n  ", flush=True)
                    continue
                grown = (target.memory() - before) >> 20
                counts = ", ".join(f"{status} {count}" for status, count in seen.most_common())
                print(f"{kind}: {counts}; {time.monotonic() - start:.0f} s, {grown:+d} MiB", flush=True)
    print(f"seed {arguments.seed}: {f'FAILED: {failed}' if failed else 'the server stood'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

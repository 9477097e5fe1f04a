"""Runs jobs back to back, kills and stops their processes at random, and prints how they took it.

    python -m tests.faults.chaos --minutes 20 --seed 1
    python -m tests.faults.chaos --measure 5 --markdown docs/reliability.md

docs/reliability.md says what the table means. The exit code is 1 when a job was lost or a process was left.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults.chaos.campaign import STRATEGIES, Campaign, runnable
from tests.faults.chaos.table import replace_between_marks, report


def main(argv: list[str] | None = None) -> int:
    """Run a campaign; the exit code."""
    parser = argparse.ArgumentParser(prog="tests.faults.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no job after so long (default: 5)")
    parser.add_argument(
        "--seed", type=int, default=1, help="decides who is killed when, and how (default: 1)"
    )
    parser.add_argument(
        "--strategy", action="append", choices=sorted(STRATEGIES), help="default: all that run"
    )
    parser.add_argument(
        "--measure", type=int, metavar="N", help="instead: N kills of each of the kinds that have a target"
    )
    parser.add_argument("--steps", type=int, help="steps of a job (default: enough for some kills)")
    parser.add_argument("--folder", type=Path, help="keep jobs and logs here (default: a temporary folder)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table between FILE's marks")
    options = parser.parse_args(argv)
    if options.markdown and not options.markdown.is_file():
        parser.error(f"no file {options.markdown}")  # now, and not after all the minutes
    # Asked to leave, it ends its gangs first.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    strategies = [name for name in options.strategy or STRATEGIES if runnable(name)]
    with tempfile.TemporaryDirectory(prefix="trainyard-chaos-") as temp:
        campaign = Campaign(options.folder or Path(temp), seed=options.seed, steps=options.steps)
        if options.measure:
            campaign.measure(strategies, options.measure)
        else:
            campaign.run(strategies, minutes=options.minutes)
    text = report(campaign, command=["python", "-m", "tests.faults.chaos", *(argv or sys.argv[1:])])
    print(text, flush=True)
    if options.markdown:
        replace_between_marks(options.markdown, "measure" if options.measure else "chaos", text)
    return 1 if campaign.lost or campaign.left_over else 0


if __name__ == "__main__":
    sys.exit(main())

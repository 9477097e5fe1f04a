"""The chaos tool: it strikes, it tells, and its exit code says whether all was well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.chaos.campaign import Campaign, JobReport
from tests.faults.chaos.table import replace_between_marks, report

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_short_campaign(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- chaos: begin -->\nold\n<!-- chaos: end -->\nafter\n")
    command = [
        sys.executable,
        "-m",
        "tests.faults.chaos",
        "--minutes",
        "0.05",
        "--seed",
        "3",
        "--steps",
        "300",
    ]
    command += ["--strategy", "parameter_server", "--folder", str(tmp_path / "jobs"), "--markdown", str(page)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert text.startswith("before\n<!-- chaos: begin -->")
    assert text.endswith("<!-- chaos: end -->\nafter\n")
    assert "\nold\n" not in text
    assert "| 1 | 1 | 0 |" in text
    assert list((tmp_path / "jobs").glob("000-*/outcome.json"))


def test_a_lost_job_is_told(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, seed=1)
    campaign.jobs = [
        JobReport("000-a", True, [3, 9], 1.0, 0),
        JobReport("001-b", False, [], 1.0, 2, "FAILED INFRA\n  what: gone"),
    ]
    assert (campaign.lost, campaign.left_over) == (1, 2)
    text = report(campaign, command=["x"])
    assert "| 2 | 1 | 1 | 0 | 0 | 2 | 6 | 9 | 2 |" in text
    assert "Lost: 001-b\n\n    FAILED INFRA\n      what: gone" in text
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="must have the marks"):
        replace_between_marks(page, "chaos", text)

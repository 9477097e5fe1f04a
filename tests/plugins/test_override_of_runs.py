"""Who overrides the gate from the command line, and what MLflow is told of people's decisions."""

from __future__ import annotations

import getpass
import json
from pathlib import Path

from trainyard.cli import parser
from trainyard.commands.run import _input
from trainyard.tracking import note_verdict


def test_a_run_from_the_command_line_carries_the_name_of_who_overrides() -> None:
    command = ["run", "digits_retrain", "--conf", '{"steps": 7, "override_author": "somebody"}']
    assert _input(parser().parse_args(command)) == {"steps": 7, "override_author": "somebody"}
    assert _input(parser().parse_args([*command, "--override-reason", "a demo"])) == {
        "steps": 7,
        "override_reason": "a demo",
        "override_author": getpass.getuser(),
    }


def test_mlflow_is_told_who_overrode_and_who_approved(pipelines: Path) -> None:
    override = {"outcome_before": "fail", "reason": "a demo", "author": "admin", "on_behalf_of": "ada"}
    approval = {"decision": "approve", "by": "grace", "comment": "fine", "timed_out": False}
    note_verdict(pipelines, {"outcome": "pass", "reasons": ["r"], "override": override, "approval": approval})
    lines = [json.loads(line) for line in (pipelines / "tracking" / "gate.jsonl").read_text().splitlines()]
    tags = {line["tag"]: line["value"] for line in lines if "tag" in line}
    assert tags["trainyard.gate.override"] == "admin: a demo"
    assert tags["trainyard.gate.override_on_behalf_of"] == "ada"
    assert tags["trainyard.gate.approval"] == "approve: grace: fine"

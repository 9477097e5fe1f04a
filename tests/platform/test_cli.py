"""The command line: parsing, exit codes, what each command prints; on a platform that isn't there or is made up."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from trainyard import cli
from trainyard.commands import models, platform
from trainyard.commands import run as run_command
from trainyard.platform.airflow_api import AirflowUnreachable
from trainyard.platform.embedded import Platform, PlatformFailed
from trainyard.platform.pipeline_run import FormRefused
from trainyard.platform.preflight import NoRoom
from trainyard.platform.processes import identity
from trainyard.platform.settings import Settings
from trainyard.platform.state import hold, write_state

from trainers.job.failures import Failure, FailureClass

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("TRAINYARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return tmp_path / "home"


def state_of(home: Path, state: str = "running", **more: Any) -> None:
    """A platform.json of a supervisor that is this very process."""
    home.mkdir(parents=True, exist_ok=True)
    service = {
        "name": "mlflow",
        "title": "MLflow",
        "state": "ready",
        "pid": os.getpid(),
        "identity": identity(os.getpid()),
        "url": "http://127.0.0.1:5000",
        "restarts": 1,
        "last_exit": "killed by SIGKILL",
    }
    urls = {"airflow": "http://a", "mlflow": "http://m", "model-rest": "http://r", "model-grpc": "g:1"}
    value = {
        "state": state,
        "supervisor": {"pid": os.getpid(), "identity": identity(os.getpid())},
        "services": [service],
        "urls": urls,
        "ports": {},
        "started": 0.0,
        "ready_seconds": 1.0,
        "attached": False,
        "failure": None,
    }
    write_state(home / "platform.json", {**value, **more})


def test_every_command_leads_to_a_function() -> None:
    def functions(parser: argparse.ArgumentParser) -> set[str]:
        found = {parser._defaults["function"]} if "function" in parser._defaults else set()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    found |= functions(sub)
        return found

    found = functions(cli.parser())
    assert len(found) >= 10
    for text in found:
        module, name = text.split(":")
        assert callable(getattr(importlib.import_module(f"trainyard.commands.{module}"), name))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice"),
        (["run", "--conf", "{no}"], "must be JSON like '{\"steps\": 100}'"),
        (["run", "--conf", "[1]"], "must be a JSON object, got list"),
    ],
)
def test_wrong_usage(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "texts"),
    [
        (FormRefused("workers", "too few"), cli.EXIT_REFUSED, ["REFUSED", "workers", "too few"]),
        (NoRoom("only 0.1 GB", hint="buy some"), cli.EXIT_REFUSED, ["only 0.1 GB", "what to do: buy some"]),
        (
            PlatformFailed("MLflow died", failure={"log": "/x.log", "log_tail": ["oh"]}, hint="read"),
            cli.EXIT_FAILED,
            ["MLflow died", "the end of /x.log", "    oh", "what to do: read"],
        ),
        (ValueError("X must be a number, got 'y'"), cli.EXIT_REFUSED, ["X must be a number"]),
        (KeyboardInterrupt(), cli.EXIT_INTERRUPTED, ["interrupted"]),
    ],
)
def test_errors_are_sentences(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    texts: list[str],
) -> None:
    def broken(*_: Any) -> int:
        raise error

    monkeypatch.setattr(platform, "status", broken)
    assert cli.main(["status"]) == code
    shown = capsys.readouterr().err
    assert all(text in shown for text in texts)
    assert "Traceback" not in shown


def test_the_command_is_installed_and_light() -> None:
    code = (
        "import sys; from trainyard import cli; cli.parser();"
        "print([m for m in ('airflow', 'tensorflow', 'mlflow', 'numpy', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert Path(sys.executable).with_name("trainyard").exists()


def test_status_of_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 1
    assert "is down; make up starts it" in capsys.readouterr().out
    assert cli.main(["down"]) == 0
    assert "no platform is running" in capsys.readouterr().out
    assert cli.main(["env"]) == 1


def test_status_of_a_platform(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state_of(home)
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "MLflow",
        "ready",
        "MB",
        "1 (killed by SIGKILL)",
        "http://127.0.0.1:5000",
        "password",
        "http://r",
    ):
        assert text in shown
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["services"][0]["memory"] > 0
    assert cli.main(["env"]) == 0
    assert "export TRAINYARD_MODEL_SERVER=g:1" in capsys.readouterr().out
    assert cli.main(["up"]) == 0
    assert "up already" in capsys.readouterr().out


def test_status_names_the_cluster_that_pods_run_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = {"server": "https://10.0.0.1:6443", "kubeconfig": "/etc/kubeconfig", "namespace": "team-a"}
    state_of(home, cluster=cluster)
    for command in (["status"], ["up"]):
        assert cli.main(command) == 0
        shown = capsys.readouterr().out
        assert "pods     on https://10.0.0.1:6443, namespace team-a (kubeconfig /etc/kubeconfig)" in shown


def test_a_cluster_that_is_not_there_is_told_before_anything_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINYARD_KUBECONFIG", str(home / "none"))
    assert cli.main(["up"]) == cli.EXIT_REFUSED
    shown = capsys.readouterr()
    assert f"trainyard: there is no kubeconfig {home / 'none'}" in shown.err
    assert "what to do: set TRAINYARD_KUBECONFIG" in shown.err
    assert "warning: TRAINYARD_STORAGE_CLAIM is not set" in shown.out
    assert "warning: MLflow listens on loopback" in shown.out


def test_status_of_a_failing_platform(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = {"title": "MLflow", "what": "died 6 times", "hint": "read its log"}
    state_of(home, "stopping", failure=failure)
    assert cli.main(["status"]) == 1
    assert "MLflow died 6 times; read its log" in capsys.readouterr().out


def test_two_runs_of_one_pipeline(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(home / "locks" / "run-d_a.lock"):
        assert cli.main(["run", "d/a"]) == cli.EXIT_REFUSED
    assert "another `trainyard run d/a` is going on" in capsys.readouterr().err


def fake_platform(tmp_path: Path, airflow: Any) -> Any:
    settings = Settings.from_environment({}, home=tmp_path / "home")
    settings.make_folders()
    return SimpleNamespace(
        settings=settings,
        storage=settings.storage,
        airflow=airflow,
        urls={"airflow": "http://a", "mlflow": "http://m", "model-rest": "http://r", "model-grpc": "g:1"},
        credentials=("admin", "pw"),
        state={"state": "running", "services": []},
    )


def _fakes() -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("fake_airflow", Path(__file__).with_name("fake_airflow.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAKES = _fakes()


def run_pipeline(tmp_path: Path, airflow: Any, **changes: Any) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    made = fake_platform(tmp_path, airflow)
    made.__dict__.update(changes)
    arguments = argparse.Namespace(dag="d", conf={"steps": 5}, override_reason="")
    return run_command._run_pipeline(made, arguments, console), out.getvalue()


def test_a_run_that_succeeds(tmp_path: Path) -> None:
    airflow = FAKES.FakeAirflow([("success", [FAKES.task("hello")])])
    code, shown = run_pipeline(tmp_path, airflow)
    assert code == 0
    assert "d succeeded in 1 min 40 s" in shown
    assert [call for call in airflow.calls if call[0] == "paused"] == [("paused", False), ("paused", True)]


def test_a_run_that_fails_ends_with_the_card(tmp_path: Path) -> None:
    failure = Failure(FailureClass.DATA, "shard 3 is corrupt", code="records.corrupt")
    airflow = FAKES.FakeAirflow(
        [("failed", [FAKES.task("prepare", "failed")])], xcoms={("prepare", "failure"): failure.to_dict()}
    )
    code, shown = run_pipeline(tmp_path, airflow)
    assert code == cli.EXIT_FAILED
    assert "FAILED DATA (records.corrupt): prepare" in shown
    assert "shard 3 is corrupt" in shown
    code, shown = run_pipeline(tmp_path, FAKES.FakeAirflow([("failed", [])]))
    assert code == cli.EXIT_FAILED
    assert "somebody marked the run" in shown


def test_ctrl_c_has_airflow_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    airflow = FAKES.FakeAirflow([("running", [])])

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(run_command, "follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(tmp_path, airflow)
    assert [call[0] for call in airflow.calls] == ["trigger", "paused", "failed", "paused"]


def test_a_component_that_dies_during_a_run_is_told(tmp_path: Path) -> None:
    airflow = FAKES.FakeAirflow([("running", []), ("success", [])])
    made = fake_platform(tmp_path, airflow)
    service = {"name": "mlflow", "title": "MLflow", "restarts": 0, "last_exit": ""}
    made.state["services"] = [service]
    tasks, died = airflow.tasks, {"restarts": 1, "last_exit": "killed by SIGKILL"}
    airflow.tasks = lambda *ids: made.state["services"].__setitem__(0, {**service, **died}) or tasks(*ids)
    code, shown = run_pipeline(tmp_path, airflow, state=made.state)
    assert code == 0
    assert shown.count("MLflow died (killed by SIGKILL) and is started again") == 1


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ({"title": "MLflow", "what": "died 6 times", "hint": "x"}, "MLflow died 6 times"),
        (None, "the platform went down during the run"),
    ],
)
def test_a_platform_that_goes_down_ends_the_run(tmp_path: Path, failure: Any, text: str) -> None:
    airflow = FAKES.FakeAirflow([("running", [])])
    with pytest.raises(PlatformFailed, match=text):
        run_pipeline(tmp_path, airflow, state={"state": "stopping", "services": [], "failure": failure})


def test_runs_of_an_earlier_platform_are_ended(tmp_path: Path) -> None:
    airflow = FAKES.FakeAirflow([("success", [])], dag={"max_active_runs": 1})
    airflow.others = [FAKES.run_of("running")]
    code, shown = run_pipeline(tmp_path, airflow)
    assert code == 0
    assert "ended manual__1, which was cut short" in shown
    assert airflow.calls[0] == ("failed", "manual__1")


def test_a_run_that_will_wait_is_told(tmp_path: Path) -> None:
    airflow = FAKES.FakeAirflow([("success", [])], dag={"max_active_runs": 1})
    airflow.others = [FAKES.run_of("running")]
    out = io.StringIO()
    arguments = argparse.Namespace(dag="d", conf={}, override_reason="")
    console = Console(file=out, width=200)
    assert run_command._run_pipeline(fake_platform(tmp_path, airflow), arguments, console, was_up=True) == 0
    assert "manual__1 is still going on: this run begins after it" in out.getvalue()
    assert airflow.calls[0][0] == "trigger"


def test_an_airflow_that_is_away_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    airflow = FAKES.FakeAirflow([("running", []), ("success", [])])
    run_of, away = airflow.run, [True, False, True, False]
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)

    def run(*ids: str) -> Any:
        if away and away.pop(0):
            raise AirflowUnreachable("it is starting again")
        return run_of(*ids)

    airflow.run = run
    monkeypatch.setattr(run_command, "time", clock)
    assert run_pipeline(tmp_path, airflow)[0] == 0

    airflow = FAKES.FakeAirflow([("running", [])])
    airflow.run = lambda *_: (_ for _ in ()).throw(AirflowUnreachable("it is gone"))
    ticks = iter(range(0, 1000, 50))
    clock.monotonic = lambda: next(ticks)
    with pytest.raises(AirflowUnreachable):
        run_pipeline(tmp_path, airflow)


def test_little_room_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(platform, "check_room", lambda folders: ["only 2.0 GB of memory free"])
    platform.tell_room(Platform(home), Console(file=out))
    assert out.getvalue().startswith("warning: only 2.0 GB")


def test_models(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.release.store import ReleaseStore

    assert cli.main(["models", "list"]) == 0
    assert "no models yet" in capsys.readouterr().out
    assert cli.main(["models", "log", "digits"]) == cli.EXIT_REFUSED
    assert "there is no model 'digits'" in capsys.readouterr().err
    store = ReleaseStore(home / "storage", "digits")
    for version in (1, 2):
        store.reserve(f"sha256:{version}" * 8)
        folder = store.path(version)
        folder.mkdir(parents=True)
        monkeypatch.setattr(ReleaseStore, "_require_published", lambda *_: None)
        store.promote(version, by="me", why=f"reason {version}")
    assert cli.main(["models", "list"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:2] == ["digits", "2"]
    assert cli.main(["models", "log", "digits"]) == 0
    shown = capsys.readouterr().out
    assert "version 2 instead of 1" in shown
    assert "by me: reason 2" in shown
    assert cli.main(["models", "rollback", "digits"]) == cli.EXIT_FAILED
    assert "the model server is not up" in capsys.readouterr().err


def test_rolling_back(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import serving.release.steps as steps

    state_of(home)
    (home / "storage" / "releases" / "digits").mkdir(parents=True)
    asked: dict[str, Any] = {}

    def rollback(storage: Path, name: str, servers: list[str], config: Path, **more: Any) -> dict[str, Any]:
        asked.update(more, servers=servers, config=config)
        return {"name": name, "version": 1, "previous": 2, "warnings": ["no registry"]}

    monkeypatch.setattr(steps, "rollback", rollback)
    assert cli.main(["models", "rollback", "digits", "--to", "1", "--why", "worse in the field"]) == 0
    shown = capsys.readouterr().out
    assert "digits version 1 is served instead of version 2" in shown
    assert "warning: no registry" in shown
    assert list(asked["servers"]) == ["g:1"]
    assert asked["why"] == "worse in the field"
    assert asked["config"] == home / "storage" / "serving" / "models.config"
    assert models.NoSuchModel.code == "model.unknown"

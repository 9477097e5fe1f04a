"""The termination message: what fits, what is read back, and a step as a real process."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.job import labels, termination
from trainers.job.errors import ConfigError, DataError, InvalidSpec
from trainers.job.failures import Failure, FailureClass
from trainers.job.termination import LIMIT, failure_of, parse, run_step, write_failure, write_result


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "termination-log"
    monkeypatch.setenv(labels.ENV_TERMINATION_LOG, str(path))
    return path


def test_a_result_comes_back(log):
    write_result({"accuracy": 0.97, "path": "/jobs/1"})
    message = parse(log.read_text())
    assert message.ok
    assert message.result == {"accuracy": 0.97, "path": "/jobs/1"}
    assert message.failure is None


def test_a_failure_comes_back(log):
    failure = Failure(FailureClass.DATA, "no rows", code="records.empty", role="worker", index=1, last_step=0)
    write_failure(failure)
    message = parse(log.read_text())
    assert not message.ok
    assert message.failure == failure


def test_a_result_that_does_not_fit_is_refused(log):
    write_result({"x": "a" * (LIMIT - len('{"ok": true, "result": {"x": ""}}'))})
    assert len(log.read_bytes()) == LIMIT
    with pytest.raises(ConfigError, match="a termination message holds 4096"):
        write_result({"x": "a" * LIMIT})


@given(
    st.builds(
        Failure,
        failure_class=st.sampled_from(FailureClass),
        reason=st.text(max_size=9000),
        code=st.text(max_size=3000),
        hint=st.text(max_size=6000),
        detail=st.text(max_size=9000) | st.just("\u00e4" * 9000),
        log_tail=st.lists(st.text(max_size=2000), max_size=30).map(tuple),
    )
)
def test_every_failure_fits_and_keeps_its_class(failure):
    text = termination._fit(failure)
    assert len(text.encode()) <= LIMIT
    read = parse(text).failure
    assert read.failure_class is failure.failure_class
    if len(json.dumps(failure.to_dict())) < LIMIT - 40:
        assert read == failure


def test_cutting_keeps_the_end_of_what_is_long_and_all_that_is_short():
    detail = "\n".join(f"frame {n}" for n in range(1000)) + "\nValueError: boom"
    failure = Failure(
        FailureClass.USER, "boom", hint="fix", detail=detail, log_tail=tuple(f"line {n}" for n in range(900))
    )
    read = parse(termination._fit(failure)).failure
    assert (read.reason, read.hint) == ("boom", "fix")
    assert read.detail.endswith("ValueError: boom")
    assert read.detail.startswith("...")
    for field in ("reason", "hint", "code"):
        long = Failure(FailureClass.DATA, **{"reason": "r", "detail": "d" * 70, field: "word " * 9000})
        read = parse(termination._fit(long)).failure
        assert getattr(read, field).startswith("word word")
        assert read.detail == long.detail
    only_log = Failure(FailureClass.USER, "boom", log_tail=tuple(f"line {n}" for n in range(900)))
    assert parse(termination._fit(only_log)).failure.log_tail[-1] == "line 899"


NOT_OURS = [None, "", "Traceback (most recent call last)", "[]", "7", "null", '{"ok": tru', '{"ok": true}']
NOT_OURS += ['{"ok": true, "result": 7}', '{"ok": false}', '{"ok": false, "failure": {"class": "LUCK"}}']
NOT_OURS += ['{"ok": false, "failure": {"class": "USER"}}', '{"result": {}}']


@pytest.mark.parametrize("message", NOT_OURS)
def test_a_message_that_is_not_ours_is_none(message):
    assert parse(message) is None


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as e:  # noqa: BLE001 - the error under test is any
        return e


EXCEPTIONS = [
    (raised(DataError("no rows", hint="look")), "DATA", "data", 82),
    (raised(InvalidSpec("workers", "be 1", 0)), "CONFIG", "spec.invalid", 83),
    (raised(MemoryError()), "OOM", "python.MemoryError", 84),
    (raised(OSError("disk")), "INFRA", "python.OSError", 87),
    (raised(ConnectionResetError("net")), "INFRA", "python.ConnectionResetError", 87),
    (raised(KeyboardInterrupt()), "PREEMPTED", "python.KeyboardInterrupt", 88),
    (raised(ValueError("boom")), "USER", "python.ValueError", 81),
]


@pytest.mark.parametrize(
    ("error", "failure_class", "code", "exit_code"), EXCEPTIONS, ids=lambda v: str(v)[:30]
)
def test_failure_of(error, failure_class, code, exit_code):
    failure = failure_of(error, role="worker", index=0)
    assert failure.failure_class is FailureClass(failure_class)
    assert (failure.code, failure.exit_code, failure.replica) == (code, exit_code, "worker-0")


def test_the_users_traceback_is_kept():
    assert "in raised" in failure_of(raised(ValueError("boom"))).detail
    ours = failure_of(raised(DataError("bad file", hint="look"), cause=raised(ValueError("byte 7"))))
    assert "ValueError: byte 7" in ours.detail
    assert (ours.reason, ours.hint) == ("bad file", "look")
    assert failure_of(raised(DataError("bad file"))).detail == ""


def test_the_log_that_cannot_be_written_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(labels.ENV_TERMINATION_LOG, str(tmp_path))
    write_result({})
    assert "could not write the termination message" in capsys.readouterr().err


def test_outside_a_container_nothing_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv(labels.ENV_TERMINATION_LOG, raising=False)
    monkeypatch.setattr(termination, "DEFAULT_PATH", str(tmp_path / "dev" / "termination-log"))
    write_result({})
    assert not (tmp_path / "dev").exists()
    assert capsys.readouterr().err == ""


# ---- steps


def step(spec):
    if spec.get("fail"):
        raise DataError(f"no {spec['fail']}", hint="bring some")
    if spec.get("interrupt"):
        raise KeyboardInterrupt
    return {"doubled": spec["n"] * 2}


STEPS = [
    ('{"n": 4}', 0, {"doubled": 8}),
    ('{"fail": "rows"}', 82, "no rows"),
    ('{"interrupt": 1}', 88, "KeyboardInterrupt"),
    ("{}", 81, "KeyError: 'n'"),
    ("{", 83, "--spec is not JSON"),
    ("[1]", 83, "--spec must be a JSON object, got list"),
]


@pytest.mark.parametrize(("spec", "code", "says"), STEPS)
def test_run_step(log, capsys, spec, code, says):
    assert run_step(step, ["--spec", spec]) == code
    message = parse(log.read_text())
    out, err = capsys.readouterr()
    if code == 0:
        assert message.result == says == json.loads(out)
    else:
        assert says in message.failure.reason
        assert says in err
        assert message.failure.exit_code == code


def test_run_step_without_a_spec_is_a_usage_error(log, capsys):
    with pytest.raises(SystemExit) as info:
        run_step(step, [])
    assert info.value.code == 2
    assert "--spec" in capsys.readouterr().err


MODULE = """
import sys
from trainers.job.termination import run_step

def main(spec):
    if spec["n"] < 0:
        raise ValueError("n is negative")
    return {"n": spec["n"]}

if __name__ == "__main__":  # a module without a docstring
    sys.exit(run_step(main))
"""


@pytest.mark.parametrize(("n", "code"), [(1, 0), (-1, 81)])
def test_a_step_as_a_process(tmp_path, n, code):
    path, log = tmp_path / "step.py", tmp_path / "log"
    path.write_text(MODULE)
    run = subprocess.run(
        [sys.executable, path, "--spec", json.dumps({"n": n})],
        env={**os.environ, labels.ENV_TERMINATION_LOG: str(log)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code, run.stderr
    message = parse(log.read_text())
    assert message.ok is (code == 0)
    if code:
        assert message.failure.reason == "ValueError: n is negative"
        assert "FAILED USER (python.ValueError)" in run.stderr

"""The failure table, a row each, and the card that people read."""

import json
import signal

import pytest

from trainers.job.errors import (
    ConfigError,
    DataError,
    InfraError,
    InvalidSpec,
    MissingRecord,
    PeerLostError,
    QuotaError,
    RecordConflict,
    StalledError,
    TrainyardError,
    UserError,
)
from trainers.job.failures import (
    EXIT_CODES,
    KUBERNETES_REASONS,
    RETRY_POLICIES,
    Failure,
    FailureClass,
    classify,
    exit_code_of,
    signal_name,
)

EXITS = [
    # our own, reserved
    ({"exit_code": 81}, "USER"),
    ({"exit_code": 82}, "DATA"),
    ({"exit_code": 83}, "CONFIG"),
    ({"exit_code": 84}, "OOM"),
    ({"exit_code": 85}, "STALLED"),
    ({"exit_code": 86}, "PEER_LOST"),
    ({"exit_code": 87}, "INFRA"),
    ({"exit_code": 88}, "PREEMPTED"),
    ({"exit_code": 89}, "QUOTA"),
    # others'
    ({"exit_code": 1}, "USER"),
    ({"exit_code": 2}, "CONFIG"),
    ({"exit_code": 126}, "CONFIG"),
    ({"exit_code": 127}, "CONFIG"),
    ({"exit_code": 128}, "CONFIG"),
    ({"exit_code": 0}, "INFRA"),  # gone in peace while the job was not done
    ({"exit_code": 42}, "INFRA"),
    ({"exit_code": 255}, "INFRA"),
    ({}, "INFRA"),
    # signals, in the three ways they are told
    ({"signal": signal.SIGKILL}, "INFRA"),
    ({"exit_code": -9}, "INFRA"),
    ({"exit_code": 137}, "INFRA"),
    ({"signal": signal.SIGTERM}, "PREEMPTED"),
    ({"exit_code": 143}, "PREEMPTED"),
    ({"exit_code": -15}, "PREEMPTED"),
    ({"signal": signal.SIGINT}, "PREEMPTED"),
    ({"signal": signal.SIGHUP}, "PREEMPTED"),
    ({"signal": signal.SIGSEGV}, "INFRA"),
    ({"signal": signal.SIGBUS}, "INFRA"),
    ({"signal": signal.SIGFPE}, "USER"),
    ({"signal": signal.SIGILL}, "CONFIG"),
    ({"signal": signal.SIGABRT}, "INFRA"),
    ({"signal": 42}, "INFRA"),
    # which of two wins
    ({"exit_code": 137, "reason": "OOMKilled"}, "OOM"),
    ({"exit_code": 81, "reason": "Error"}, "USER"),
    ({"exit_code": 81, "reason": "Evicted"}, "PREEMPTED"),
    ({"exit_code": 88, "signal": signal.SIGKILL}, "PREEMPTED"),
]


@pytest.mark.parametrize(("end", "failure_class"), EXITS)
def test_exit(end, failure_class):
    assert classify(**end) is FailureClass(failure_class)


REASONS = {
    "OOM": ["OOMKilled"],
    "PREEMPTED": [
        *("Evicted", "Preempting", "Preempted", "PreemptionByScheduler", "DeletionByTaintManager"),
        *("EvictionByEvictionAPI", "TerminationByKubelet", "NodeShutdown", "Terminated", "Shutdown"),
        *("DeletionByPodGC", "NodeLost", "Unknown", "ContainerStatusUnknown"),
    ],
    "INFRA": ["KubeletRestarted", "UnexpectedAdmissionError"],
    "STALLED": ["DeadlineExceeded"],
    "QUOTA": ["OutOfcpu", "OutOfmemory", "Unschedulable", "FailedScheduling"],
    "CONFIG": [
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
        *("CreateContainerConfigError", "CreateContainerError", "ContainerCannotRun"),
        *("RunContainerError", "StartError"),
    ],
}
REASON_ROWS = [(reason, cls) for cls, reasons in REASONS.items() for reason in reasons]


@pytest.mark.parametrize(("reason", "failure_class"), REASON_ROWS)
def test_kubernetes_reason(reason, failure_class):
    assert classify(reason=reason) is FailureClass(failure_class)
    assert classify(reason=reason, exit_code=1) is FailureClass(failure_class)


def test_every_reason_of_the_table_has_a_row_here():
    assert {reason for reason, _ in REASON_ROWS} == set(KUBERNETES_REASONS)


@pytest.mark.parametrize("failure_class", FailureClass)
def test_every_class_has_its_exit_code_and_policy(failure_class):
    assert classify(exit_code=exit_code_of(failure_class)) is failure_class
    assert RETRY_POLICIES[failure_class].advice
    assert 80 < EXIT_CODES[failure_class] < 90


POLICIES = [
    # class, retried, counts against the cap, with more memory
    ("USER", False, True, False),
    ("DATA", False, True, False),
    ("CONFIG", False, True, False),
    ("OOM", True, True, True),
    ("STALLED", True, True, False),
    ("PEER_LOST", True, True, False),
    ("INFRA", True, True, False),
    ("PREEMPTED", True, False, False),
    ("QUOTA", True, False, False),
]


@pytest.mark.parametrize(("failure_class", "retry", "charged", "more_memory"), POLICIES)
def test_policy(failure_class, retry, charged, more_memory):
    policy = Failure(FailureClass(failure_class), "why").policy
    assert (policy.retry, policy.charged, policy.more_memory) == (retry, charged, more_memory)


ERRORS = [
    (TrainyardError("m"), "trainyard", "INFRA"),
    (ConfigError("m"), "config", "CONFIG"),
    (InvalidSpec("field", "be", 1), "spec.invalid", "CONFIG"),
    (MissingRecord("m"), "record.missing", "CONFIG"),
    (UserError("m"), "user", "USER"),
    (DataError("m"), "data", "DATA"),
    (StalledError("m"), "stalled", "STALLED"),
    (PeerLostError("m"), "peer_lost", "PEER_LOST"),
    (InfraError("m"), "infra", "INFRA"),
    (RecordConflict("m"), "record.conflict", "INFRA"),
    (QuotaError("m"), "quota", "QUOTA"),
]


@pytest.mark.parametrize(
    ("error", "code", "failure_class"), ERRORS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_error_tree(error, code, failure_class):
    assert isinstance(error, TrainyardError)
    assert (error.code, error.failure_class) == (code, FailureClass(failure_class))


def test_an_error_says_what_to_do():
    assert str(DataError("no files in raw/", hint="check the path")) == "no files in raw/; check the path"
    assert str(DataError("no files in raw/")) == "no files in raw/"


def test_signal_names():
    assert signal_name(9) == "SIGKILL"
    assert signal_name(63) in ("signal 63", "SIGRTMAX-1")
    assert signal_name(1000) == "signal 1000"


WORKER_FAILED = Failure(
    FailureClass.USER,
    "ValueError: boom",
    code="python.ValueError",
    role="worker",
    index=0,
    exit_code=81,
    last_step=0,
    detail='Traceback\n  File "digits.py"\nValueError: boom\n',
    log_tail=("step 0", "boom"),
    hint="fix it",
)


@pytest.mark.parametrize(
    "failure", [WORKER_FAILED, Failure(FailureClass.OOM, ""), Failure(FailureClass.INFRA, "x")]
)
def test_failure_json_changes_nothing(failure):
    data = json.loads(json.dumps(failure.to_dict()))
    assert Failure.from_dict(data) == failure
    assert Failure.from_dict({**data, "of_a_newer_version": 1}) == failure


def test_replica_of_a_failure():
    assert WORKER_FAILED.replica == "worker-0"
    assert Failure(FailureClass.USER, "x", role="chief").replica == "chief"
    assert Failure(FailureClass.USER, "x").replica == ""


def test_card():
    assert (
        WORKER_FAILED.card("digits")
        == """\
FAILED USER (python.ValueError): digits
  what:       ValueError: boom
  replica:    worker-0
  exit code:  81
  last step:  0
  what to do: fix it
  traceback:
    Traceback
      File "digits.py"
    ValueError: boom
  log tail:
    step 0
    boom"""
    )
    killed = Failure(FailureClass.INFRA, "worker died", signal=9, exit_code=137).card()
    assert "ended by:   SIGKILL" in killed
    assert "exit code" not in killed
    assert RETRY_POLICIES[FailureClass.INFRA].advice in killed

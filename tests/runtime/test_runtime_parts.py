"""The parts of the runtime, one by one."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainers.job.errors import ConfigError, InvalidSpec, PeerLostError
from trainers.job.failures import FailureClass
from trainers.job.record import Heartbeat, JobRecord
from trainers.job.spec import RoleKind, Strategy, Success, TrainingJob, standard_roles
from trainers.runtime import loopback
from trainers.runtime.async_servers import train_on_servers
from trainers.runtime.blame import blame, user_traceback
from trainers.runtime.checkpoints import NotFinite
from trainers.runtime.context import context_of
from trainers.runtime.datasets import NoRecords, make_dataset, model_features, open_records
from trainers.runtime.heartbeat import Progress, Pulse
from trainers.runtime.logs import LogPump
from trainers.runtime.loop import CheckpointEvery, LeftEarly, Loop
from trainers.runtime.module import UnusableTrainer, load_module
from trainers.runtime.steps import StepSize, model_inputs
from trainers.runtime.strategies import SetUp, UnsupportedJob, check_supported, drives_steps, wait_for_servers
from trainers.runtime.tracking import Spool, spool_path


class Clock:
    """A clock that goes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- logs


def test_the_log_passes_whole_lines_and_drops_known_noise(tmp_path: Path) -> None:
    read, write = os.pipe()
    out = (tmp_path / "log").open("wb")
    pump = LogPump(read, out.fileno(), keep=2)
    os.write(
        write, b"first\nI0000 00:00:1 1 cudart_stub.cc:31] Could not find cuda drivers on your machine\nsec"
    )
    pump.pump()
    assert (tmp_path / "log").read_bytes() == b"first\n"
    os.write(write, "ond é\nthird".encode())
    pump.pump()
    os.close(write)
    assert not pump.at_end
    pump.pump()
    assert pump.at_end
    pump.close()
    out.close()
    assert (tmp_path / "log").read_text(encoding="utf-8") == "first\nsecond é\nthird\n"
    assert pump.tail == ("second é", "third")


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    read, write = os.pipe()
    out = (tmp_path / "log").open("wb")
    pump = LogPump(read, out.fileno())
    writer = threading.Thread(target=lambda: (os.write(write, b"x" * 200_000), os.close(write)))
    writer.start()
    while not pump.at_end:
        pump.pump()
    writer.join()
    pump.close()
    out.close()
    assert (tmp_path / "log").read_bytes().count(b"x") == 200_000
    assert max(map(len, pump.tail)) == 500


# ---- progress, pulse, spool


def test_progress_works_out_rate_eta_and_the_share_of_waiting() -> None:
    clock = Clock()
    progress = Progress(100, 64, clock=clock)
    progress.begin_at(20)
    assert progress.values()["eta_s"] is None
    progress.enter("training")
    for _ in range(4):
        clock.now += 1.0
        progress.advance(10, 0.5, waited=0.25, busy=1.0)
    values = progress.values()
    assert (values["step"], values["target"], values["loss"]) == (60, 100, 0.5)
    assert values["examples_per_s"] == 640.0
    assert values["eta_s"] == 4.0
    assert values["input_wait"] == 0.25
    assert progress.trained_steps == 40


def test_a_pulse_goes_on_without_its_disk(jobs: Any, caplog: pytest.LogCaptureFixture) -> None:
    record = JobRecord.open(jobs.plan().job.output)
    spool = Spool(record.folder, clock=lambda: 12.0)
    progress = Progress(10, 1)
    pulse = Pulse(record, progress, Heartbeat("chief", 0, pid=1), spool=spool, every=0.01)
    pulse.start()
    progress.advance(3, 0.25)
    pulse.stop()
    beat = record.heartbeat("chief", 0)
    assert beat is not None
    assert (beat.step, beat.loss, beat.pid) == (3, 0.25, 1)
    lines = [json.loads(line) for line in spool.path.read_text().splitlines()]
    assert {"metric": "loss", "value": 0.25, "step": 3, "at": 12000} in lines
    (record.folder / "heartbeats").rename(record.folder / "away")
    (record.folder / "heartbeats").write_text("in the way")
    pulse.beat()
    assert "could not write the heartbeat" in caplog.text


def test_the_spool_mends_a_line_that_was_cut(tmp_path: Path) -> None:
    spool_path(tmp_path).parent.mkdir()
    spool_path(tmp_path).write_text('{"metric": "lo')
    spool = Spool(tmp_path)
    spool.metrics({"loss": float("nan"), "rate": 2, "none": None}, step=4)
    spool.params({"long": "x" * 9000})
    Spool(tmp_path).tags({"a": 1})
    cut, rate, long, tag = spool.path.read_text().splitlines()
    assert cut == '{"metric": "lo'
    assert json.loads(rate)["metric"] == "rate"
    assert len(json.loads(long)["value"]) == 5000
    assert json.loads(tag) == {"tag": "a", "value": "1"}


# ---- steps and checkpoints


def test_steps_a_call_follow_the_time_of_a_step() -> None:
    size = StepSize(seconds=0.25, most=50)
    assert size.value == 1
    for _ in range(5):
        size.measured(0.01)
    assert size.value == 25
    size.measured(0.49)
    assert size.value == 1
    for _ in range(20):
        size.measured(1e-9)
    assert size.value == 50


def test_checkpoints_are_due_by_steps_or_by_time() -> None:
    clock = Clock()
    by_steps = CheckpointEvery(100, clock=clock)
    assert [by_steps.due(step) for step in (0, 99, 100, 101)] == [False, False, True, True]
    assert (by_steps.room(0), by_steps.room(40), by_steps.room(100), by_steps.most) == (100, 60, 100, 25)
    by_steps.saved(105)
    assert (by_steps.due(199), by_steps.due(200)) == (False, True)
    assert by_steps.due(300)


def test_checkpoints_by_time_take_a_fiftieth_of_it() -> None:
    clock = Clock()
    by_time = CheckpointEvery(None, clock=clock)
    assert by_time.room(1) > 10**8
    for cost, pause in ((0.0, 5.0), (0.2, 10.0), (3.0, 150.0), (60.0, 600.0)):
        by_time.saved(1, cost=cost)
        clock.now += pause - 0.1
        assert not by_time.due(10_000), cost
        clock.now += 0.2
        assert by_time.due(10_000), cost


def test_inputs_come_in_the_structure_of_the_model() -> None:
    import keras

    features = {"a": 1, "b": 2, "c": 3}
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    out = keras.layers.Add()([a, b])
    assert model_inputs(keras.Model([b, a], out), features) == [2, 1]
    assert model_inputs(keras.Model({"a": a, "b": b}, out), features) == {"a": 1, "b": 2}
    assert model_inputs(keras.Model(a, keras.layers.Dense(1)(a)), features) == 1
    assert model_inputs(lambda x: x, features) == features
    assert model_inputs(keras.Model(a, keras.layers.Dense(1)(a)), 5) == 5


# ---- context, module, data


@pytest.mark.parametrize(
    ("strategy", "args", "devices", "rate", "global_batch"),
    [
        ("local", {}, 1, 0.1, 8),
        ("mirrored", {"learning_rate_scaling": "linear"}, 4, 0.4, 32),
        ("multi_worker", {"learning_rate_scaling": "sqrt"}, 1, 0.2, 32),
        ("parameter_server", {"learning_rate_scaling": "linear"}, 1, 0.1, 8),
    ],
)
def test_the_context_scales_the_learning_rate(
    strategy: str, args: dict[str, Any], devices: int, rate: float, global_batch: int
) -> None:
    kind = Strategy.from_dict(strategy)
    job = TrainingJob(
        "job",
        "trainer",
        args={"batch_size": 8, "learning_rate": 0.1, **args},
        roles=standard_roles(kind, workers=3, ps=1),
        strategy=kind,
        output="/nowhere",
    )
    ctx = context_of(job, RoleKind.CHIEF, 0, devices=devices)
    assert ctx.learning_rate == pytest.approx(rate)
    assert ctx.global_batch == global_batch
    if strategy == "multi_worker":
        assert (ctx.shard, context_of(job, RoleKind.WORKER, 2).shard) == ((0, 4), (3, 4))
    else:
        assert ctx.shard == (0, 1)


def test_a_wrong_scaling_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidSpec, match=r"learning_rate_scaling must be one of none, linear, sqrt, got 'cubic'"
    ):
        TrainingJob("job", "trainer", args={"learning_rate_scaling": "cubic"}, output="/nowhere")


def test_workers_of_parameter_servers_shuffle_by_seeds_of_their_own() -> None:
    strategy = Strategy.from_dict("parameter_server")
    roles = standard_roles(strategy, workers=1, ps=1)
    job = TrainingJob("job", "trainer", args={"seed": 1}, roles=roles, strategy=strategy, output="/nowhere")
    ctx = context_of(job, RoleKind.CHIEF, 0)
    assert len({int(ctx.shuffle_seed()) for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def loss(hparams): pass", "has no function build_model"),
        ("def build_model(hparams): pass\nloss = 3", "has no function loss"),
    ],
)
def test_a_module_that_lacks_something_is_refused(
    write_module: Callable[[str, str], str], text: str, message: str
) -> None:
    with pytest.raises(UnusableTrainer, match=message):
        load_module(write_module("lacking", text))


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(UnusableTrainer, match=r"there is no trainer module 'trainers\.models\.nobody'"):
        load_module("trainers.models.nobody")


def test_a_module_whose_import_fails_shows_its_own_error(write_module: Callable[[str, str], str]) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_module(write_module("fails", "import no_such_package"))


def test_what_a_module_may_leave_out(write_module: Callable[[str, str], str]) -> None:
    module = load_module(write_module("least", "def build_model(hparams): pass\ndef loss(hparams): pass"))
    assert (module.name, module.metrics({}), module.classes, module.make_dataset) == ("least", [], None, None)
    assert float(module.optimizer({}, 0.5).learning_rate) == 0.5
    digits = load_module("trainers.models.digits")
    assert digits.classes == [str(i) for i in range(10)]
    assert [metric.name for metric in digits.metrics({})] == ["accuracy"]


def test_a_model_with_an_input_that_no_record_has(digits_jobs: Any) -> None:
    import keras

    records = open_records(digits_jobs.plan().job)
    picture = keras.Input((8, 8, 1), name="picture")
    with pytest.raises(ConfigError, match=r"inputs \['picture'\] that the records in .* do not hold"):
        model_features(keras.Model(picture, keras.layers.Flatten()(picture)), records)
    assert model_features(object(), records) == ["image"]


def test_no_records_and_no_dataset(jobs: Any) -> None:
    job = jobs.plan().job
    assert open_records(job) is None
    module = load_module("trainers.models.digits")
    with pytest.raises(NoRecords, match="has no records"):
        make_dataset(module, None, None, context_of(job, RoleKind.CHIEF, 0))


# ---- strategies


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"success": Success("all_workers")}, "success rule all_workers"),
    ],
)
def test_what_is_not_there_yet_is_refused(change: dict[str, Any], message: str) -> None:
    strategy = change.get("strategy", Strategy.from_dict("parameter_server"))
    roles = standard_roles(strategy, workers=1, ps=1)
    success = change.get("success", Success())
    job = TrainingJob("job", "trainer", roles=roles, strategy=strategy, success=success, output="/nowhere")
    with pytest.raises(UnsupportedJob, match=message):
        check_supported(job)


def test_who_drives_steps() -> None:
    for kind, worker in (("parameter_server", False), ("multi_worker", True)):
        strategy = Strategy.from_dict(kind)
        roles = standard_roles(strategy, workers=1, ps=1)
        job = TrainingJob("job", "trainer", roles=roles, strategy=strategy, output="/nowhere")
        check_supported(job)
        assert drives_steps(job, RoleKind.CHIEF)
        assert drives_steps(job, RoleKind.WORKER) is worker
        assert not drives_steps(job, RoleKind.EVALUATOR)


class Waiting(threading.Event):
    """An event whose waits move a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.now += timeout or 0.0
        return self.is_set()


@pytest.mark.parametrize(
    ("up", "needed", "expected", "seconds"),
    [
        ({"p0": 0, "w0": 0, "w1": 0}, 2, ["w0", "w1"], 0.0),
        ({"p0": 3, "w0": 0, "w1": 5}, 2, ["w0", "w1"], 5.0),
        ({"p0": 0, "w0": 0, "w1": 99}, 1, ["w0"], 10.0),  # the grace time for those beyond the needed
        ({"p0": 0, "w0": 0, "w1": 12}, 2, ["w0", "w1"], 12.0),
    ],
)
def test_servers_are_waited_for(
    up: dict[str, float], needed: int, expected: list[str], seconds: float
) -> None:
    clock = Clock()
    found = wait_for_servers(
        ["p0"],
        ["w0", "w1"],
        needed_workers=needed,
        budget=60.0,
        grace=10.0,
        stop=Waiting(clock),
        clock=clock,
        answers=lambda address: clock.now >= up[address],
    )
    assert found == expected
    assert clock.now == pytest.approx(seconds, abs=0.2)


def test_servers_that_do_not_answer_are_named() -> None:
    clock = Clock()
    options: dict[str, Any] = {"needed_workers": 1, "budget": 5.0, "grace": 1.0, "clock": clock}
    with pytest.raises(PeerLostError, match=r"no answer from p0, w0 within 5 s"):
        wait_for_servers(["p0"], ["w0"], stop=Waiting(clock), answers=lambda _: False, **options)
    stop = Waiting(clock)
    stop.set()
    clock.now = 0.0
    with pytest.raises(PeerLostError, match="asked to leave"):
        wait_for_servers(["p0"], ["w0"], stop=stop, answers=lambda _: False, **options)


def test_a_port_answers_when_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options: dict[str, Any] = {
            "needed_workers": 0,
            "budget": 0.0,
            "grace": 0.0,
            "stop": threading.Event(),
        }
        assert wait_for_servers([address], [], **options) == []
    with pytest.raises(PeerLostError):
        wait_for_servers([address], [], **options)


# ---- blame


def tensorflow_error(name: str, message: str) -> Exception:
    import tensorflow as tf

    error = getattr(tf.errors, name)(None, None, message)
    assert isinstance(error, Exception)
    return error


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        ("UnavailableError", "Socket closed", "PEER_LOST"),
        ("AbortedError", "The peer restarted", "PEER_LOST"),
        ("InvalidArgumentError", "Unable to find a context_id matching the specified one", "PEER_LOST"),
        ("InvalidArgumentError", "logits and labels must have the same first dimension", "USER"),
        ("ResourceExhaustedError", "OOM when allocating tensor", "OOM"),
        ("ResourceExhaustedError", "step-3.data; No space left on device", "INFRA"),
        ("DataLossError", "corrupted record at 12", "DATA"),
    ],
)
def test_whose_fault_an_error_of_tensorflow_is(name: str, message: str, expected: str) -> None:
    failure = blame(tensorflow_error(name, message), role="chief", index=0)
    assert (failure.failure_class.value, failure.replica) == (expected, "chief-0")
    assert message in failure.reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "INFRA"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OOM"),
        (MemoryError(), "OOM"),
        (KeyError("x"), "USER"),
        (UnsupportedJob("not yet"), "CONFIG"),
    ],
)
def test_whose_fault_other_errors_are(error: Exception, expected: str) -> None:
    failure = blame(error)
    assert failure.failure_class is FailureClass(expected)


def test_an_error_of_a_workers_dataset_is_unwrapped() -> None:
    wrapper = RuntimeError("closure input")
    wrapper.original_exception = tensorflow_error("DataLossError", "corrupted record")  # type: ignore[attr-defined]
    assert blame(wrapper).failure_class is FailureClass.DATA


def test_the_reason_of_a_graph_error_is_what_went_wrong() -> None:
    head = "Graph execution error:\n\nDetected at node x defined at\n  File a.py\n\n"
    text = head + "Incompatible shapes\n\t [[{{node x}}]]"
    assert (
        blame(tensorflow_error("InvalidArgumentError", text)).reason
        == "InvalidArgumentError: Incompatible shapes"
    )


def test_a_traceback_begins_with_the_users_own_frames(write_module: Callable[[str, str], str]) -> None:
    import importlib

    import tensorflow as tf

    name = write_module(
        "raises",
        """
        import json
        def outer(text):
            try:
                return json.loads(text)
            except ValueError as e:
                raise KeyError("no such thing") from e
        def in_graph(x):
            if x > 0:
                raise ValueError("wrong in user code")
        """,
    )
    module = importlib.import_module(name)
    with pytest.raises(KeyError) as outer:
        module.outer("{")
    text = user_traceback(outer.value)
    assert text.count("raises.py") == 2
    assert "site-packages" not in text
    assert text.rstrip().endswith("KeyError: 'no such thing'")
    with pytest.raises(ValueError, match="wrong in user code") as in_graph:
        tf.function(module.in_graph)(1)
    failure = blame(in_graph.value)
    assert failure.reason == "ValueError: wrong in user code"
    assert "raises.py" in failure.detail
    with pytest.raises(tf.errors.InvalidArgumentError) as eager:
        tf.reshape(tf.zeros([4]), [3])
    assert "test_runtime_parts.py" in user_traceback(eager.value)


# ---- loopback


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:2222", True),
        ("127.3.4.5:1", True),
        ("[::1]:2222", True),
        ("localhost:2222", True),
        ("10.0.0.4:2222", False),
        ("chief-0.gang.ns.svc:2222", False),
        ("[fe80::1]:2222", False),
    ],
)
def test_which_addresses_are_loopback(address: str, expected: bool) -> None:
    assert loopback.is_loopback(address) is expected


def test_any_address_becomes_loopback() -> None:
    def v4(host: str) -> bytes:
        return struct.pack("=HH", socket.AF_INET, 7) + socket.inet_aton(host) + bytes(8)

    def v6(host: str) -> bytes:
        return struct.pack("=HHI", socket.AF_INET6, 7, 0) + socket.inet_pton(socket.AF_INET6, host) + bytes(4)

    assert loopback.loopback_of(v4("0.0.0.0")) == v4("127.0.0.1")
    assert loopback.loopback_of(v4("10.1.2.3")) == v4("10.1.2.3")
    assert loopback.loopback_of(v6("::")) == v6("::ffff:127.0.0.1")
    assert loopback.loopback_of(v6("::ffff:0.0.0.0")) == v6("::ffff:127.0.0.1")
    assert loopback.loopback_of(v6("::"), v6=True) == v6("::1")
    assert loopback.loopback_of(v6("fe80::1")) == v6("fe80::1")
    unix = struct.pack("=H", socket.AF_UNIX) + b"/tmp/socket-of-somebody"
    assert loopback.loopback_of(unix) == unix


def test_a_listener_beyond_loopback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loopback, "listeners", lambda: [("127.0.0.1", 1), ("::ffff:127.0.0.1", 2), ("::1", 3)]
    )
    loopback.check_listeners("127.0.0.1:1")
    monkeypatch.setattr(loopback, "listeners", lambda: [("127.0.0.1", 1), ("::", 5)])
    with pytest.raises(loopback.UnprotectedServer, match="listens on :: port 5, beyond loopback"):
        loopback.check_listeners("127.0.0.1:1")
    loopback.check_listeners("10.0.0.4:1")
    monkeypatch.setenv(loopback.ENV_ALLOW_OPEN, "1")
    loopback.check_listeners("127.0.0.1:1")


def test_where_servers_cannot_be_kept_on_loopback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert loopback.bind_loopback_only("10.0.0.4:2222") is False
    monkeypatch.setattr(loopback, "_installed", [])
    monkeypatch.setattr(loopback.platform, "machine", lambda: "riscv64")
    with pytest.raises(
        loopback.UnprotectedServer, match=r"has no authentication.*not known how on \w+ riscv64"
    ):
        loopback.bind_loopback_only("127.0.0.1:2222")
    monkeypatch.setenv(loopback.ENV_ALLOW_OPEN, "1")
    assert loopback.bind_loopback_only("127.0.0.1:2222") is False
    assert "going on, as TRAINYARD_ALLOW_OPEN_SERVER=1 says" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_server_listens_on_loopback_only(host: str) -> None:
    """Each in a process of its own: the import table of a process can be patched once."""
    program = """
    import sys
    from trainers.job.ports import free_ports
    from trainers.runtime.lean import import_server
    from trainers.runtime.loopback import bind_loopback_only, check_listeners, listeners
    server_lib = import_server()
    address = f"{sys.argv[1]}:{free_ports(1)[0]}"
    assert bind_loopback_only(address) and bind_loopback_only(address)
    spec = server_lib.ClusterSpec({"ps": {0: address}})
    server = server_lib.Server(spec, job_name="ps", task_index=0, protocol="grpc")
    check_listeners(address)
    assert "keras" not in sys.modules
    print([found for found, _ in listeners()])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), host],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert done.returncode == 0, done.stderr
    shown = ("['::1']",) if host == "[::1]" else ("['::ffff:7f00:1']", "['::ffff:127.0.0.1']")
    assert done.stdout.strip() in shown


def test_a_server_in_this_process_listens_on_loopback_only() -> None:
    from trainers.job.ports import free_ports
    from trainers.runtime.lean import import_server

    server_lib = import_server()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    before = set(loopback.listeners())
    assert loopback.bind_loopback_only(address)
    assert loopback.bind_loopback_only(address)
    spec = server_lib.ClusterSpec({"ps": {0: address}})
    server = server_lib.Server(spec, job_name="ps", task_index=0, protocol="grpc")
    new = set(loopback.listeners()) - before
    assert {host for host, _ in new} <= {"::ffff:7f00:1", "::ffff:127.0.0.1"}
    assert [port for _, port in new] == [int(address.rpartition(":")[2])]
    loopback.check_listeners(address)
    del server


def test_the_listeners_of_a_process() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as v4,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as v6,
    ):
        found = loopback.listeners()
        ours = {("127.0.0.1", v4.getsockname()[1]), ("::1", v6.getsockname()[1])}
        assert ours <= set(found)
    assert not ours & set(loopback.listeners())
    assert loopback.listeners(2**22 + 1) == []  # no such process


# ---- the loop on parameter servers, with a coordinator of threads


class Coordinator:
    """ClusterCoordinator as far as the loop uses it: runs a closure when its value is fetched."""

    def schedule(self, fn: Any, args: Any) -> Any:
        return type("Remote", (), {"fetch": lambda _self: fn(*args)})()


def server_loop(run: Any, target: int, **options: Any) -> Loop:
    return Loop(
        run=run,
        target=target,
        progress=Progress(target, 1),
        every=CheckpointEvery(options.pop("every", None)),
        checkpoints=options.pop("checkpoints", None),
        stop=threading.Event(),
        save_now=threading.Event(),
        started=lambda: None,
    )


class Saved:
    """Checkpoints that remember their steps."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.steps: list[int] = []

    def save(self, step: int) -> None:
        self.last = step
        self.steps.append(step)


def test_lanes_make_exactly_the_asked_steps() -> None:
    made: list[int] = []
    lock = threading.Lock()

    def run(_iterator: Any, k: Any, _told: Any) -> tuple[float, float, None]:
        with lock:
            made.append(int(k))
        time.sleep(0.002)
        return 0.5, 0.0, None

    saved: Any = Saved()
    loop = server_loop(run, 1003, every=250, checkpoints=saved)
    assert train_on_servers(loop, SetUp(None, workers=3, coordinator=Coordinator()), None, 3) == 1003
    assert sum(made) == 1000
    assert max(made) > 1
    assert saved.steps[-1] == 1003
    assert len(saved.steps) >= 3
    assert loop.progress.trained_steps == 1000


@pytest.mark.parametrize(
    ("loss", "error", "raised"),
    [(float("nan"), None, NotFinite), (0.0, ConnectionError("lost"), ConnectionError)],
)
def test_what_one_lane_raises_ends_the_loop(loss: float, error: Exception | None, raised: type) -> None:
    def run(_iterator: Any, _k: Any, _told: Any) -> tuple[float, float, None]:
        if error:
            raise error
        return loss, 0.0, None

    loop = server_loop(run, 100)
    with pytest.raises(raised):
        train_on_servers(loop, SetUp(None, workers=1, coordinator=Coordinator()), None, 0)


def test_a_loop_on_servers_saves_when_told_and_leaves_when_asked() -> None:
    saved: Any = Saved()

    def run(_iterator: Any, _k: Any, _told: Any) -> tuple[float, float, None]:
        time.sleep(0.01)
        if loop.progress.step >= 3 and not saved.steps:
            loop.save_now.set()
        if loop.progress.step >= 20:
            loop.stop.set()
        return 0.5, 0.0, None

    loop = server_loop(run, 10_000, checkpoints=saved)
    with pytest.raises(LeftEarly):
        train_on_servers(loop, SetUp(None, workers=1, coordinator=Coordinator()), None, 0)
    first, *_, last = saved.steps
    assert 3 <= first < 20 <= last


def test_a_parameter_server_that_is_asked_to_leave_gets_a_checkpoint(jobs: Any) -> None:
    from trainers.runtime.run import _Run

    plan = jobs.plan(strategy="parameter_server", workers=1, ps=1)
    record = JobRecord.open(plan.job.output)
    record.beat(Heartbeat("ps", 0, phase="leaving"))
    run = _Run(record, plan, plan.replica(RoleKind.CHIEF, 0))
    run._watch_for_leaving_servers()
    assert run.save_now.wait(10)
    run.stop.set()


# ---- the trainer process


def test_a_warm_interpreter_forks_the_trainer(jobs: Any, tmp_path: Path) -> None:
    """The fork runs no operation: it finds no such module, and says so."""
    from trainers.runtime.process import end_group, start_trainer

    plan = jobs.plan(trainer="no.such.module")
    said = tmp_path / "said.json"
    env = {**os.environ, **plan.replicas[0].env, "TRAINYARD_TERMINATION_LOG": str(said)}
    child = start_trainer({**env, "TRAINYARD_LAUNCHER_PID": str(os.getpid())})
    while child.poll() is None:
        time.sleep(0.01)
    assert child.poll() == 83, os.read(child.output, 10_000).decode()
    assert end_group(child) == 83
    os.close(child.output)
    assert "no.such.module" in said.read_text()


def test_a_cold_interpreter_starts_the_trainer_anew(
    jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainers.runtime import process

    monkeypatch.setattr(process, "MODULE", "trainers.job.no_such_module")
    monkeypatch.delitem(sys.modules, "tensorflow")
    child = process.start_trainer(dict(os.environ))
    while child.poll() is None:
        time.sleep(0.01)
    assert child.poll() == 1
    assert b"No module named trainers.job.no_such_module" in os.read(child.output, 4096)
    os.close(child.output)
    child.signal(15)  # it is gone: nothing happens


def test_the_trainer_says_how_it_failed(
    jobs: Any, termination_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainers.job import termination
    from trainers.runtime import trainer

    plan = jobs.plan(trainer="no.such.module")
    for key, value in plan.replicas[0].env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("TRAINYARD_LAUNCHER_PID", raising=False)
    root = trainer.logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        assert trainer.main() == 83
    finally:
        root.handlers[:], root.level = before, level
    said = termination.parse(termination_log.read_text())
    assert said is not None
    assert said.failure is not None
    assert said.failure.reason == "there is no trainer module 'no.such.module'"
    assert (Path(plan.job.output) / "stacks" / "chief-0-0001.txt").exists()

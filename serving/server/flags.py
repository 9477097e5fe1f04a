"""The server's command line: TF Serving's flag names, and a few of our own at the end."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigInvalid
from serving.server.metrics import PATH as METRICS_PATH
from serving.server.protos import BatchingParameters, MonitoringConfig, read_text
from serving.server.request_log import LogOptions

__all__ = ["Batching", "Options", "parse"]


_THREADS = 8


@dataclass(frozen=True)
class Batching:
    """Limits of request batching, as in TF Serving's batching parameters file."""

    max_batch_size: int = 64
    batch_timeout_s: float = 0.0
    max_enqueued_batches: int = 100
    num_batch_threads: int = 2
    allowed_batch_sizes: tuple[int, ...] = ()
    pad_variable_length_inputs: bool = False
    enable_large_batch_splitting: bool = True
    max_execution_batch_size: int | None = None

    @property
    def largest_batch(self) -> int:
        """How many rows one run of the model may get."""
        return self.max_execution_batch_size or self.max_batch_size

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_enqueued_batches", "num_batch_threads"):
            if getattr(self, name) < 1:
                raise ConfigInvalid(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.batch_timeout_s < 0:
            raise ConfigInvalid(
                f"batch_timeout_micros must be 0 or more, got {self.batch_timeout_s * 1e6:.0f}"
            )
        most = self.max_execution_batch_size
        if most is not None and (
            not self.enable_large_batch_splitting or not 1 <= most <= self.max_batch_size
        ):
            raise ConfigInvalid(
                "max_execution_batch_size must be from 1 to max_batch_size and needs "
                f"enable_large_batch_splitting, got {most}"
            )
        sizes, last = self.allowed_batch_sizes, self.largest_batch
        if sizes and (list(sizes) != sorted(set(sizes)) or sizes[-1] != last or sizes[0] < 1):
            name = "max_batch_size" if most is None else "max_execution_batch_size"
            raise ConfigInvalid(
                f"allowed_batch_sizes must rise and end with {name} {last}, got {list(sizes)}"
            )

    @classmethod
    def load(cls, path: Path) -> Batching:
        """Read TF Serving's --batching_parameters_file (text proto)."""
        read = read_text(path, BatchingParameters(), "batching parameters file")
        given = {
            name: getattr(read, name).value
            for name in (
                "max_batch_size",
                "max_enqueued_batches",
                "num_batch_threads",
                "enable_large_batch_splitting",
                "max_execution_batch_size",
            )
            if read.HasField(name)
        }
        if read.HasField("batch_timeout_micros"):
            given["batch_timeout_s"] = read.batch_timeout_micros.value / 1e6
        return cls(
            **given,
            allowed_batch_sizes=tuple(read.allowed_batch_sizes),
            pad_variable_length_inputs=read.pad_variable_length_inputs,
        )


@dataclass(frozen=True)
class Options:
    """How one server process runs; times in seconds, sizes in bytes, port 0 means any free port."""

    host: str = "127.0.0.1"
    port: int = 8500
    rest_api_port: int | None = None
    model_config_file: Path | None = None
    model_config_file_poll_s: float = 0.0
    model_name: str = "default"
    model_base_path: str = ""
    poll_s: float = 1.0
    max_load_retries: int = 1
    load_retry_s: float = 0.2
    num_load_threads: int = 1
    allow_unavailable_labels: bool = False
    batching: Batching | None = None
    intra_op_threads: int = 1
    inter_op_threads: int = 1
    grpc_threads: int = _THREADS
    grpc_direct: bool = True
    rest_threads: int = _THREADS
    grpc_options: tuple[tuple[str, int | str], ...] = ()
    as_tensor_content: bool = True
    max_message_bytes: int = 128 << 20
    max_concurrent_requests: int = 1024
    drain_s: float = 10.0
    ready_file: Path | None = None
    request_log: LogOptions | None = None
    metrics_path: str | None = METRICS_PATH
    ssl_config_file: Path | None = None
    api_token_file: Path | None = None
    admin_token_file: Path | None = None
    api_token_exempt: tuple[str, ...] = ("health",)
    allow_insecure_host: bool = False
    rest_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    warm_up: bool = True
    warm_up_iterations: int = 1
    cors: bool = False

    def __post_init__(self) -> None:
        for name in ("num_load_threads", "grpc_threads", "rest_threads", "max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise ConfigInvalid(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.poll_s <= 0:
            raise ConfigInvalid(f"file_system_poll_wait_seconds must be over 0, got {self.poll_s}")
        for name in ("max_message_bytes", "rest_timeout_s", "header_timeout_s", "warm_up_iterations"):
            if getattr(self, name) <= 0:
                raise ConfigInvalid(f"{name} must be over 0, got {getattr(self, name)}")
        if self.port and self.port == self.rest_api_port:
            raise ConfigInvalid(f"rest_api_port must differ from port, got {self.port} for both")
        if not self.model_config_file and not self.model_base_path:
            raise ConfigInvalid("either --model_config_file or --model_base_path must be given")


def _bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 (any) to 65535, got {text!r}")
    return int(text)


def _channel_arguments(text: str) -> tuple[tuple[str, int | str], ...]:
    pairs: list[tuple[str, int | str]] = []
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"must be key=value[,key=value...], got {item!r}")
        pairs.append((key, int(value) if value.lstrip("-").isdigit() else value))
    return tuple(pairs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m serving.server", description=__doc__, allow_abbrev=False)
    add = parser.add_argument

    def flag(name: str, help_text: str) -> None:
        add(name, type=_bool, nargs="?", const=True, default=False, help=help_text)

    add("--port", type=_port, default=8500, help="gRPC port; 0 for any free one")
    add("--rest_api_port", type=_port, default=None, help="HTTP port; 0 for any free one; no HTTP without it")
    add("--model_config_file", type=Path, help="ModelServerConfig as text proto")
    add(
        "--model_config_file_poll_wait_seconds",
        type=float,
        default=0.0,
        help="0 reads the file once, at start",
    )
    add("--model_name", default="default", help="name of the one model at --model_base_path")
    add("--model_base_path", default="", help="folder of numbered versions, instead of a config file")
    add("--file_system_poll_wait_seconds", type=float, default=1.0)
    add("--max_num_load_retries", type=int, default=1)
    add("--load_retry_interval_micros", type=int, default=200_000)
    add("--num_load_threads", type=int, default=1)
    flag("--allow_version_labels_for_unavailable_models", "labels may name versions that are not loaded yet")
    flag("--enable_batching", "run requests of several callers together")
    add("--batching_parameters_file", type=Path, help="BatchingParameters as text proto")
    add("--monitoring_config_file", type=Path, help="MonitoringConfig as text proto")
    add("--ssl_config_file", type=Path, help="SSLConfig as text proto: TLS for both ports")
    add("--tensorflow_session_parallelism", type=int, help="threads within and between ops, in one flag")
    add(
        "--tensorflow_intra_op_parallelism",
        type=int,
        help="threads within an op, 1 if not given; 0 is all cores",
    )
    add("--tensorflow_inter_op_parallelism", type=int, help="ops at a time, 1 if not given; 0 is all cores")
    add("--rest_api_timeout_in_ms", type=int, default=30_000, help="longest time of a REST request")
    add("--enable_model_warmup", type=_bool, nargs="?", const=True, default=True)
    add("--num_request_iterations_for_warmup", type=int, default=1, help="runs of each warm-up request")
    flag("--rest_api_enable_cors_support", "let web pages of other origins call the REST API")
    flag("--enable_grpc_healthcheck_service", "taken for TF Serving's sake: the service is always there")
    add(
        "--grpc_max_threads",
        type=int,
        help="the cores and one more, or 8 where those are more, or with batching",
    )
    add("--rest_api_num_threads", type=int, help="as of gRPC")
    add("--grpc_channel_arguments", type=_channel_arguments, default=())
    add("--enable_serialization_as_tensor_content", type=_bool, nargs="?", const=True, default=True)
    ours = parser.add_argument_group("of the embedded server only").add_argument
    ours("--host", default="127.0.0.1", help="address to listen on; loopback unless told otherwise")
    ours("--max_message_bytes", type=int, default=128 << 20, help="largest request or answer")
    ours("--max_concurrent_requests", type=int, default=1024, help="more are refused at once")
    ours(
        "--grpc_direct",
        type=_bool,
        default=True,
        help="answer calls in the threads that receive them; false for grpcio's own server, at twice the cost",
    )
    ours("--header_timeout_seconds", type=float, default=10.0, help="time for a connection to send its head")
    ours("--api_token_file", type=Path, help="tokens that callers must show one of, one a line")
    ours(
        "--admin_token_file",
        type=Path,
        help="tokens that alone may change what is served; good for the rest too",
    )
    ours(
        "--api_token_exempt",
        default="health",
        help="what needs no token, with commas between: health, metrics, metadata (REST)",
    )
    ours(
        "--allow_insecure_host",
        action="store_true",
        help="serve other machines without TLS and tokens: something else protects this server",
    )
    ours("--drain_seconds", type=float, default=10.0, help="time for requests in flight after SIGTERM")
    ours("--request_log_dir", type=Path, help="log a sample of the requests here; none without it")
    ours(
        "--request_log_sample_rate",
        type=float,
        default=0.0,
        help="share of requests logged of models whose config has no logging_config, from 0 to 1",
    )
    ours("--request_log_max_file_bytes", type=int, default=64 << 20, help="a log file is closed at this size")
    ours("--request_log_max_file_seconds", type=float, default=60.0, help="and at this age")
    ours("--request_log_keep_bytes", type=int, default=4 << 30, help="above it the oldest files are removed")
    ours(
        "--ready-file",
        "--ready_file",
        type=Path,
        help="JSON with ports and pid, written when models are served",
    )
    return parser


def _at_a_time(asked: int | None, batching: bool) -> int:
    """How many calls, or requests, are worked on at a time.

    A thread computes from its call's start to its end, and more of them than cores only wait for the interpreter's
    lock; where they wait for a batch, it takes many to fill one.
    """
    if asked is not None:
        return asked
    return _THREADS if batching else min(_THREADS, (os.cpu_count() or 1) + 1)


def _threads(given: argparse.Namespace, which: str) -> int:
    """As in TF Serving: the session's flag is for both, and excludes the two."""
    own, both = getattr(given, f"tensorflow_{which}_op_parallelism"), given.tensorflow_session_parallelism
    if own is not None and both is not None:
        raise ConfigInvalid(
            "--tensorflow_session_parallelism can't be given together with "
            "--tensorflow_intra_op_parallelism or --tensorflow_inter_op_parallelism"
        )
    return own if own is not None else both if both is not None else 1


def _metrics_path(file: Path | None) -> str | None:
    """Where Prometheus finds the metrics; None where the monitoring config switches them off."""
    if file is None:
        return METRICS_PATH
    prometheus = read_text(file, MonitoringConfig(), "monitoring config file").prometheus_config
    path = prometheus.path or METRICS_PATH
    if not path.startswith("/"):
        raise ConfigInvalid(f"path of {file} must begin with /, got {path!r}")
    return path if prometheus.enable else None


def _request_log(given: argparse.Namespace) -> LogOptions | None:
    if given.request_log_dir is None:
        if given.request_log_sample_rate:
            raise ConfigInvalid("--request_log_sample_rate needs --request_log_dir")
        return None
    return LogOptions(
        given.request_log_dir,
        sample_rate=given.request_log_sample_rate,
        max_file_bytes=given.request_log_max_file_bytes,
        max_file_age_s=given.request_log_max_file_seconds,
        keep_bytes=given.request_log_keep_bytes,
    )


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from a command line; ends the process with a message where they are wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        batching = None
        if given.enable_batching:
            file = given.batching_parameters_file
            batching = Batching.load(file) if file else Batching(num_batch_threads=os.cpu_count() or 1)
        return Options(
            host=given.host,
            port=given.port,
            rest_api_port=given.rest_api_port,
            model_config_file=given.model_config_file,
            model_config_file_poll_s=given.model_config_file_poll_wait_seconds,
            model_name=given.model_name,
            model_base_path=given.model_base_path,
            poll_s=given.file_system_poll_wait_seconds,
            max_load_retries=given.max_num_load_retries,
            load_retry_s=given.load_retry_interval_micros / 1e6,
            num_load_threads=given.num_load_threads,
            allow_unavailable_labels=given.allow_version_labels_for_unavailable_models,
            batching=batching,
            intra_op_threads=_threads(given, "intra"),
            inter_op_threads=_threads(given, "inter"),
            grpc_threads=_at_a_time(given.grpc_max_threads, batching is not None),
            grpc_direct=given.grpc_direct,
            rest_threads=_at_a_time(given.rest_api_num_threads, batching is not None),
            grpc_options=given.grpc_channel_arguments,
            as_tensor_content=given.enable_serialization_as_tensor_content,
            max_message_bytes=given.max_message_bytes,
            max_concurrent_requests=given.max_concurrent_requests,
            drain_s=given.drain_seconds,
            ready_file=given.ready_file,
            request_log=_request_log(given),
            metrics_path=_metrics_path(given.monitoring_config_file),
            ssl_config_file=given.ssl_config_file,
            api_token_file=given.api_token_file,
            admin_token_file=given.admin_token_file,
            api_token_exempt=tuple(filter(None, given.api_token_exempt.split(","))),
            allow_insecure_host=given.allow_insecure_host,
            rest_timeout_s=given.rest_api_timeout_in_ms / 1e3,
            header_timeout_s=given.header_timeout_seconds,
            cors=given.rest_api_enable_cors_support,
            warm_up=given.enable_model_warmup,
            warm_up_iterations=given.num_request_iterations_for_warmup,
        )
    except ConfigInvalid as e:
        parser.error(str(e))

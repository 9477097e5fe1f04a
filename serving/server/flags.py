"""The server's command line: TF Serving's flag names, and a few of our own at the end."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from serving.errors import ConfigInvalid
from serving.server.protos import BatchingParameters

__all__ = ["Batching", "Options", "parse"]


@dataclass(frozen=True)
class Batching:
    """Limits of request batching, as in TF Serving's batching parameters file."""

    max_batch_size: int = 64
    batch_timeout_s: float = 0.0
    max_enqueued_batches: int = 100
    num_batch_threads: int = 2
    allowed_batch_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_enqueued_batches", "num_batch_threads"):
            if getattr(self, name) < 1:
                raise ConfigInvalid(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.batch_timeout_s < 0:
            raise ConfigInvalid(
                f"batch_timeout_micros must be 0 or more, got {self.batch_timeout_s * 1e6:.0f}"
            )
        sizes = self.allowed_batch_sizes
        if sizes and (list(sizes) != sorted(set(sizes)) or sizes[-1] != self.max_batch_size or sizes[0] < 1):
            raise ConfigInvalid(
                f"allowed_batch_sizes must rise and end with max_batch_size {self.max_batch_size}, got {list(sizes)}"
            )

    @classmethod
    def load(cls, path: Path) -> Batching:
        """Read TF Serving's --batching_parameters_file (text proto)."""
        try:
            read = text_format.Parse(path.read_text(), BatchingParameters())
        except (OSError, UnicodeDecodeError, text_format.ParseError) as e:
            raise ConfigInvalid(f"batching parameters file {path}: {e}") from e
        given = {
            name: getattr(read, name).value
            for name in ("max_batch_size", "max_enqueued_batches", "num_batch_threads")
            if read.HasField(name)
        }
        if read.HasField("batch_timeout_micros"):
            given["batch_timeout_s"] = read.batch_timeout_micros.value / 1e6
        return cls(**given, allowed_batch_sizes=tuple(read.allowed_batch_sizes))


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
    grpc_threads: int = 8
    rest_threads: int = 8
    grpc_options: tuple[tuple[str, int | str], ...] = ()
    as_tensor_content: bool = True
    max_message_bytes: int = 128 << 20
    max_concurrent_requests: int = 1024
    drain_s: float = 10.0
    ready_file: Path | None = None

    def __post_init__(self) -> None:
        for name in ("num_load_threads", "grpc_threads", "rest_threads", "max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise ConfigInvalid(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.poll_s <= 0:
            raise ConfigInvalid(f"file_system_poll_wait_seconds must be over 0, got {self.poll_s}")
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
    add("--batching_parameters_file", type=Path)
    add("--tensorflow_intra_op_parallelism", type=int, default=1, help="threads within an op; 0 is all cores")
    add("--tensorflow_inter_op_parallelism", type=int, default=1)
    add("--grpc_max_threads", type=int, default=8)
    add("--rest_api_num_threads", type=int, default=8)
    add("--grpc_channel_arguments", type=_channel_arguments, default=())
    add("--enable_serialization_as_tensor_content", type=_bool, nargs="?", const=True, default=True)
    ours = parser.add_argument_group("of the embedded server only").add_argument
    ours("--host", default="127.0.0.1", help="address to listen on; loopback unless told otherwise")
    ours("--max_message_bytes", type=int, default=128 << 20, help="largest request or answer")
    ours("--max_concurrent_requests", type=int, default=1024, help="more are refused at once")
    ours("--drain_seconds", type=float, default=10.0, help="time for requests in flight after SIGTERM")
    ours(
        "--ready-file",
        "--ready_file",
        type=Path,
        help="JSON with ports and pid, written when models are served",
    )
    return parser


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
            intra_op_threads=given.tensorflow_intra_op_parallelism,
            inter_op_threads=given.tensorflow_inter_op_parallelism,
            grpc_threads=given.grpc_max_threads,
            rest_threads=given.rest_api_num_threads,
            grpc_options=given.grpc_channel_arguments,
            as_tensor_content=given.enable_serialization_as_tensor_content,
            max_message_bytes=given.max_message_bytes,
            max_concurrent_requests=given.max_concurrent_requests,
            drain_s=given.drain_seconds,
            ready_file=given.ready_file,
        )
    except ConfigInvalid as e:
        parser.error(str(e))

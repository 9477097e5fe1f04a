"""Messages that the stubs on PyPI lack, declared here: the server's config files and grpc.health.v1.

The declarations follow tensorflow_serving's session_bundle_config.proto, monitoring_config.proto and
ssl_config.proto, and grpc's health.proto.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format, wrappers_pb2

from serving.errors import ConfigInvalid

__all__ = [
    "BatchingParameters",
    "HealthCheckRequest",
    "HealthCheckResponse",
    "MonitoringConfig",
    "SSLConfig",
    "read_text",
]

_FIELD = descriptor_pb2.FieldDescriptorProto
# A pool of our own: the default one may get the same names from another package.
_POOL = descriptor_pool.DescriptorPool()


def _file(name: str, package: str, *dependencies: str) -> descriptor_pb2.FileDescriptorProto:
    return descriptor_pb2.FileDescriptorProto(
        name=name, package=package, syntax="proto3", dependency=dependencies
    )


def _wrapped(message: Any, name: str, number: int, type_name: str) -> None:
    message.field.add(
        name=name,
        number=number,
        type=_FIELD.TYPE_MESSAGE,
        label=_FIELD.LABEL_OPTIONAL,
        type_name=f".google.protobuf.{type_name}",
    )


def _plain(message: Any, name: str, number: int, kind: Any) -> None:
    message.field.add(name=name, number=number, type=kind, label=_FIELD.LABEL_OPTIONAL)


def _declare() -> None:
    wrappers = descriptor_pb2.FileDescriptorProto()
    wrappers_pb2.DESCRIPTOR.CopyToProto(wrappers)
    _POOL.Add(wrappers)

    batching = _file("trainyard/batching.proto", "trainyard.batching", wrappers.name)
    parameters = batching.message_type.add(name="BatchingParameters")
    _wrapped(parameters, "max_batch_size", 1, "Int64Value")
    _wrapped(parameters, "batch_timeout_micros", 2, "Int64Value")
    _wrapped(parameters, "max_enqueued_batches", 3, "Int64Value")
    _wrapped(parameters, "num_batch_threads", 4, "Int64Value")
    _wrapped(parameters, "thread_pool_name", 5, "StringValue")
    parameters.field.add(
        name="allowed_batch_sizes", number=6, type=_FIELD.TYPE_INT64, label=_FIELD.LABEL_REPEATED
    )
    parameters.field.add(
        name="pad_variable_length_inputs", number=7, type=_FIELD.TYPE_BOOL, label=_FIELD.LABEL_OPTIONAL
    )
    _wrapped(parameters, "enable_large_batch_splitting", 8, "BoolValue")
    _wrapped(parameters, "max_execution_batch_size", 9, "Int64Value")
    _POOL.Add(batching)

    config = _file("trainyard/config.proto", "trainyard.config")
    prometheus = config.message_type.add(name="PrometheusConfig")
    _plain(prometheus, "enable", 1, _FIELD.TYPE_BOOL)
    _plain(prometheus, "path", 2, _FIELD.TYPE_STRING)
    monitoring = config.message_type.add(name="MonitoringConfig")
    monitoring.field.add(
        name="prometheus_config",
        number=1,
        type=_FIELD.TYPE_MESSAGE,
        label=_FIELD.LABEL_OPTIONAL,
        type_name=".trainyard.config.PrometheusConfig",
    )
    ssl = config.message_type.add(name="SSLConfig")
    for number, name in enumerate(("server_key", "server_cert", "custom_ca"), 1):
        _plain(ssl, name, number, _FIELD.TYPE_STRING)
    _plain(ssl, "client_verify", 4, _FIELD.TYPE_BOOL)
    _POOL.Add(config)

    health = _file("trainyard/health.proto", "grpc.health.v1")
    request = health.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
    response = health.message_type.add(name="HealthCheckResponse")
    states = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        states.value.add(name=name, number=number)
    response.field.add(
        name="status",
        number=1,
        type=_FIELD.TYPE_ENUM,
        label=_FIELD.LABEL_OPTIONAL,
        type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus",
    )
    _POOL.Add(health)


_declare()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def read_text(path: Path, message: Any, what: str) -> Any:
    """Fill a message from a text proto file; raises ConfigInvalid, without quoting the file's content."""
    try:
        return text_format.Parse(path.read_text(), message)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigInvalid(f"{what} {path}: {e}") from e
    except text_format.ParseError as e:
        raise ConfigInvalid(
            f"{what} {path} is no {message.DESCRIPTOR.name} at line {e.GetLine()}, column {e.GetColumn()}"
        ) from None


BatchingParameters = _message("trainyard.batching.BatchingParameters")
MonitoringConfig = _message("trainyard.config.MonitoringConfig")
SSLConfig = _message("trainyard.config.SSLConfig")
HealthCheckRequest = _message("grpc.health.v1.HealthCheckRequest")
HealthCheckResponse = _message("grpc.health.v1.HealthCheckResponse")

"""Runs a version's warm-up requests before it becomes AVAILABLE, so that the first caller finds it warm."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from serving.server.calls import predict_on
from serving.server.flags import Options
from serving.server.inference import classify_on, multi_inference_on, regress_on
from serving.server.servable import Servable
from serving.server.status import Code, Refused
from serving.server.tfrecord import CorruptRecord, read_records
from serving.stubs import prediction_log_pb2

__all__ = ["FILE", "warm_up"]

log = logging.getLogger(__name__)

FILE = "assets.extra/tf_serving_warmup_requests"
_MAX_RECORDS = 1000


def warm_up(servable: Servable, options: Options) -> int:
    """Number of warm-up requests run; raises Refused where one can't be read or run."""
    path = servable.path / FILE
    if not options.warm_up or not path.is_file():
        return 0
    count = 0
    try:
        for data in read_records(path, max_bytes=options.max_message_bytes):
            count += 1
            if count > _MAX_RECORDS:
                raise Refused(
                    Code.INVALID_ARGUMENT,
                    f"Number of warmup records exceeds the maximum of {_MAX_RECORDS} in {path}",
                )
            record = prediction_log_pb2.PredictionLog.FromString(data)
            for _ in range(options.warm_up_iterations):
                _run(servable, record, options)
    except (CorruptRecord, DecodeError, OSError) as e:
        raise Refused(Code.DATA_LOSS, f"warm-up file: {e}") from e
    except Refused as e:
        raise Refused(e.code, f"warm-up request {count} failed: {e.message}") from e
    log.info("%s version %d is warmed up by %d requests", servable.name, servable.version, count)
    return count


def _run(servable: Servable, record: prediction_log_pb2.PredictionLog, options: Options) -> None:
    kind = record.WhichOneof("log_type")
    if kind == "predict_log":
        predict_on(servable, record.predict_log.request, options)
    elif kind == "classify_log":
        classify_on(servable, record.classify_log.request)
    elif kind == "regress_log":
        regress_on(servable, record.regress_log.request)
    elif kind == "multi_inference_log":
        multi_inference_on(servable, record.multi_inference_log.request)
    else:
        raise Refused(Code.UNIMPLEMENTED, f"Unsupported log_type for warmup: {kind}")

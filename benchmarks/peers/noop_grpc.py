"""The ceiling of a gRPC server in Python: PredictionService with the API's messages, that answers a constant.

    noop_grpc.py --answer FILE [--threads 8]

Reads the request's message and writes the answer's, as any server must, and does nothing between. FILE holds a
serialized PredictResponse. Prints its port once it listens.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from serving.stubs import predict_pb2, prediction_service_pb2_grpc


class Constant(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, answer: predict_pb2.PredictResponse) -> None:
        self._answer = answer

    def Predict(self, request, context):  # noqa: N802 - the API's name
        return self._answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    answer = predict_pb2.PredictResponse.FromString(options.answer.read_bytes())
    server = grpc.server(
        ThreadPoolExecutor(options.threads), options=[("grpc.max_receive_message_length", 128 << 20)]
    )
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Constant(answer), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()

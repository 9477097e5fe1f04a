"""A model server process under attack: it must stay alive, answer good requests, and keep its memory."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
from pathlib import Path

import grpc
import numpy as np

from serving.stubs import predict_pb2
from serving.tensors import from_proto, to_proto
from tests.serving.fuzz.attacks import Attack, Grpc, Http, Raw
from tests.serving.server_process import ServerProcess

__all__ = ["Target", "Violation"]

MAX_MESSAGE_BYTES = 4 << 20
_MEMORY_BYTES = 700 << 20  # what the process may grow by, over all attacks
_PATIENCE_S = 60.0  # a guard against hanging, not a measure


class Violation(AssertionError):
    """The server did something that it must not do."""


class Target:
    """A server of the conformance suite's models; use it as a context manager."""

    def __init__(self, models: Path, folder: Path, *flags: str) -> None:
        server = ServerProcess(
            folder,
            f"--model_config_file={models / 'models.config'}",
            "--allow_version_labels_for_unavailable_models",
            f"--max_message_bytes={MAX_MESSAGE_BYTES}",
            "--header_timeout_seconds=2",
            *flags,
            name="fuzz",
        )
        self.process, self.log = server.process, server.log
        self.grpc_port, self.rest_port = server.ports["grpc"], server.ports["rest"]
        self._channel = grpc.insecure_channel(server.grpc)
        good = predict_pb2.PredictRequest(model_spec={"name": "half_plus_two"})
        to_proto(np.float32([2.0]), good.inputs["x"])
        self._good = good.SerializeToString()
        self.check()
        self._resting = self.memory()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def memory(self) -> int:
        """Resident bytes of the process."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise Violation("the process has no memory: it is gone")

    def attack(self, attack: Attack) -> str:
        """Send it; returns the status, raises Violation where it is not one of those allowed, or harm was done."""
        if isinstance(attack, Grpc):
            status = self._grpc(attack)
        elif isinstance(attack, Http):
            status = self._http(attack)
        else:
            status = self._raw(attack)
        if status not in attack.allowed:
            raise Violation(f"{status} is not one of {sorted(attack.allowed)}")
        self.check()
        return status

    def check(self) -> None:
        """The process lives, both ports answer rightly, and the memory is bounded."""
        if self.process.poll() is not None:
            raise Violation(f"the server died with {self.process.returncode}: {self.log.read_text()[-3000:]}")
        call = self._channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        answer = predict_pb2.PredictResponse.FromString(call(self._good, timeout=_PATIENCE_S))
        if from_proto(answer.outputs["y"]).tolist() != [3.0]:
            raise Violation(f"a good request is answered wrongly: {answer}")
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=_PATIENCE_S)
        try:
            connection.request("POST", "/v1/models/half_plus_two:predict", b'{"instances": [2.0]}')
            said = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if said != {"predictions": [3.0]}:
            raise Violation(f"a good REST request is answered wrongly: {said}")
        grown = self.memory() - getattr(self, "_resting", self.memory())
        if grown > _MEMORY_BYTES:
            raise Violation(f"the server has grown by {grown >> 20} MiB")

    def _grpc(self, attack: Grpc) -> str:
        try:
            self._channel.unary_unary(attack.method)(attack.message, timeout=_PATIENCE_S)
        except grpc.RpcError as e:
            details = e.details() or ""
            if "server's log" in details:
                raise Violation(f"a fault of the server's own: {self.log.read_text()[-3000:]}") from e
            return e.code().name
        return "OK"

    def _http(self, attack: Http) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=_PATIENCE_S)
        try:
            connection.putrequest(attack.method, attack.path, skip_accept_encoding=True)
            for name, value in attack.headers:
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(attack.body)))
            connection.endheaders(attack.body)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        document = json.loads(body)
        if answer.status != 200 and not isinstance(document.get("error"), str):
            raise Violation(f"no error in the body of {answer.status}: {body[:200]!r}")
        return str(answer.status)

    def _raw(self, attack: Raw) -> str:
        port = self.rest_port if attack.http else self.grpc_port
        answer = b""
        with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as connection:
            try:
                connection.sendall(attack.data)
                connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(65536):
                    answer += chunk
            except TimeoutError as e:
                raise Violation("the connection is left hanging") from e
            except OSError:
                pass  # cut off, which is an answer as well
        if answer.startswith(b"HTTP/1.1 100 "):  # told to go on, which is no answer yet
            answer = answer.partition(b"\r\n\r\n")[2]
        if not attack.http or not answer:
            return "closed"
        return (
            answer.split(b" ", 2)[1].decode("ascii", "replace") if answer.startswith(b"HTTP/") else "garbage"
        )

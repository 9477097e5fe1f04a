"""One model server process, from its ports to its end."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from serving.errors import ConfigInvalid
from serving.files import write_atomic
from serving.server.auth import TokenInterceptor, check_exposure, tokens_of
from serving.server.calls import Calls
from serving.server.flags import Options
from serving.server.grpc_api import Health, build_server
from serving.server.manager import ModelManager
from serving.server.metrics import Metrics
from serving.server.request_log import RequestLog
from serving.server.rest import RestApp, RestServer
from serving.server.runtime import load_runtime
from serving.server.servable import Servable
from serving.server.tls import Tls
from serving.server.warmup import warm_up
from serving.stubs import model_server_config_pb2
from serving.tfserving.config import read_config

__all__ = ["ModelServer"]

log = logging.getLogger(__name__)


class ModelServer:
    """A model server in this process.

    `start` opens the ports (health says NOT_SERVING, calls UNAVAILABLE) and loads TensorFlow and the models
    behind them; `wait_ready` returns when they serve; `stop` drains. Raises ConfigInvalid where the config
    file is wrong or a port is taken.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._tls = Tls(options.ssl_config_file) if options.ssl_config_file else None
        tokens = tokens_of(options.api_token_file, options.api_token_exempt, options.admin_token_file)
        check_exposure(
            options.host,
            tls=self._tls is not None,
            authenticated=tokens is not None or (self._tls is not None and self._tls.client_verify),
            insecure=options.allow_insecure_host,
        )
        self.metrics = Metrics()
        self.health = Health()
        self.manager = ModelManager(options, self.metrics, self._load)
        self.calls = Calls(self.manager, options, self.metrics)
        self.manager.configure(_first_config(options))
        if options.request_log is not None:
            self.calls.request_log = RequestLog(options.request_log, self.metrics, self.manager.logging_rate)
        self._grpc, self.port = build_server(
            self.calls,
            self.health,
            options.host,
            options.port,
            [TokenInterceptor(tokens)] if tokens else [],
            self._tls.grpc_credentials() if self._tls else None,
        )
        self._rest: RestServer | None = None
        if options.rest_api_port is not None:
            try:
                self._rest = RestServer(RestApp(self.calls, tokens), options, self._tls)
            except OSError as e:
                self._grpc.stop(None)
                raise ConfigInvalid(
                    f"HTTP port {options.host}:{options.rest_api_port} can't be opened: {e.strerror or e}",
                    hint="is another server running? --rest_api_port 0 takes a free port",
                ) from e
        self._background = threading.Thread(target=self._load_models, name="start", daemon=True)
        self._started_at = time.monotonic()
        self._up = threading.Event()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None

    @property
    def rest_port(self) -> int | None:
        return self._rest.port if self._rest else None

    def start(self) -> None:
        """Open the ports, and load in the background."""
        self._grpc.start()
        if self._rest:
            self._rest.start()
        log.info(
            "running model server at %s:%d, rest api at port %s", self.options.host, self.port, self.rest_port
        )
        self._background.start()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """True once the models are served; raises what kept TensorFlow from loading."""
        up = self._up.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return up and self.health.serving

    def _load_models(self) -> None:
        try:
            load_runtime()
            self.manager.start()
        except BaseException as e:  # noqa: BLE001  # raised again by wait_ready, and ends run()
            self._failure = e
            self._stopped.set()
            self._up.set()
            return
        self.health.serving = not self._stopped.is_set()
        log.info("serving after %.2f s", time.monotonic() - self._started_at)
        if self.options.ready_file and self.health.serving:
            ready = {"grpc": self.port, "rest": self.rest_port, "pid": os.getpid()}
            write_atomic(self.options.ready_file, json.dumps(ready).encode())
        self._up.set()

    def _load(self, name: str, version: int, path: Path) -> Servable:
        servable = Servable(name, version, path, load_runtime(), self.options)
        try:
            warm_up(servable, self.options)
        except BaseException:
            servable.close(time.monotonic())
            raise
        servable.enable_batching(self.options)
        return servable

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain; returns the exit code. A second signal ends it at once."""

        def leave(number: int, frame: Any) -> None:
            if self._stopped.is_set():
                os._exit(128 + number)
            self._stopped.set()

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
        self.start()
        self._stopped.wait()
        if self._failure is not None:
            log.error("can't serve", exc_info=self._failure)
            self.stop()
            return 1
        log.info("draining, at most %.0f s", self.options.drain_s)
        self.stop()
        log.info("stopped")
        return 0

    def stop(self) -> None:
        """Refuse new requests, answer those in flight within the drain time, free the models."""
        self._stopped.set()
        self.health.serving = False
        if self.options.ready_file:
            with suppress(FileNotFoundError):
                self.options.ready_file.unlink()
        finished = self._grpc.stop(self.options.drain_s)
        if self._rest:
            self._rest.stop()
        finished.wait()
        if self.calls.request_log is not None:
            self.calls.request_log.close()
        if self._tls is not None:
            self._tls.close()
        self.manager.stop()


def _first_config(options: Options) -> Any:
    if options.model_config_file is not None:
        return read_config(options.model_config_file)
    config = model_server_config_pb2.ModelServerConfig()
    config.model_config_list.config.add(
        name=options.model_name, base_path=options.model_base_path, model_platform="tensorflow"
    )
    return config

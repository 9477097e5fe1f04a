"""One loaded version of a model: a session, its signatures, and how many callers use it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serving import tensors
from serving.server.batching import Batcher
from serving.server.flags import Options
from serving.server.runtime import Runtime
from serving.server.status import Code, Refused

__all__ = ["DEFAULT_SIGNATURE", "Servable", "Signature"]

log = logging.getLogger(__name__)

DEFAULT_SIGNATURE = "serving_default"
_INIT_OP = "__saved_model_init_op"


class Signature:
    """A signature's inputs and outputs, checked before TensorFlow sees a request.

    `run` takes arrays by input name and gives arrays by output name; raises Refused. `unchecked` names
    inputs that may have other shapes than the signature says.
    """

    def __init__(
        self,
        name: str,
        definition: Any,
        runner: Callable[..., list[Any]],
        op_error: type[Exception],
        unchecked: Collection[str] = (),
    ) -> None:
        self.name = name
        self.definition = definition
        self.inputs: dict[str, Any] = dict(definition.inputs)
        self.outputs = tuple(sorted(definition.outputs))
        self.feeds = tuple(sorted(self.inputs))
        self._runner = runner
        self._op_error = op_error
        self._shapes = {
            key: None
            if info.tensor_shape.unknown_rank or key in unchecked
            else tuple(dim.size for dim in info.tensor_shape.dim)
            for key, info in self.inputs.items()
        }

    def batched(self, batcher: Batcher) -> None:
        """Send all further runs through a batcher."""
        self._runner = batcher

    @property
    def batchable(self) -> bool:
        """All inputs and outputs have a free first dimension."""
        infos = (*self.inputs.values(), *self.definition.outputs.values())
        return bool(self.inputs) and all(
            i.tensor_shape.dim and i.tensor_shape.dim[0].size == -1 for i in infos
        )

    def run(self, given: Mapping[str, np.ndarray]) -> dict[str, Any]:
        arrays = [self._checked(key, given[key]) for key in self.feeds]
        try:
            results = self._runner(*arrays)
        except self._op_error as e:
            raise Refused(_code(e), str(getattr(e, "message", e))) from e
        except (TypeError, ValueError) as e:
            raise Refused(Code.INVALID_ARGUMENT, f"the inputs can't be fed to the model: {e}") from e
        return dict(zip(self.outputs, results, strict=True))

    def _checked(self, key: str, array: np.ndarray) -> np.ndarray:
        info, dims = self.inputs[key], self._shapes[key]
        sent = tensors.datatype_of(array.dtype)
        if sent != info.dtype:
            wanted, got = tensors.dtype_name(info.dtype), tensors.dtype_name(sent)
            raise Refused(Code.INVALID_ARGUMENT, f"Expects input {key} to be {wanted} but {got} is provided")
        if dims is not None and (
            len(dims) != array.ndim or any(d not in (-1, n) for d, n in zip(dims, array.shape, strict=True))
        ):
            wanted = ",".join("?" if d == -1 else str(d) for d in dims)
            got = ",".join(map(str, array.shape))
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"input {key}: shape [{got}] is not compatible with expected shape [{wanted}]",
            )
        return array


def _code(error: Exception) -> Code:
    try:
        return Code(getattr(error, "error_code", Code.INTERNAL)) or Code.INTERNAL
    except ValueError:
        return Code.INTERNAL


class Servable:
    """A SavedModel in memory.

    Callers hold it by `acquire` and `release`; `close` waits for the last of them, so that requests in
    flight keep the version they began with. Loading raises whatever TensorFlow raises.
    """

    def __init__(self, name: str, version: int, path: Path, runtime: Runtime, options: Options) -> None:
        self.name = name
        self.version = version
        self.path = path
        self._users = 0
        self._closing = False
        self._idle = threading.Condition()
        self._batchers: list[Batcher] = []
        config = runtime.config_pb2.ConfigProto(
            intra_op_parallelism_threads=options.intra_op_threads,
            inter_op_parallelism_threads=options.inter_op_threads,
        )
        graph = runtime.graph()
        with graph.as_default():
            self._session = runtime.session(graph=graph, config=config)
            try:
                meta_graph = runtime.loader(str(path)).load(self._session, ["serve"])
                self.signatures = {
                    key: self._signature(key, definition, runtime)
                    for key, definition in meta_graph.signature_def.items()
                    if key != _INIT_OP
                }
            except BaseException:
                self._session.close()
                raise

    def _signature(self, key: str, definition: Any, runtime: Runtime) -> Signature:
        infos = [*definition.inputs.values(), *definition.outputs.values()]
        if any(info.WhichOneof("encoding") != "name" for info in infos):

            def refuse(*arrays: Any) -> list[Any]:
                raise Refused(Code.UNIMPLEMENTED, f'Signature "{key}" has sparse or composite tensors')

            return Signature(key, definition, refuse, runtime.op_error)
        feeds = [definition.inputs[alias].name for alias in sorted(definition.inputs)]
        aliases = [definition.outputs[alias].name for alias in sorted(definition.outputs)]
        fetches = sorted(set(aliases))
        runner = self._runner(feeds, fetches, runtime)
        # An older model's signature may feed a tensor in the middle of its graph, whose static shape is no
        # contract: half_plus_two's documented example sends [1.0, 2.0, 5.0] where the shape says [?, 1].
        unchecked = {
            alias for alias, info in definition.inputs.items() if not self._is_placeholder(info.name)
        }
        if fetches == aliases:
            return Signature(key, definition, runner, runtime.op_error, unchecked)
        places = [fetches.index(tensor) for tensor in aliases]

        def ordered(*arrays: Any) -> list[Any]:
            results = runner(*arrays)
            return [results[place] for place in places]

        return Signature(key, definition, ordered, runtime.op_error, unchecked)

    def _is_placeholder(self, tensor: str) -> bool:
        operation = self._session.graph.get_tensor_by_name(tensor).op
        return operation.type in ("Placeholder", "PlaceholderWithDefault")

    def _runner(self, feeds: list[str], fetches: list[str], runtime: Runtime) -> Callable[..., list[Any]]:
        """A callable of the session that runs in the caller's thread: half the cost of Session.run."""
        make = getattr(self._session, "_make_callable_from_options", None)
        if make is None:  # not a public name: TensorFlow may take it away
            log.warning("this tensorflow has no callable from options, requests cost more")
        if make is None or set(feeds) & set(fetches):  # callables refuse to answer what they are fed
            return lambda *arrays: self._session.run(fetches, dict(zip(feeds, arrays, strict=True)))
        options = runtime.config_pb2.CallableOptions(feed=feeds, fetch=fetches)
        options.run_options.inter_op_thread_pool = -1
        return make(options)

    def enable_batching(self, options: Options) -> None:
        """Batch the signatures that allow it; called after warm-up, which runs alone."""
        if options.batching is None:
            return
        for signature in self.signatures.values():
            if signature.batchable:
                batcher = Batcher(signature._runner, options.batching, name=f"{self.name}-{self.version}")
                self._batchers.append(batcher)
                signature.batched(batcher)

    def signature(self, name: str) -> Signature:
        """The signature of this name, or the default one; raises Refused where there is none."""
        key = name or DEFAULT_SIGNATURE
        found = self.signatures.get(key)
        if found is None:
            raise Refused(Code.FAILED_PRECONDITION, f'Serving signature key "{key}" not found.')
        return found

    def acquire(self) -> bool:
        """Count a caller in; False once the servable is closing."""
        with self._idle:
            if self._closing:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """Count a caller out."""
        with self._idle:
            self._users -= 1
            if self._closing and not self._users:
                self._idle.notify_all()

    def close(self, deadline: float, clock: Callable[[], float] = time.monotonic) -> bool:
        """Refuse new callers, wait for those inside until the deadline, free the memory.

        Returns False, and leaves the session to the callers still inside, when the deadline passes first.
        """
        with self._idle:
            self._closing = True
            if not self._idle.wait_for(lambda: self._users == 0, max(0.0, deadline - clock())):
                return False
        for batcher in self._batchers:
            batcher.stop()
        self._session.close()
        return True

"""Whose fault an exception in the trainer process is, and the lines of the traceback that are the user's own."""

from __future__ import annotations

import dataclasses
import errno
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from trainers.job.errors import TrainyardError
from trainers.job.failures import Failure, FailureClass, exit_code_of
from trainers.job.termination import failure_of

__all__ = ["blame", "user_traceback"]

# Status codes of TensorFlow's OpError (absl::StatusCode) that mean one thing whoever raised them.
_CLASS_OF_STATUS = {
    1: FailureClass.PEER_LOST,  # CANCELLED: a step was cancelled because another part of it failed
    4: FailureClass.PEER_LOST,  # DEADLINE_EXCEEDED: a peer did not answer
    8: FailureClass.OOM,  # RESOURCE_EXHAUSTED
    10: FailureClass.PEER_LOST,  # ABORTED: a peer restarted, or the collective broke off
    14: FailureClass.PEER_LOST,  # UNAVAILABLE: the connection broke
    15: FailureClass.DATA,  # DATA_LOSS: a truncated or corrupt record
}
# A server that was restarted knows nothing of the chief's context and answers with other codes, but these words.
_PEER_WORDS = (
    "context_id",
    "GRPC",
    "Socket closed",
    "Connection reset",
    "Connection refused",
    "failed to connect",
    "eager service",
    "Coordination service",
    "incarnation",
)
_DEVICE = re.compile(r"/job:(chief|worker|ps)/(?:replica:\d+/)?task:(\d+)/")
# Frames of these say nothing to a user.
_OTHERS = (
    "/site-packages/",
    "/dist-packages/",
    "/trainers/runtime/",
    "/trainers/records/",
    "__autograph_generated_file",
    "<frozen ",
    "/runpy.py",
)


def blame(error: BaseException, *, role: str = "", index: int | None = None) -> Failure:
    """The failure that an exception of the training code means."""
    # The coordinator wraps what a worker's dataset function raised.
    original = getattr(error, "original_exception", None)
    if isinstance(original, BaseException):
        error = original
    failure = failure_of(error, role=role, index=index)
    if isinstance(error, TrainyardError):
        return failure
    cls = _tensorflow_class(error) or failure.failure_class
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        cls = FailureClass.OOM
    whose = _DEVICE.search(str(error)) if cls is FailureClass.OOM else None
    if whose is not None:
        # TensorFlow names the device that could not allocate, which is of another replica than the one it tells.
        failure = dataclasses.replace(failure, role=whose[1], index=int(whose[2]))
    return dataclasses.replace(
        failure,
        failure_class=cls,
        reason=_reason(error),
        detail=user_traceback(error),
        exit_code=exit_code_of(cls),
    )


def _tensorflow_class(error: BaseException) -> FailureClass | None:
    status = getattr(error, "error_code", None)
    if not isinstance(status, int) or type(error).__module__.partition(".")[0] != "tensorflow":
        return None
    message = str(error)
    if status == 8 and "No space left" in message:
        return FailureClass.INFRA
    if "Could not start gRPC server" in message:
        return FailureClass.INFRA  # its port is taken, by the process before it or by somebody else
    if status in _CLASS_OF_STATUS:
        return _CLASS_OF_STATUS[status]
    if any(word in message for word in _PEER_WORDS):
        return FailureClass.PEER_LOST
    return None


def _reason(error: BaseException) -> str:
    """One sentence: autograph puts the user's lines first and what went wrong last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "in user code:" in lines and not lines[-1].startswith("File "):
        return lines[-1][:500]
    if lines and lines[0].startswith("Graph execution error"):
        # Where the graph was made comes first, then what went wrong, then the node.
        before_node = [line for line in lines if not line.startswith(("[[", "File ", "Detected at"))]
        return f"{type(error).__name__}: {before_node[-1]}"[:500]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")[:500]


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's own frames on; all of it when none is the user's.

    What autograph raises carries the user's lines in its message, so that it needs no frames at all.
    """
    summary = traceback.TracebackException.from_exception(error)
    chain = _chain(summary)
    own = [_own(part.stack) for part in chain]
    if any(own) or "in user code:" in str(error):
        for part, frames in zip(chain, own, strict=True):
            part.stack = traceback.StackSummary.from_list(frames)
    return "".join(summary.format())


def _chain(summary: traceback.TracebackException) -> list[traceback.TracebackException]:
    """An exception and those that it came from."""
    chain = []
    current: traceback.TracebackException | None = summary
    while current is not None and len(chain) < 10:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _own(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [f for f in stack if not any(other in Path(f.filename).as_posix() for other in _OTHERS)]

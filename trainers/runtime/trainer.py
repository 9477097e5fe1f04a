"""The trainer process of a replica: a passive server, or the strategy with our loop.

Started by the launcher, with the job's folder, role and index in the environment, TF_CONFIG, and where to say how
it ended (the termination message). It ends by `os._exit`: TensorFlow's destructors may wait for dead peers.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import Any

from trainers.job import labels, termination
from trainers.job.failures import exit_code_of
from trainers.job.plan import Plan, ReplicaPlan
from trainers.job.record import JobRecord
from trainers.job.spec import RoleKind
from trainers.runtime.process import ENV_LAUNCHER_PID, die_with_launcher
from trainers.runtime.replica import ENV_ATTEMPT
from trainers.runtime.standby import leave_standby
from trainers.runtime.strategies import drives_steps, thread_counts
from trainers.runtime.watch import stack_file

__all__ = ["main"]

log = logging.getLogger("trainyard")


def main() -> int:
    """Run the replica that the environment names; the exit code."""
    if ENV_LAUNCHER_PID in os.environ and os.getppid() == int(os.environ[ENV_LAUNCHER_PID]):
        die_with_launcher(int(os.environ[ENV_LAUNCHER_PID]))
    # Ours in full; of others, TensorFlow above all, warnings only.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    for name in ("trainyard", "trainers"):
        logging.getLogger(name).setLevel(logging.INFO)
    faulthandler.enable(file=sys.stderr)  # where Python was, should native code crash
    role, index = RoleKind(os.environ[labels.ENV_ROLE]), int(os.environ[labels.ENV_INDEX])
    try:
        record = JobRecord.open(os.environ[labels.ENV_JOB])
        plan = record.plan()
        me = plan.replica(role, index)
        attempt = int(os.environ.get(ENV_ATTEMPT, "1"))
        leave_standby(lambda: _import_for(plan, role))
        with stack_file(record, me.replica, attempt).open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            try:
                _be(record, plan, me)
            finally:
                faulthandler.unregister(signal.SIGUSR1)
    except BaseException as e:  # noqa: BLE001 - the one place where everything becomes a class
        from trainers.runtime.blame import blame

        failure = blame(e, role=role.value, index=index)
        termination.write_failure(failure)
        return exit_code_of(failure.failure_class)
    return 0


def _import_for(plan: Plan, role: RoleKind) -> None:
    """What a restart shall not have to import again."""
    from trainers.runtime.lean import import_server, import_tensorflow

    if drives_steps(plan.job, role):
        import_tensorflow()
        from trainers.runtime import run  # noqa: F401
    else:
        import_server()


def _be(record: JobRecord, plan: Plan, me: ReplicaPlan) -> None:
    if me.role is RoleKind.EVALUATOR:
        from trainers.runtime.evaluator import follow

        follow(record, plan, me)
        return
    if not drives_steps(plan.job, me.role):
        serve(me)
        return
    from trainers.runtime.run import train

    train(record, plan, me)


def serve(me: ReplicaPlan) -> None:
    """Be a parameter server or worker until the launcher ends this process; never returns.

    The server knows only itself; the chief sends the whole cluster when it connects, and again when it comes
    back. So neither needs a restart when the other was restarted.
    """
    from trainers.job.ports import wait_until_free
    from trainers.runtime.lean import import_server
    from trainers.runtime.loopback import bind_loopback_only, check_listeners

    server_lib = import_server()
    wait_until_free(me.address)
    bind_loopback_only(me.address)
    role = me.role.value
    spec = server_lib.ClusterSpec({role: {me.index: me.address}})
    server = server_lib.Server(
        spec, job_name=role, task_index=me.index, protocol="grpc", config=_server_config(me), start=False
    )
    check_listeners(me.address)
    server.start()
    log.info("%s serves at %s", me.replica, me.address)
    server.join()


def _server_config(me: ReplicaPlan) -> Any:
    from tensorflow.core.protobuf import config_pb2

    intra, inter = thread_counts(me)
    # A function that runs here for the chief holds a thread until it ends, as those of synchronous training do with
    # their job; calls of the chief beside it need others.
    inter = max(4, inter)
    return config_pb2.ConfigProto(intra_op_parallelism_threads=intra, inter_op_parallelism_threads=inter)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

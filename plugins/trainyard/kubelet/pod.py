"""The life of one pod, on a thread of its own: volumes, init containers, containers, restarts, the end.

The thread sleeps on its inbox until a process ends, somebody wants the pod to stop, or a time comes.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainers.job.labels import ENV_TERMINATION_LOG
from trainyard.kubelet.clock import timestamp
from trainyard.kubelet.container import ContainerRun, StartError
from trainyard.kubelet.environment import ConfigError, command_line, container_env
from trainyard.kubelet.errors import ApiError
from trainyard.kubelet.logs import LogFile
from trainyard.kubelet.machine import Machine
from trainyard.kubelet.resources import PODS
from trainyard.kubelet.scheduler import GPU
from trainyard.kubelet.status import POD_IP, ContainerState, phase_of, pod_conditions, set_condition
from trainyard.kubelet.volumes import MountError

__all__ = ["Ending", "PodWorker"]

log = logging.getLogger(__name__)

_RETRY = (
    1.0,
    10.0,
)  # seconds between tries for a volume or reference that is missing: the first and the longest
_HEALTHY_AFTER = 600.0  # a container that ran this long starts again with the shortest back-off


@dataclasses.dataclass(frozen=True)
class Ending:
    """Somebody wants the pod to stop within `grace` seconds; with a `reason`, it has failed for it."""

    grace: float
    reason: str = ""
    message: str = ""


@dataclasses.dataclass(frozen=True)
class _Exited:
    run: ContainerRun
    code: int


class _Stop(Exception):
    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending


class PodWorker:
    """Runs one scheduled pod. `finished(worker)` is called on its thread when nothing of the pod runs any more."""

    def __init__(
        self, pod: Mapping[str, Any], machine: Machine, finished: Callable[[PodWorker], None]
    ) -> None:
        meta, spec = pod["metadata"], pod["spec"]
        self.uid: str = meta["uid"]
        self.namespace: str = meta["namespace"]
        self.name: str = meta["name"]
        self._pod = pod
        self._machine = machine
        self._finished = finished
        self._inbox: queue.SimpleQueue[Ending | _Exited] = queue.SimpleQueue()
        self._folder = machine.pod_folder(self.uid)
        creating = "PodInitializing" if spec.get("initContainers") else "ContainerCreating"
        self._inits = [
            ContainerState(row, {"waiting": {"reason": "PodInitializing"}})
            for row in spec.get("initContainers") or ()
        ]
        self._mains = [ContainerState(row, {"waiting": {"reason": creating}}) for row in spec["containers"]]
        self._runs: dict[str, ContainerRun] = {}
        self._ended: list[ContainerRun] = []  # whose followers wait for the next status
        self._due: dict[str, float] = {}  # monotonic time of the next start of a waiting container
        self._delays: dict[str, float] = {}
        self._volumes: dict[str, Any] = {}
        self._gpus: list[int] = []
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"pod-{self.name}", daemon=True)

    def start(self, pod: Mapping[str, Any], gpus: Sequence[int]) -> None:
        """Begin; `pod` is the object as it was scheduled."""
        self._pod = pod
        self._gpus = list(gpus)
        seconds = pod["spec"].get("activeDeadlineSeconds")
        if seconds:
            self._deadline = time.monotonic() + seconds
        self._thread.start()

    def stop(self, ending: Ending) -> None:
        """Have it end; a later call may shorten the grace period."""
        self._inbox.put(ending)

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def live_log(self, container: str, attempt: int) -> LogFile | None:
        """The log of a run that may still grow."""
        run = self._runs.get(container)
        return run.log if run is not None and run.attempt == attempt else None

    def _run(self) -> None:
        ending = Ending(0, "KubeletError", "the process kubelet failed while it ran this pod; see its log")
        try:
            self._publish()
            self._mount()
            policy = self._pod["spec"]["restartPolicy"]
            for state in self._inits:
                self._drive([state], again=lambda code: policy != "Never" and code != 0, init=True)
                if state.exit_code != 0:
                    break
            else:
                self._drive(
                    self._mains,
                    again=lambda code: policy == "Always" or (policy == "OnFailure" and code != 0),
                )
            ending = Ending(0)
        except _Stop as e:
            ending = e.ending
        except OSError as e:  # the disk is full, most likely: the pod can't go on, the others can
            log.error("pod %s/%s ends: %s", self.namespace, self.name, e)
            ending = Ending(0, "UnexpectedAdmissionError", f"the process kubelet could not go on: {e}")
        finally:
            try:
                self._terminate(ending)
            finally:
                self._finished(self)

    def _next(self, until: float | None = None) -> _Exited | None:
        """The next end of a process, or None once the monotonic time `until` has come."""
        limits = [t for t in (until, self._deadline) if t is not None]
        try:
            message = self._inbox.get(timeout=max(0.0, min(limits) - time.monotonic()) if limits else None)
        except queue.Empty:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                text = "Pod was active on the node longer than the specified deadline"
                self._machine.events.normal(self._pod, "DeadlineExceeded", text)
                raise _Stop(Ending(self._grace, "DeadlineExceeded", text)) from None
            return None
        if isinstance(message, Ending):
            raise _Stop(message)
        return message

    @property
    def _grace(self) -> float:
        return float(self._pod["spec"]["terminationGracePeriodSeconds"])

    def _mount(self) -> None:
        delay = _RETRY[0]
        while True:
            try:
                self._volumes = self._machine.volumes.prepare(self._pod, self._folder / "volumes")
                return
            except (MountError, OSError) as e:
                self._machine.events.warning(self._pod, "FailedMount", str(e))
                self._next(time.monotonic() + delay)
                delay = min(delay * 2, _RETRY[1])

    def _drive(
        self, states: list[ContainerState], again: Callable[[int], bool], *, init: bool = False
    ) -> None:
        """Run these containers until all have ended for good."""
        self._due.update(dict.fromkeys((state.name for state in states), time.monotonic()))
        while True:
            for state in states:
                if self._due.get(state.name, float("inf")) <= time.monotonic():
                    del self._due[state.name]
                    self._launch(state, init=init)
                    if state.exit_code is not None and again(state.exit_code):  # it could not be started
                        self._back_off(state)
            self._publish()
            if all(state.exit_code is not None and state.name not in self._due for state in states):
                return
            exited = self._next(min(self._due.values(), default=None))
            if exited is not None:
                state = self._collect(exited)
                if again(state.exit_code or 0):
                    self._back_off(state)

    def _launch(self, state: ContainerState, *, init: bool) -> None:
        events, where = self._machine.events, {"init" if init else "container": state.name}
        try:
            env = container_env(self._pod, state.spec, self._machine.store, self._machine.node.capacity)
        except ConfigError as e:
            state.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(e)}}
            events.warning(self._pod, "Failed", f"Error: {e}", **where)
            self._wait_for(state, f"config/{state.name}", _RETRY)
            return
        if state.name in self._runs:
            state.last = state.state if "terminated" in state.state else state.last
            state.restarts += 1
        folder = self._folder / "containers" / state.name
        run = ContainerRun(
            self._machine, folder, state.spec, f"{self.uid}/{state.name}", state.restarts, self._note_exit
        )
        self._runs[state.name] = run
        state.container_id = f"process://{self.uid}/{state.name}/{state.restarts}"
        events.normal(
            self._pod,
            "Pulled",
            f'Image "{state.spec["image"]}" is not pulled: the process kubelet runs the command on this machine',
            **where,
        )
        events.normal(self._pod, "Created", f"Created container: {state.name}", **where)
        try:
            run.start(*self._command(state, env, run))
        except StartError as e:
            state.state = {"terminated": _never_ran(str(e))}
            self._ended.append(run)
            events.warning(self._pod, "Failed", f"Error: {e}", **where)
            return
        state.state = {"running": {"startedAt": timestamp(run.started)}}
        events.normal(self._pod, "Started", f"Started container {state.name}", **where)

    def _command(
        self, state: ContainerState, env: Mapping[str, str], run: ContainerRun
    ) -> tuple[list[str], dict[str, str], str]:
        """Command, environment and working directory, mount paths replaced by real folders."""
        spec = state.spec
        mounts = self._machine.volumes.mounts(
            spec, self._volumes, [(spec["terminationMessagePath"], str(run.message_path))]
        )
        host = self._pod["spec"].get("hostname") or self.name
        full = {**self._machine.base_env, "HOSTNAME": host, **self._gpu_env(spec)}
        full.update({key: mounts.resolve(value) for key, value in env.items()})
        full[ENV_TERMINATION_LOG] = str(run.message_path)
        argv = [mounts.resolve(part) for part in command_line(spec, env)]
        return argv, full, mounts.resolve(spec.get("workingDir") or self._machine.workdir)

    def _gpu_env(self, spec: Mapping[str, Any]) -> dict[str, str]:
        """The devices of one container; none where the node has GPUs and the container asked for none."""
        if not self._machine.node.gpus:
            return {}
        count = int((spec["resources"].get("limits") or {}).get(GPU, 0))
        mine, self._gpus = self._gpus[:count], self._gpus[count:] + self._gpus[:count]
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}

    def _note_exit(self, run: ContainerRun, code: int) -> None:
        self._inbox.put(_Exited(run, code))

    def _collect(self, exited: _Exited) -> ContainerState:
        state = next(s for s in (*self._inits, *self._mains) if self._runs.get(s.name) is exited.run)
        state.state = {"terminated": exited.run.collect(exited.code)}
        self._ended.append(exited.run)
        if note := exited.run.memory_note:
            self._machine.events.warning(
                self._pod, "OOMKilled", f"Container {state.name} {note}", container=state.name
            )
        return state

    def _back_off(self, state: ContainerState) -> None:
        """Arrange a restart: the first at once, later ones after a doubling wait."""
        run = self._runs[state.name]
        if time.time() - run.started > _HEALTHY_AFTER:
            self._delays.pop(state.name, None)
        if state.name not in self._delays:
            self._delays[state.name] = self._machine.backoff[0]
            self._due[state.name] = time.monotonic()
            return
        delay = self._wait_for(state, state.name, self._machine.backoff)
        where = f"restarting failed container={state.name} pod={self.name}_{self.namespace}({self.uid})"
        state.last = state.state
        state.state = {"waiting": {"reason": "CrashLoopBackOff", "message": f"back-off {delay:g}s {where}"}}
        self._machine.events.warning(
            self._pod,
            "BackOff",
            f"Back-off restarting failed container {state.name} in pod {self.name}_{self.namespace}({self.uid})",
            container=state.name,
        )

    def _wait_for(self, state: ContainerState, key: str, limits: tuple[float, float]) -> float:
        delay = self._delays.get(key, limits[0])
        self._delays[key] = min(delay * 2, limits[1])
        self._due[state.name] = time.monotonic() + delay
        return delay

    def _terminate(self, ending: Ending) -> None:
        """End what runs, within the grace period, and say how it went."""
        states = {state.name: state for state in (*self._inits, *self._mains) if state.running}
        for name in states:
            self._machine.events.normal(self._pod, "Killing", f"Stopping container {name}", container=name)
            if ending.grace > 0:
                self._runs[name].terminate()
        until = time.monotonic() + ending.grace
        killed = False
        while any(state.running for state in states.values()):
            try:
                message = self._inbox.get(timeout=None if killed else max(0.0, until - time.monotonic()))
            except queue.Empty:
                killed = True
                for name, state in states.items():
                    if state.running:
                        self._runs[name].kill()
                continue
            if isinstance(message, Ending):
                until = min(until, time.monotonic() + message.grace)
            else:
                self._collect(message)
                if any(state.running for state in states.values()):
                    self._publish()
        # Phase and reason in one change: who waits for the phase wants to read the reason.
        self._publish(ending, over=True)

    def _publish(self, ending: Ending | None = None, *, over: bool = False) -> None:
        policy = self._pod["spec"]["restartPolicy"]
        phase = phase_of(self._inits, self._mains, policy)
        if over and phase not in ("Succeeded", "Failed"):
            codes = [state.exit_code for state in self._mains]
            phase = "Failed" if any(code != 0 for code in codes) else "Succeeded"
        if ending is not None and ending.reason:
            phase = "Failed"

        def change(pod: dict[str, Any]) -> None:
            status = pod["status"]
            status["phase"] = phase
            status.setdefault("startTime", timestamp())
            status.update(hostIP=POD_IP, hostIPs=[{"ip": POD_IP}], podIP=POD_IP, podIPs=[{"ip": POD_IP}])
            for kind, ok, reason, message in pod_conditions(self._inits, self._mains, phase):
                set_condition(status, kind, ok, reason, message)
            status["containerStatuses"] = [state.status() for state in self._mains]
            if self._inits:
                status["initContainerStatuses"] = [state.status(init=True) for state in self._inits]
            if ending is not None and ending.reason:
                status["reason"], status["message"] = ending.reason, ending.message

        try:
            self._pod = self._machine.store.update(PODS, self.namespace, self.name, change, uid=self.uid)
        except ApiError as e:
            # Deleted by force: the object is gone before its processes are.
            log.debug("pod %s/%s is not shown any more: %s", self.namespace, self.name, e)
        while self._ended:
            self._ended.pop().log.settle()


def _never_ran(message: str) -> dict[str, Any]:
    now = timestamp()
    return {
        "exitCode": 128,
        "reason": "StartError",
        "message": message,
        "startedAt": timestamp(0),
        "finishedAt": now,
    }

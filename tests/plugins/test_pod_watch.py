"""The watch that triggers share, and the log of a pod, against a process kubelet behind a door that can be shut."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from airflow.triggers.base import TaskSuccessEvent
from trainyard.kubelet.testing import pod_manifest
from trainyard.triggers.cluster_api import Cluster
from trainyard.triggers.group_log import GroupLog
from trainyard.triggers.pod import PodTrigger
from trainyard.triggers.pod_log import Place, PodLog, earlier_place, earlier_places

from trainers.job import labels
from trainers.job.replica_log import ReplicaLog

NAMESPACE = "watched"
OURS = {labels.LABEL_MANAGED_BY: labels.MANAGED_BY}


class Door:
    """A way to the kubelet that can be shut: connections break, new ones are refused."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.behind = str(parts.hostname), int(parts.port or 80)
        self.port = 0
        self.requests: list[str] = []
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Let clients through."""
        self._server = await asyncio.start_server(self._through, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def shut(self) -> None:
        """Break what is open and refuse what comes."""
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self.host, self.behind)
        self._open |= {writer, back}
        await asyncio.gather(
            self._pump(reader, back, note=True), self._pump(there, writer), return_exceptions=True
        )
        writer.close()
        back.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, note: bool = False
    ) -> None:
        while data := await reader.read(65536):
            if note:
                # The kubelet answers those who call it by its own name only.
                data = data.replace(f":{self.port}".encode(), f":{self.behind}".encode(), 1)
                self.requests += [
                    row.split(b"?")[0].decode() for row in data.split(b"\r\n") if b" HTTP/1.1" in row
                ]
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def behind_a_door(cluster: Any, tmp_path: Path) -> AsyncIterator[tuple[Door, dict[str, Any]]]:
    """The door, and a trigger's `cluster` that leads through it."""
    door = Door(cluster.url)
    await door.open()
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    config["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{door.port}"
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    try:
        yield door, {"extras": {"kube_config_path": str(path)}}
    finally:
        door.shut()


def start(cluster: Any, name: str, script: str) -> dict[str, Any]:
    """Create a pod of ours; the arguments of a trigger for it."""
    made = cluster.run(pod_manifest(name, ["sh", "-c", script], labels=OURS), NAMESPACE)
    return {"name": name, "namespace": NAMESPACE, "uid": made["metadata"]["uid"]}


async def event_of(trigger: PodTrigger) -> dict[str, Any]:
    """The event, as Airflow keeps it."""
    (event,) = [event.payload async for event in trigger.run()]
    return dict(json.loads(json.dumps(event)))


def test_many_pods_are_one_watch(cluster: Any, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    names = [start(cluster, f"many-{n}", f"while [ ! -e {gate} ]; do sleep 0.2; done") for n in range(20)]

    async def main() -> list[str]:
        async with behind_a_door(cluster, tmp_path) as (door, way):
            events = [
                asyncio.ensure_future(event_of(PodTrigger(**n, cluster=way, get_logs=False))) for n in names
            ]
            await asyncio.sleep(3)  # longer than a pod that nobody has seen is waited for
            gate.touch()
            assert [(await event)["status"] for event in events] == ["success"] * 20
            return door.requests

    requests = asyncio.run(main())
    assert requests == ["GET /api/v1/namespaces/watched/pods"] * 2, "a list and a watch"


def test_an_api_that_is_away_is_waited_for(cluster: Any, tmp_path: Path) -> None:
    """Pods that end meanwhile have ended; one that is deleted meanwhile is gone; lines are told once."""
    gate = tmp_path / "go"
    wait = f"while [ ! -e {gate} ]; do sleep 0.1; done"
    ends = start(cluster, "ends", f"echo one; {wait}; echo two")
    goes = start(cluster, "goes", "sleep 600")
    told: list[str] = []

    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        async with behind_a_door(cluster, tmp_path) as (door, way):
            trigger = PodTrigger(**ends, cluster=way)
            trigger.tell = lambda stamp, text: told.append(text)
            events = [asyncio.ensure_future(event_of(t)) for t in (trigger, PodTrigger(**goes, cluster=way))]
            while told != ["one"]:
                await asyncio.sleep(0.1)
            door.shut()
            gate.touch()
            await asyncio.to_thread(cluster.wait_phase, "ends", "Succeeded", namespace=NAMESPACE)
            await asyncio.to_thread(
                cluster.core_v1().delete_namespaced_pod, "goes", NAMESPACE, grace_period_seconds=0
            )
            await asyncio.to_thread(cluster.wait_gone, "goes", namespace=NAMESPACE)
            await asyncio.sleep(3)
            assert not any(event.done() for event in events), "nothing is concluded from silence"
            await door.open()
            return await events[0], await events[1]

    ended, gone = asyncio.run(main())
    assert (ended["status"], gone["status"]) == ("success", "gone")
    assert told == ["one", "two"]


def test_a_pod_that_was_collected_before_anybody_looked_is_gone(cluster: Any, tmp_path: Path) -> None:
    async def main() -> dict[str, Any]:
        async with behind_a_door(cluster, tmp_path) as (_, way):
            return await event_of(PodTrigger(name="never", namespace=NAMESPACE, uid="x", cluster=way))

    assert asyncio.run(main())["status"] == "gone"


def test_what_was_killed_is_deleted_once_the_api_is_back(cluster: Any, tmp_path: Path) -> None:
    """Also when that takes longer than Airflow gives a trigger that is cancelled."""
    pod = start(cluster, "killed", "sleep 600")

    async def main() -> None:
        async with behind_a_door(cluster, tmp_path) as (door, way):
            door.shut()
            kill = asyncio.ensure_future(PodTrigger(**pod, cluster=way).on_kill())
            await asyncio.sleep(1)
            kill.cancel()
            await door.open()
            await asyncio.to_thread(cluster.wait_gone, "killed", namespace=NAMESPACE)

    asyncio.run(main())


def test_what_nobody_collects_is_collected(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that was marked failed just after its pod had ended never comes back to delete it."""
    monkeypatch.setattr("trainyard.triggers.pod.COLLECT_SECONDS", 1.0)
    pod = start(cluster, "ended", "true")

    async def main() -> None:
        async with behind_a_door(cluster, tmp_path) as (_, way):
            assert (await event_of(PodTrigger(**pod, cluster=way)))["status"] == "success"
            await asyncio.to_thread(cluster.wait_gone, "ended", namespace=NAMESPACE)

    asyncio.run(main())


def test_a_success_with_nothing_left_to_do_ends_the_task_and_collects_its_pod(
    cluster: Any, tmp_path: Path
) -> None:
    """Without a process for it; a failure goes back to the task, which says what it means and tries again."""
    well, ill = start(cluster, "well", "true"), start(cluster, "ill", "exit 3")

    async def main() -> None:
        async with behind_a_door(cluster, tmp_path) as (_, way):
            (event,) = [e async for e in PodTrigger(**well, cluster=way, finish=True).run()]
            assert type(event) is TaskSuccessEvent
            await asyncio.to_thread(cluster.wait_gone, "well", namespace=NAMESPACE)
            assert (await event_of(PodTrigger(**ill, cluster=way, finish=True)))["status"] == "failed"
            assert await asyncio.to_thread(cluster.wait_phase, "ill", "Failed", namespace=NAMESPACE)

    asyncio.run(main())
    cluster.core_v1().delete_namespaced_pod("ill", NAMESPACE, grace_period_seconds=0)


def test_a_deadline_passes_while_the_api_is_away(cluster: Any, tmp_path: Path) -> None:
    pod = start(cluster, "late", "sleep 600")

    async def main() -> dict[str, Any]:
        async with behind_a_door(cluster, tmp_path) as (door, way):
            door.shut()
            return await event_of(PodTrigger(**pod, cluster=way, deadline=1.0))

    event = asyncio.run(main())
    assert (event["status"], event["what"]) == ("late", "execution")
    cluster.core_v1().delete_namespaced_pod("late", NAMESPACE, grace_period_seconds=0)


# ---- logs


def test_a_replicas_lines_come_from_its_file_from_the_place_on(tmp_path: Path) -> None:
    """Not those of a pod before; not twice what an earlier triggerer told; all, however they were put aside."""
    (tmp_path / "plan.json").write_text("{}")
    now = [1000.0]
    log = ReplicaLog(tmp_path, "worker-1", now=lambda: now[0], most_bytes=200)
    log.write(b"of the pod before\n")
    now[0] = 2000.0
    log.write(b"number 1\nnumber 2\nnumber 3\n")
    told: list[str] = []
    stamp = "1970-01-01T00:33:20.000Z"

    async def main() -> bool:
        ended = asyncio.Event()
        pod_log = PodLog(
            *(Cluster(), "n", "p", "base"),
            job=str(tmp_path),
            replica="worker-1",
            place=Place(stamp, 2),
            tell=lambda stamp, text: told.append(text),
        )
        telling = asyncio.ensure_future(pod_log.follow("1970-01-01T00:33:20Z", ended))
        for n in range(4, 40):
            now[0] += 0.25
            await asyncio.to_thread(log.write, f"number {n}\n".encode())
            if n % 6 == 0:
                while len(told) < n - 2:
                    await asyncio.sleep(0.05)
        ended.set()
        return await telling

    assert asyncio.run(main())
    assert told == [f"number {n}" for n in range(3, 40)]


def test_a_log_says_that_lines_were_put_aside(cluster: Any) -> None:
    """Where the API no longer has the place itself; where it has, nothing is missing."""
    arguments = start(cluster, "rotated", "echo number 1; sleep 1.1; echo number 2; echo number 3")
    cluster.wait_phase("rotated", "Succeeded", namespace=NAMESPACE)
    way = Cluster(extras={"kube_config_path": str(cluster.kubeconfig)})

    async def told_after(place: Place) -> list[tuple[str, str]]:
        ended, told = asyncio.Event(), list[tuple[str, str]]()
        ended.set()
        log = PodLog(
            *(way, NAMESPACE, arguments["name"], "base"),
            place=place,
            tell=lambda stamp, text: told.append((stamp, text)),
        )
        assert await log.follow("", ended)
        return told

    whole = asyncio.run(told_after(Place()))
    assert [text for _, text in whole] == ["number 1", "number 2", "number 3"]
    rest = asyncio.run(told_after(Place(whole[0][0], 1)))
    assert [text for _, text in rest] == ["number 2", "number 3"]
    # As if the last line that was told was one of before what the kubelet still has.
    cut = asyncio.run(told_after(Place("2020-01-01T00:00:00.5Z", 1)))
    missing = "(lines before this one are missing: the kubelet has put them aside)"
    assert cut == [(whole[0][0], missing), *whole]


def test_a_trigger_is_made_again_with_all_that_it_was_told() -> None:
    """What is forgotten here, the triggerer does not know: it makes every trigger from this."""
    names = [name for name in inspect.signature(PodTrigger.__init__).parameters if name != "self"]
    told = {name: f"its {name}" for name in names if name != "cluster"} | {"cluster": {"connection": "c"}}
    assert PodTrigger(**told).serialize()[1] == told  # type: ignore[arg-type]


def test_the_place_of_a_triggerer_that_was_killed(tmp_path: Path) -> None:
    def row(stamp: str, logger: str = "trainyard.pod") -> str:
        return json.dumps({"timestamp": stamp, "event": "x", "logger": logger})

    assert earlier_place(tmp_path, "attempt=1.log") == Place()
    (tmp_path / "attempt=1.log").write_text(row("2026-01-01T00:00:09Z", "task") + "\n")
    assert earlier_place(tmp_path, "attempt=1.log") == Place()
    told = [row("2026-01-01T00:00:01.5Z"), row("2026-01-01T00:00:02.5Z"), row("2026-01-01T00:00:02.5Z")]
    (tmp_path / "attempt=1.log.trigger.3.log").write_text(
        "\n".join([*told, '{"timestamp": "2026-01-01T00:0'])
    )
    assert earlier_place(tmp_path, "attempt=1.log") == Place("2026-01-01T00:00:02.5Z", 2)


def test_the_places_of_a_group_s_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose lines are too old to be found was told what is older than those that are found."""

    def row(second: int, replica: str) -> str:
        return json.dumps(
            {
                "timestamp": f"2026-01-01T00:00:{second:02}Z",
                "event": f"[{replica}] x",
                "logger": "trainyard.pod",
            }
        )

    rows = [row(1, "worker-1"), *(row(second, "worker-0") for second in (2, 3, 3))]
    (tmp_path / "attempt=1.log.trigger.3.log").write_text("\n".join(rows))
    names = ["worker-0", "worker-1", "worker-2"]
    first, second, third = earlier_places(tmp_path, "attempt=1.log", names).values()
    assert (first, second) == (Place("2026-01-01T00:00:03Z", 2), Place("2026-01-01T00:00:01Z", 1))
    assert third == Place()
    monkeypatch.setattr("trainyard.triggers.pod_log._TAIL_BYTES", len("\n".join(rows[1:])))
    first, second, third = earlier_places(tmp_path, "attempt=1.log", names).values()
    assert first == Place("2026-01-01T00:00:03Z", 2)
    assert second == third == Place("2026-01-01T00:00:02Z")


def test_a_group_s_lines_are_told_once_by_one_triggerer_after_the_other(tmp_path: Path) -> None:
    moment = [1000.0]
    logs = [ReplicaLog(tmp_path, f"worker-{n}", now=lambda: moment[0]) for n in range(2)]
    logs[0].write(b"of an earlier try\n")
    moment[0] = 2000.0
    for log in logs:
        log.write(b"one\ntwo\n")
    moment[0] = 2001.0
    logs[1].write(b"three\n")

    def told(**places: Place) -> list[str]:
        lines: list[str] = []
        ended = asyncio.Event()
        ended.set()
        log = GroupLog(
            tmp_path,
            ["worker-0", "worker-1"],
            since="1970-01-01T00:33:20.000Z",
            places={name.replace("_", "-"): place for name, place in places.items()},
            tell=lambda stamp, text: lines.append(text),
        )
        asyncio.run(log.follow(ended))
        return lines

    both = [f"[worker-{n}] {word}" for n in range(2) for word in ("one", "two")]
    assert told() == [*both, "[worker-1] three"]
    later = Place("1970-01-01T00:33:20.000Z", 1)
    assert told(worker_0=later, worker_1=later._replace(count=2)) == ["[worker-0] two", "[worker-1] three"]

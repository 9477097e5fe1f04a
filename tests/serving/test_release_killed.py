"""Releases killed by SIGKILL before every single operation of every step, against two real replicas."""

from __future__ import annotations

import itertools
import json
import shutil
import time

import numpy as np
import pytest

from serving.client import PredictClient
from serving.release import steps
from serving.release.exported import Export
from serving.release.promotions import PromotionLog
from serving.release.store import ReleaseStore
from serving.tfserving.config import ConfigFile, ModelEntry, ensure_config
from serving.tfserving.rollout import Rollout
from serving.traffic import read_shares

from .killing import Killer

pytestmark = pytest.mark.slow

PASS = {"outcome": "pass", "reasons": ["good"], "numbers": {"value": 0.97}}
WHO = {"by": "test", "why": "x"}


class Place:
    """A storage with two models, its replicas, and the state before a step, to which it can be put back."""

    def __init__(self, storage, replicas, killer, exports, expected, images):
        self.storage = storage
        self.config_path = storage / "serving" / "models.config"
        self.servers = [f"127.0.0.1:{server.port}" for server in replicas]
        self.where = {"servers": self.servers, "config_path": str(self.config_path)}
        self.killer, self.exports, self.expected, self.images = killer, exports, expected, images
        self.store = ReleaseStore(storage, "digits")
        self.clients = {
            (server, model): PredictClient(server, model)
            for server in self.servers
            for model in ("digits", "other")
        }

    def arguments(self, step, name="digits", version=2, export=2):
        given = {"storage": str(self.storage), "name": name}
        if step == "publish_step":
            return {**given, "export_dir": str(self.exports[export]), "mlflow_version": version}
        given |= self.where
        if step in ("deploy_step", "verify_step"):
            return {**given, "version": version}
        if step == "promote_step":
            return {**given, "version": version, "gate": PASS, **WHO}
        return {**given, "keep": 1} if step == "prune_step" else {**given, **WHO}

    def run(self, step, at=-1, **options):
        return self.killer.run(step, at, **self.arguments(step, **options))

    def release(self, name, version, export):
        for step in ("publish_step", "deploy_step", "verify_step", "promote_step"):
            said = self.run(step, name=name, version=version, export=export)
            assert "operations" in said, (step, said)

    def save(self, folder):
        shutil.copytree(self.storage, folder)

    def put_back(self, folder):
        for part in ("releases", "serving"):
            shutil.rmtree(self.storage / part)
            shutil.copytree(folder / part, self.storage / part)
        for model in ("digits", "other"):
            now, then = (root / "models" / model for root in (self.storage, folder))
            for path in now.iterdir():
                if path.name.startswith(".") or not (then / path.name).exists():
                    shutil.rmtree(path)
            for path in then.iterdir():
                if not (now / path.name).exists():
                    shutil.copytree(path, now / path.name)
        Rollout(self.servers, self.config_path).push()

    def check(self, allowed):
        """What must hold at any moment: nothing half, nothing lost, `stable` answers with one of `allowed`."""
        for version in self.store.published():
            Export.load(self.store.path(version)).verify()
        config = ConfigFile(self.config_path)
        assert config.entry("other").labels["stable"] == 1
        assert config.entry("digits").labels["stable"] in allowed
        log = self.store.log.path
        assert all(json.loads(line)["version"] for line in log.read_text().splitlines())
        for (_, model), client in self.clients.items():
            got = client.predict({"image": self.images})["logits"]
            wanted = [3] if model == "other" else allowed
            assert any(np.allclose(got, self.expected[v]["logits"], rtol=1e-4) for v in wanted)

    def tidy(self):
        left = [
            path
            for path in self.storage.rglob(".*")
            if path.suffix == ".tmp" or path.name.startswith((".staging", ".trash"))
        ]
        assert left == []
        assert not (self.store.releases / "pending.json").exists()

    def state(self):
        """What a step is for: config, log, files, and what the replicas say."""
        entries = PromotionLog(self.store.log.path).entries()
        config = ConfigFile(self.config_path)
        wanted = config.entry("digits").versions
        deadline = time.monotonic() + 20
        while True:  # unloading takes a moment
            loaded = Rollout(self.servers, self.config_path).loaded("digits")
            held = {
                s: sorted(v for v, state in states.items() if state != "END") for s, states in loaded.items()
            }
            if all(tuple(versions) == wanted for versions in held.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return {
            "config": [config.entry(name) for name in ("digits", "other")],
            "log": [(entry.what, entry.version, entry.previous) for entry in entries],
            "published": self.store.published(),
            "removed": [v for v in self.store.versions() if self.store.record(v).get("removed")],
            "loaded": held,
        }


@pytest.fixture
def place(tmp_path, start_server, exports, expected, images):
    storage = tmp_path / "storage"
    config_path = ensure_config(storage / "serving" / "models.config")
    replicas = [start_server(model_config_file=config_path) for _ in range(2)]
    killer = Killer()
    place = Place(storage, replicas, killer, exports, expected, images)
    place.release("other", 1, 3)
    place.release("digits", 1, 1)
    yield place
    for client in place.clients.values():
        client.close()
    killer.close()


def test_killed_before_every_operation_the_next_run_finishes(place, tmp_path, capsys):
    total = 0
    for step in ("publish_step", "deploy_step", "verify_step", "promote_step", "prune_step", "rollback"):
        if step == "prune_step":  # something to remove: a version that nobody holds
            shutil.copytree(place.store.path(1), place.store.path(0))
        before = tmp_path / f"before-{step}"
        place.save(before)
        assert "operations" in place.run(step)
        done = place.state()
        place.tidy()
        allowed = {1, 2} if step in ("promote_step", "rollback") else {done["config"][0].labels["stable"]}
        for at in itertools.count(1):
            place.put_back(before)
            said = place.run(step, at)
            if "operations" in said:  # it ended before it came to operation `at`
                assert 1 < said["operations"] < at
                break
            assert said == {"killed": True}, (step, at, said)
            total += 1
            place.check(allowed)
            assert "operations" in place.run(step), (step, at)
            assert place.state() == done, (step, at)
            place.check(allowed)
            place.tidy()
    assert total > 100
    with capsys.disabled():
        print(f"\n{total} kills, each before another operation, each finished by the next run")


def test_the_first_release_of_a_model_killed_leaves_nothing_half(place, tmp_path):
    place.run("publish_step", name="new", version=1, export=2)
    new = ReleaseStore(place.storage, "new")
    for step in ("deploy_step", "promote_step"):
        before = tmp_path / f"before-{step}"
        place.save(before)
        for at in itertools.count(1, 3):
            place.put_back(before)
            if place.run(step, at, name="new", version=1) != {"killed": True}:
                break
            place.check({1})
            champion = new.champion()
            assert champion is None or champion["version"] == 1
            assert "operations" in place.run(step, name="new", version=1), (step, at)
            labels = ConfigFile(place.config_path).entry("new").labels
            assert labels == ({"canary": 1} if step == "deploy_step" else {"canary": 1, "stable": 1})
            place.tidy()
    assert new.champion()["version"] == 1
    assert len(new.log.entries()) == 1


def test_a_canary_s_watcher_that_is_killed_is_simply_called_again(place, tmp_path):
    for step in ("publish_step", "deploy_step"):
        place.run(step)
    hasty = {"duration_s": 1e-6, "max_wait_s": 2e-6}  # the first look gives it up: nobody asked it anything
    look = {**place.arguments("verify_step"), "canary": hasty, "by": "test"}
    before = tmp_path / "before"
    place.save(before)
    for at in itertools.count(1):
        place.put_back(before)
        for _ in range(2):
            said = place.killer.run("canary_step", at, **look)
            place.check({1})
        if said != {"killed": True}:
            assert at > 10
            break
        for _ in range(2):
            assert "operations" in place.killer.run("canary_step", **look), at
        assert ConfigFile(place.config_path).entry("digits").labels == {"stable": 1, "canary": 1}
        assert [entry.what for entry in place.store.log.entries()] == ["promote", "reject"]
        assert "digits" not in read_shares(place.config_path.parent / "traffic.json")
        place.tidy()


def test_after_a_killed_promotion_a_rollback_finds_log_and_labels_of_one_mind(place, tmp_path):
    for step in ("publish_step", "deploy_step"):
        place.run(step)
    before = tmp_path / "before"
    place.save(before)
    seen = set()
    for at in itertools.count(1):
        place.put_back(before)
        if place.run("promote_step", at) != {"killed": True}:
            break
        said = place.run("rollback")
        entry = ConfigFile(place.config_path).entry("digits")
        assert entry.labels["stable"] == place.store.champion()["version"] == 1
        whats = tuple(entry.what for entry in place.store.log.entries())
        assert whats == (("promote",) if "error" in said else ("promote", "promote", "rollback"))
        seen.add(whats)
        place.tidy()
    assert len(seen) == 2, "killed before it happened, and after"


def test_two_models_deployed_at_once_one_of_them_killed_lose_nothing(place, tmp_path):
    other = Killer()
    try:
        place.run("publish_step")
        place.run("publish_step", name="other", version=2, export=1)
        before = tmp_path / "before"
        place.save(before)
        operations = place.run("deploy_step")["operations"]
        for at in range(1, operations, 2):
            place.put_back(before)
            other.send("deploy_step", **place.arguments("deploy_step", name="other"))
            place.run("deploy_step", at)
            assert "operations" in other.answer()
            place.check({1})
            assert "operations" in place.run("deploy_step")
            for name in ("digits", "other"):
                assert ConfigFile(place.config_path).entry(name) == ModelEntry(
                    name, str(place.storage / "models" / name), (1, 2), {"stable": 1, "canary": 2}
                )
    finally:
        other.close()


def test_a_rollback_that_was_killed_is_not_made_twice(place, tmp_path):
    place.release("digits", 2, 2)
    place.release("digits", 3, 3)
    before = tmp_path / "before"
    place.save(before)
    for at in itertools.count(1, 2):
        place.put_back(before)
        if place.run("rollback", at) != {"killed": True}:
            break
        assert "operations" in place.run("rollback")
        assert place.store.champion()["version"] == 2, at


def test_what_a_killed_rollout_left_does_not_stop_the_next_release(place):
    """Killed for good in the middle of a deploy, the next release of the model clears what it left."""
    place.run("publish_step")
    assert place.run("deploy_step", 8) == {"killed": True}
    place.release("digits", 3, 3)
    entry = ConfigFile(place.config_path).entry("digits")
    assert entry == ModelEntry(
        "digits", str(place.storage / "models" / "digits"), (1, 3), {"stable": 3, "canary": 3}
    )
    assert steps.prune_step(place.storage, "digits", 1, **place.where)["removed"] == [2]

"""Replicas that come and go while a version is rolled out, and who may hold a version that is to be pruned."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from serving.client import PredictClient
from serving.errors import ConfigInvalid, DeadlineExceeded, ServerUnavailable
from serving.release import steps
from serving.release.store import ReleaseStore
from serving.tfserving.config import ConfigFile, ensure_config
from serving.tfserving.replicas import Replicas, addresses
from serving.tfserving.rollout import Rollout

WHO = {"by": "test", "why": "x"}
NAME = "dns:///servers:8500"


class Name:
    """A name of replicas, as a headless Service has one; what it says is counted and can be changed."""

    def __init__(self, *servers):
        self.replicas = [f"127.0.0.1:{server.port}" for server in servers]
        self.asked = 0
        self.when = {}

    def __call__(self, host, port):
        assert (host, port) == ("servers", 8500)
        self.asked += 1
        if self.asked in self.when:
            self.when[self.asked]()
        if not self.replicas:
            raise ServerUnavailable("servers names no replica")
        return list(self.replicas)


@pytest.fixture
def place(tmp_path, exports, start_server):
    """A storage with versions 1 (champion) and 2 (published), and a config file."""
    storage = tmp_path / "storage"
    config = ensure_config(storage / "serving" / "models.config")
    server = start_server(model_config_file=config)
    where = ([f"127.0.0.1:{server.port}"], config)
    for version in (1, 2):
        steps.publish_step(storage, "digits", exports[version])
    steps.deploy_step(storage, "digits", 1, *where)
    steps.promote_step(storage, "digits", 1, *where, **WHO)
    return storage, config, server


def _deploy(name, storage, config, **options):
    rollout = Rollout([NAME], config, resolve=name)
    store = ReleaseStore(storage, "digits")
    return rollout, rollout.deploy("digits", store.models, 2, keep=[1], **options)


def test_a_name_is_looked_up_as_all_its_addresses():
    assert addresses("localhost", 8500)[0] == "127.0.0.1:8500"
    assert addresses("::1", 8500) == ["[::1]:8500"]
    with pytest.raises(ServerUnavailable, match="names no replica"):
        addresses("no-such-name.invalid", 8500)
    replicas = Replicas(["a:1", "dns:///localhost:8500", "a:1"])
    assert replicas.now()[:2] == ("a:1", "127.0.0.1:8500")
    assert replicas.change
    assert not Replicas(["a:1"]).change
    with pytest.raises(ConfigInvalid, match="must be like dns:///host:8500"):
        Replicas(["dns:///localhost"])


def test_a_replica_that_appears_meanwhile_has_the_version_before_labels_move(
    place, start_server, images, expected
):
    storage, config, server = place
    name = Name(server)
    late = []

    def appear():
        # It began with the file as it was before this deploy, as one that mounts an older copy would.
        old = config.with_name("old.config")
        old.write_text(before)
        late.append(start_server(model_config_file=old))
        name.replicas.append(f"127.0.0.1:{late[0].port}")

    before = config.read_text()
    name.when = {2: appear}
    rollout, result = _deploy(name, storage, config)
    assert result["servers"] == name.replicas
    rollout.set_labels("digits", {"stable": 2, "canary": 2})
    for address in name.replicas:
        with PredictClient(address, "digits") as client:
            got = client.predict({"image": images})["logits"]
            np.testing.assert_allclose(got, expected[2]["logits"], rtol=1e-4)


def test_a_replica_that_dies_is_waited_for_until_its_name_is_gone(place, start_server, caplog):
    storage, config, server = place
    dying = start_server(model_config_file=config)
    name = Name(server, dying)
    gone = name.replicas[1]

    def die():
        dying.stop()
        threading.Timer(1.0, lambda: name.replicas.remove(gone)).start()

    name.when = {2: die}
    _, result = _deploy(name, storage, config)
    assert result["servers"] == name.replicas
    assert f"replica {gone} is gone, left out" in caplog.text
    assert ConfigFile(config).entry("digits").labels["canary"] == 2


def test_a_replica_that_is_down_but_named_stops_the_deploy(place, start_server):
    storage, config, server = place
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        name = Name(server)
        name.replicas.append(f"127.0.0.1:{free.getsockname()[1]}")
        before = ConfigFile(config).entry("digits")
        with pytest.raises((ServerUnavailable, DeadlineExceeded)):
            _deploy(name, storage, config, deadline_s=3)
    assert ConfigFile(config).entry("digits") == before
    with pytest.raises(ServerUnavailable, match="names no replica"):
        _deploy(Name(), storage, config)
    assert ConfigFile(config).entry("digits") == before


def test_a_rollback_does_not_wait_for_a_replica_that_is_down(place, start_server, images, expected):
    storage, config, server = place
    other = start_server(model_config_file=config)
    where = ([f"127.0.0.1:{s.port}" for s in (server, other)], config)
    steps.deploy_step(storage, "digits", 2, *where)
    steps.promote_step(storage, "digits", 2, *where, **WHO)
    other.stop()
    assert steps.rollback(storage, "digits", *where, **WHO)["version"] == 1
    with PredictClient(where[0][0], "digits") as client:
        np.testing.assert_allclose(
            client.predict({"image": images})["logits"], expected[1]["logits"], rtol=1e-4
        )
    server.stop()
    with pytest.raises((ServerUnavailable, DeadlineExceeded)):
        steps.rollback(storage, "digits", *where, **WHO, to=2)
    assert ReleaseStore(storage, "digits").champion()["version"] == 1
    assert ConfigFile(config).entry("digits").labels["stable"] == 1


# ---- who holds a version


@pytest.fixture
def six(place, fake_export):
    """Versions 3 to 6, which nobody has loaded, after 1 (before) and 2 (the champion)."""
    storage, config, server = place
    where = ([f"127.0.0.1:{server.port}"], config)
    steps.deploy_step(storage, "digits", 2, *where)
    steps.promote_step(storage, "digits", 2, *where, **WHO)
    for number in range(3, 7):
        steps.publish_step(storage, "digits", fake_export(str(number), str(number)), mlflow_version=number)
    return storage, config, server


def _prune(six, keep=1, **options):
    storage, config, server = six
    return steps.prune_step(storage, "digits", keep, config, servers=[f"127.0.0.1:{server.port}"], **options)


def test_what_nobody_holds_goes(six):
    result = _prune(six, keep=2)
    assert (result["removed"], result["warnings"]) == ([3, 4], [])
    assert result["held"]["2"] == [
        "config",
        "label canary",
        "label stable",
        f"replica 127.0.0.1:{six[2].port}",
    ]


def test_an_alias_of_the_registry_holds_a_version(six):
    result = _prune(six, aliases=lambda name: {"shadow": "4", "elsewhere": "99"})
    assert result["removed"] == [3, 5]
    assert result["held"]["4"] == ["alias shadow"]


def test_a_label_holds_a_version(six):
    storage, config, server = six
    steps.publish_step(storage, "digits", storage / "models" / "digits" / "1")  # the same export: nothing new
    Rollout([f"127.0.0.1:{server.port}"], config).set_label("digits", "shadow", 1)
    store = ReleaseStore(storage, "digits")
    steps.rollback(storage, "digits", [f"127.0.0.1:{server.port}"], config, **WHO, to=1)
    store.promote(6, **WHO)
    assert "label shadow" in _prune(six)["held"]["1"]
    assert 1 in store.published()


def test_a_replica_that_still_has_it_loaded_holds_a_version(six, start_server, make_config, exports):
    storage, config, server = six
    version = steps.publish_step(storage, "digits", _another(exports[3], storage))["version"]
    by_hand = start_server(
        make_config(digits=(storage / "models" / "digits", [version], {})), model_config_file_poll_s=0
    )
    newer = [
        steps.publish_step(storage, "digits", _another(exports[3], storage, n))["version"] for n in (1, 2)
    ]
    addresses_ = [f"127.0.0.1:{server.port}", f"127.0.0.1:{by_hand.port}"]
    rollout = Rollout(addresses_, config)
    assert rollout.loaded("digits")[addresses_[1]] == {version: "AVAILABLE"}
    held = {}
    from serving.release.pruning import _replicas

    _replicas(held, rollout, "digits")
    assert held[version] == {f"replica {addresses_[1]}"}
    assert ReleaseStore(storage, "digits").prune(1, held) == [3, 4, 5, 6, newer[0]]


def _another(export, storage, number=0):
    import shutil

    from .conftest import write_manifest

    folder = storage / f"export-{number}"
    shutil.copytree(export, folder)
    (folder / "assets.extra" / "number").write_text(str(number))
    write_manifest(folder)
    return folder


def test_not_knowing_is_no_leave_to_delete(six):
    storage, config, server = six
    server.stop()
    result = _prune(six)
    assert result["removed"] == []
    assert any("nothing is removed" in warning for warning in result["warnings"])

    def down(name):
        raise OSError("mlflow does not say which aliases digits has")

    result = steps.prune_step(storage, "digits", 1, config, aliases=down)
    assert (result["removed"], len(result["warnings"])) == ([], 1)
    assert ReleaseStore(storage, "digits").published() == [1, 2, 3, 4, 5, 6]

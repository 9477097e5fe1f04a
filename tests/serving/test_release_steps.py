"""A release from export to champion and back, on two replicas; and everything that can go wrong on the way."""

from __future__ import annotations

import json

import numpy as np
import pytest

from serving.client import PredictClient
from serving.errors import (
    ConfigInvalid,
    DeadlineExceeded,
    ReleaseConflict,
    ReleaseNotFound,
    ServerUnavailable,
    VerificationFailed,
    VersionFailed,
)
from serving.release import steps
from serving.release.exported import Golden
from serving.release.store import ReleaseStore
from serving.tfserving.config import ConfigFile, ensure_config
from serving.tfserving.rollout import Rollout

PASS = {"outcome": "pass", "reasons": ["good"], "numbers": {"value": 0.97}}


class Site:
    """A storage, two replicas that follow one config file, and the arguments that steps take."""

    def __init__(self, storage, servers, config_path):
        self.storage = storage
        self.servers = [f"127.0.0.1:{server.port}" for server in servers]
        self.replicas = servers
        self.config_path = config_path
        self.store = ReleaseStore(storage, "digits")
        self.where = (self.servers, config_path)
        self.aliases: list[tuple[str, str, str]] = []

    def alias(self, name, alias, version):
        self.aliases.append((name, alias, version))

    def publish(self, export, **options):
        return steps.publish_step(self.storage, "digits", export, **options)["version"]

    def deploy(self, version, **options):
        return steps.deploy_step(self.storage, "digits", version, *self.where, **options)

    def verify(self, version, **options):
        return steps.verify_step(self.storage, "digits", version, *self.where, **options)

    def promote(self, version, **options):
        return steps.promote_step(
            self.storage,
            "digits",
            version,
            *self.where,
            **{"by": "test", "why": "x", "gate": PASS, **options},
        )

    def release(self, export, **options):
        version = self.publish(export, **options)
        self.deploy(version)
        self.verify(version)
        self.promote(version)
        return version

    def rollback(self, **options):
        return steps.rollback(self.storage, "digits", *self.where, by="test", why="slow", **options)

    def entry(self):
        return ConfigFile(self.config_path).entry("digits")

    def answers(self, images, label):
        found = []
        for server in self.servers:
            with PredictClient(server, "digits", label=label) as client:
                found.append(client.predict({"image": images})["logits"])
        np.testing.assert_array_equal(*found)
        return found[0]


@pytest.fixture
def site(tmp_path, start_server):
    config_path = ensure_config(tmp_path / "storage" / "serving" / "models.config")
    servers = [start_server(model_config_file=config_path) for _ in range(2)]
    return Site(tmp_path / "storage", servers, config_path)


def test_a_release_goes_all_the_way_and_back(site, exports, images, expected):
    first = site.release(exports[1], mlflow_version=1)
    assert first == 1
    np.testing.assert_allclose(site.answers(images, "stable"), expected[1]["logits"], rtol=1e-5)

    second = site.publish(exports[2], mlflow_version="4")
    assert second == 4, "the registry's number is taken where it is free"
    deployed = site.deploy(second, alias=site.alias)
    assert deployed["labels"] == {"stable": 1, "canary": 4}
    assert deployed["versions"] == [1, 4]
    np.testing.assert_allclose(site.answers(images, "stable"), expected[1]["logits"], rtol=1e-5)
    np.testing.assert_allclose(site.answers(images, "canary"), expected[2]["logits"], rtol=1e-5)
    verified = site.verify(second)
    assert verified["max_abs_diff"] < 1e-4
    assert verified["examples"] == 4
    promoted = site.promote(second, alias=site.alias, why="better")
    assert (promoted["previous"], promoted["warnings"]) == (1, [])
    assert site.aliases == [
        ("digits", "challenger", "4"),
        ("digits", "champion", "4"),
        ("digits", "previous", "1"),
    ]
    np.testing.assert_allclose(site.answers(images, "stable"), expected[2]["logits"], rtol=1e-5)
    champion = steps.champion(site.storage, "digits")
    assert (champion["version"], champion["mlflow_version"], champion["previous"]) == (4, "4", 1)
    assert site.store.log.entries()[-1].gate == PASS

    # Every step again changes nothing.
    log = site.store.log.entries()
    assert site.publish(exports[2], mlflow_version="4") == 4
    site.deploy(second)
    site.verify(second)
    assert site.promote(second)["promoted"] == promoted["promoted"]
    assert site.store.log.entries() == log
    for value in (deployed, verified, promoted, champion):
        assert len(json.dumps(value)) < 1500

    back = site.rollback(alias=site.alias)
    assert (back["version"], back["previous"], back["labels"]) == (1, 4, {"stable": 1, "canary": 1})
    assert site.aliases[-2:] == [("digits", "champion", "1"), ("digits", "previous", "")]
    np.testing.assert_allclose(site.answers(images, "stable"), expected[1]["logits"], rtol=1e-5)
    with pytest.raises(ReleaseNotFound, match="no earlier champion"):
        site.rollback()


def test_versions_held_are_the_champion_the_one_before_and_the_new_one(site, exports, images, expected):
    site.release(exports[1])
    site.release(exports[2])
    third = site.publish(exports[3])
    assert site.deploy(third)["versions"] == [1, 2, 3]
    site.verify(third)
    site.promote(third)
    assert steps.prune_step(site.storage, "digits", 1, site.config_path)["removed"] == []
    site.rollback(to=1)
    np.testing.assert_allclose(site.answers(images, "stable"), expected[1]["logits"], rtol=1e-5)
    assert site.store.champion()["version"] == 1


def test_prune_keeps_what_the_config_names(site, exports, fake_export):
    site.release(exports[1])
    for content in ("a", "b", "c"):
        site.publish(fake_export(content, content))
    assert steps.prune_step(site.storage, "digits", 1, site.config_path)["removed"] == [2, 3]
    assert steps.prune_step(site.storage, "digits", 1)["removed"] == []


def test_rolling_back_to_what_is_no_longer_loaded_loads_it(site, exports, images, expected):
    site.release(exports[1])
    site.release(exports[2])
    rollout = Rollout(*site.where)
    rollout.set_labels("digits", {"stable": 2, "canary": 2})
    rollout.abandon("digits", 1)
    assert site.entry().versions == (2,)
    site.rollback()
    np.testing.assert_allclose(site.answers(images, "stable"), expected[1]["logits"], rtol=1e-5)


def test_a_release_survives_the_death_of_its_servers(site, exports, images, expected, start_server):
    site.release(exports[1])
    site.deploy(site.publish(exports[2]))
    server = start_server(model_config_file=site.config_path)
    with PredictClient(f"127.0.0.1:{server.port}", "digits") as client:
        np.testing.assert_allclose(
            client.predict({"image": images})["logits"], expected[1]["logits"], rtol=1e-5
        )
        client.label = "canary"
        np.testing.assert_allclose(
            client.predict({"image": images})["logits"], expected[2]["logits"], rtol=1e-5
        )


def _break(site, version):
    data = site.store.path(version) / "variables" / "variables.data-00000-of-00001"
    data.write_bytes(b"broken after it was published")


@pytest.mark.parametrize("first", [True, False])
def test_a_version_that_does_not_load_is_taken_back_and_quoted(site, exports, images, expected, first):
    if not first:
        site.release(exports[1])
    before = site.entry()
    version = site.publish(exports[2])
    _break(site, version)
    with pytest.raises(VersionFailed, match=f"can't load version {version} of digits") as caught:
        site.deploy(version, deadline_s=20)
    assert "Read less bytes than requested" in caught.value.server_message
    assert site.entry() == before
    if not first:
        np.testing.assert_allclose(site.answers(images, "stable"), expected[1]["logits"], rtol=1e-5)


def test_a_version_that_answers_otherwise_is_taken_back(site, exports, images, expected):
    site.release(exports[1])
    version = site.publish(exports[2])
    golden = site.store.path(version) / "golden.json"
    other = json.loads(golden.read_text())
    other["outputs"] = json.loads((exports[3] / "golden.json").read_text())["outputs"]
    golden.write_text(json.dumps(other))
    site.deploy(version)
    with pytest.raises(VerificationFailed, match=r"answers .* for output .* its exporter .* values differ"):
        site.verify(version)
    assert site.entry().versions == (1,)
    assert site.entry().labels == {"stable": 1, "canary": 1}
    np.testing.assert_allclose(site.answers(images, "canary"), expected[1]["logits"], rtol=1e-5)
    with pytest.raises(ReleaseNotFound, match="not deployed"):
        site.promote(version)
    assert site.store.champion()["version"] == 1


def test_a_first_version_that_answers_otherwise_leaves_nothing(site, exports):
    version = site.publish(exports[1])
    site.deploy(version)
    with pytest.raises(VerificationFailed):
        Rollout(*site.where).verify("digits", version, Golden.load(exports[2] / "golden.json"))
    assert site.entry() is None
    Rollout(*site.where).abandon("digits", version)


def test_the_stable_version_is_never_abandoned(site, exports, images):
    site.release(exports[1])
    Rollout(*site.where).abandon("digits", 1)
    assert site.entry().labels["stable"] == 1


def test_a_replica_that_is_down_stops_the_deploy_and_the_other_gets_the_config_before(
    site, exports, images, expected
):
    site.release(exports[1])
    before = site.entry()
    version = site.publish(exports[2])
    site.replicas[1].stop()
    with pytest.raises(ServerUnavailable):
        site.deploy(version, deadline_s=10)
    assert site.entry() == before
    with PredictClient(site.servers[0], "digits") as client:
        np.testing.assert_allclose(
            client.predict({"image": images})["logits"], expected[1]["logits"], rtol=1e-5
        )
    with pytest.raises(DeadlineExceeded):
        site.promote(1, deadline_s=1.0)


def test_a_deadline_is_kept_and_undone(site, exports):
    version = site.publish(exports[1])
    with pytest.raises(DeadlineExceeded):
        site.deploy(version, deadline_s=0.0)
    assert site.entry() is None


def test_other_models_keep_their_place(site, exports, start_server, images, expected):
    site.release(exports[1])
    steps.publish_step(site.storage, "other", exports[2])
    steps.deploy_step(site.storage, "other", 1, *site.where)
    assert site.entry().labels["stable"] == 1
    loaded = Rollout(*site.where).loaded("other")
    assert loaded == {server: {1: "AVAILABLE"} for server in site.servers}
    with pytest.raises(ReleaseConflict, match="is served from"):
        Rollout(*site.where).deploy("digits", "/elsewhere", 1)


@pytest.mark.parametrize("outcome", ["fail", "unknown"])
def test_only_a_pass_is_promoted(site, exports, outcome):
    version = site.publish(exports[1])
    site.deploy(version)
    with pytest.raises(ReleaseConflict, match="may not be promoted, its gate says"):
        site.promote(version, gate={"outcome": outcome, "reasons": ["too few"]})
    assert site.store.champion() is None
    assert "stable" not in site.entry().labels


def test_a_registry_that_is_down_is_a_warning(site, exports):
    def down(name, alias, version):
        raise ConnectionError("mlflow is away")

    version = site.publish(exports[1], mlflow_version=1)
    assert site.deploy(version, alias=down)["warnings"] == [
        "alias challenger is not moved to version 1: mlflow is away"
    ]
    assert site.promote(version, alias=down)["warnings"] == [
        "alias champion is not moved to version 1: mlflow is away"
    ]
    assert site.store.champion()["version"] == 1


@pytest.mark.parametrize("servers", [[], "127.0.0.1:1", [""]])
def test_servers_must_be_a_list_of_addresses(tmp_path, servers):
    with pytest.raises(ConfigInvalid, match="servers must be a list"):
        Rollout(servers, tmp_path / "c")

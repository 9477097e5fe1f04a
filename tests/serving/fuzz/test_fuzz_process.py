"""Malformed requests against a real server process: each gets its status, and good ones are answered after it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.serving.conformance import models
from tests.serving.fuzz.attacks import Grpc, Raw, attacks
from tests.serving.fuzz.target import Target, Violation


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "conformance"
    if not root.exists():
        models.write(root)
    with Target(root, tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.mark.parametrize("kind", sorted(attacks))
def test_the_server_stands(target, kind):
    @settings(
        max_examples=40,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(attack=attacks[kind])
    def strike(attack):
        target.attack(attack)

    strike()


def test_the_tool_itself_sees_what_is_wrong(target):
    """A wrong status is found, and a dead server: else all the others would prove nothing."""
    with pytest.raises(Violation, match="is not one of"):
        target.attack(Grpc(b"", allowed=frozenset({"OK"})))
    with pytest.raises(Violation, match="is not one of"):
        target.attack(Raw(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", allowed=frozenset({"200"})))


def test_a_server_that_dies_is_seen(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "conformance"
    if not root.exists():
        models.write(root)
    with Target(root, tmp_path_factory.mktemp("fuzz-dead")) as running:
        running.process.kill()
        running.process.wait()
        with pytest.raises(Violation, match="the server died with -9"):
            running.check()


def test_every_kind_makes_attacks():
    for kind in attacks.values():
        assert isinstance(kind, st.SearchStrategy)

"""Names derived from runs, and free ports."""

import random
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.job.errors import InfraError
from trainers.job.labels import dns_label, gang_name, run_slug
from trainers.job.ports import free_ports

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


@given(st.text(), st.integers(12, 63))
def test_dns_label_is_one(text, limit):
    label = dns_label(text, limit=limit)
    assert DNS_LABEL.fullmatch(label)
    assert len(label) <= limit
    assert dns_label(label, limit=limit) == label


@given(st.text())
def test_run_slug_is_a_folder_and_a_label_value(text):
    slug = run_slug(text)
    assert LABEL_VALUE.fullmatch(slug)
    assert len(slug) <= 63
    assert run_slug(slug) == slug


@given(st.text(), st.text())
def test_gang_name_names_a_service(pipeline, run_id):
    name = gang_name(pipeline, run_id)
    assert SERVICE_NAME.fullmatch(name)
    assert len(name) <= 40
    assert dns_label(name, limit=40) == name


@given(st.text(), st.text())
def test_different_texts_have_different_names(one, other):
    if one != other:
        assert run_slug(one) != run_slug(other)
        assert gang_name("p", one) != gang_name("p", other)
        assert gang_name(one, "r") != gang_name(other, "r")


NAMES = [
    ("manual__2026-10-07T10:00:00+00:00", r"manual__2026-10-07T10-00-00-00-00-[0-9a-f]{8}"),
    ("scheduled-1", "scheduled-1"),
    ("_private", r"private-[0-9a-f]{8}"),
    ("///", r"x-[0-9a-f]{8}"),
    ("..", r"x-[0-9a-f]{8}"),
    ("r" * 80, r"r{54}-[0-9a-f]{8}"),
]


@pytest.mark.parametrize(("run_id", "slug"), NAMES)
def test_run_slugs(run_id, slug):
    assert re.fullmatch(slug, run_slug(run_id))


def test_gang_names():
    assert re.fullmatch(r"digits-retrain-[0-9a-f]{8}-[0-9a-f]{8}", gang_name("digits_retrain", "run"))
    assert re.fullmatch(r"g-2026-digits-[0-9a-f]{8}", gang_name("2026-digits", "run"))
    assert gang_name("p", "r", "train") != gang_name("p", "r", "tune")
    assert gang_name("p", "r") == gang_name("p", "r")


def test_free_ports_are_different_and_can_be_bound():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert free_ports(0) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_free_ports_walk_round_a_listener(host):
    first = free_ports(1, rng=random.Random(7))[0]
    with socket.socket() as server:
        try:
            server.bind((host, first))
        except OSError as e:
            pytest.skip(f"{host} can't be bound on this machine: {e}")
        server.listen()
        assert first not in free_ports(20, rng=random.Random(7))


def test_no_ports_left(monkeypatch):
    monkeypatch.setattr("trainers.job.ports._HIGHEST", 20003)
    with pytest.raises(InfraError, match="of 9 free ports from 20000 to 20003"):
        free_ports(9)

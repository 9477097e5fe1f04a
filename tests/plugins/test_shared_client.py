"""Clients of the triggerer: many waiting pods share one, credentials are read anew, nothing stays open."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from trainyard.kubelet import FakeCluster
from trainyard.triggers import cluster_api
from trainyard.triggers.cluster_api import ApiRefused, Cluster


@pytest.fixture(scope="module")
def fake():
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(fake):
    return Cluster(extras={"kube_config_path": fake.kubeconfig})


async def _client_of(cluster: Cluster, others: list[object], count: int = 1) -> object:
    async with cluster.connect() as api:
        await api.read_pod("default", "nobody")
        others.append(api)
        while len(others) < count:  # all are open at once
            await asyncio.sleep(0.01)
        return api._client


def test_those_who_ask_together_share_a_client(cluster):
    async def run():
        others: list[object] = []
        clients = await asyncio.gather(*(_client_of(cluster, others, 20) for _ in range(20)))
        # None is left, and the next one is another.
        assert not cluster_api._clients[asyncio.get_running_loop()]
        return {*clients, await _client_of(cluster, [])}

    assert len(asyncio.run(run())) == 2


def test_a_client_is_not_given_to_others_for_ever(cluster, monkeypatch):
    monkeypatch.setattr(cluster_api, "SHARED_SECONDS", 0.0)

    async def run():
        async with cluster.connect() as first, cluster.connect() as second:
            assert await first.read_pod("default", "nobody") is None
            assert await second.read_pod("default", "nobody") is None
            return first._client is second._client

    assert not asyncio.run(run())


def test_refused_credentials_are_read_anew(fake, tmp_path: Path):
    kubeconfig = tmp_path / "kubeconfig"
    right = Path(fake.kubeconfig).read_text()
    kubeconfig.write_text(right.replace(fake.kubelet.token, "expired"))
    cluster = Cluster(extras={"kube_config_path": str(kubeconfig)})

    async def run():
        # Somebody who follows a log keeps the old client open.
        async with cluster.connect():
            with pytest.raises(ApiRefused, match="401"):
                async with cluster.connect() as api:
                    await api.read_pod("default", "nobody")
            kubeconfig.write_text(right)
            async with cluster.connect() as api:
                assert await api.read_pod("default", "nobody") is None

    asyncio.run(run())


def test_one_who_is_cancelled_while_it_opens_leaves_it_to_the_others(cluster):
    async def run():
        first = asyncio.ensure_future(_client_of(cluster, []))
        second = asyncio.ensure_future(_client_of(cluster, []))
        await asyncio.sleep(0)
        first.cancel()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(run())


def test_a_client_that_can_not_be_opened_is_tried_again(tmp_path: Path, fake):
    kubeconfig = tmp_path / "kubeconfig"
    cluster = Cluster(extras={"kube_config_path": str(kubeconfig)})

    async def run():
        with pytest.raises(Exception, match="kube"):
            await _client_of(cluster, [])
        kubeconfig.write_text(Path(fake.kubeconfig).read_text())
        await _client_of(cluster, [])

    asyncio.run(run())

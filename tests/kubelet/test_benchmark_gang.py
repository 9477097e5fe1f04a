"""benchmarks/gang.py: its proxy counts each request once, its bare pods run, its verdicts follow the figures."""

from __future__ import annotations

import importlib
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gang(monkeypatch, tmp_path):
    """Its modules by name, and a folder for the word."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("GANG_BENCH_TOLD", str(tmp_path))
    monkeypatch.setenv("GANG_BENCH_PIPES", "1")
    monkeypatch.setenv("GANG_BENCH_IMAGE", "none")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith("gang"):
            del sys.modules[name]


@pytest.fixture
def place(gang, cluster, tmp_path):
    """The cluster behind a counting proxy."""
    kubeconfig = tmp_path / "proxy" / "kubeconfig"
    with gang("gang_proxy").CountingProxy(cluster.kubeconfig, kubeconfig, "default") as proxy:
        yield gang("gang_ways").Place(proxy, str(kubeconfig), cluster.core_v1(), "default")


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("POST", "/api/v1/namespaces/a/pods", "create pods"),
        ("GET", "/api/v1/namespaces/a/pods?labelSelector=x%3Dy", "list pods"),
        ("GET", "/api/v1/namespaces/a/pods?labelSelector=x%3Dy&watch=True", "watch pods"),
        ("GET", "/api/v1/namespaces/a/pods/p", "get pods"),
        ("GET", "/api/v1/namespaces/a/pods/p/log?follow=true", "get pods/log"),
        ("PATCH", "/api/v1/namespaces/a/pods/p", "patch pods"),
        ("DELETE", "/apis/batch/v1/namespaces/a/jobs/j", "delete jobs"),
        ("GET", "/version/", "get /version/"),
    ],
)
def test_requests_are_told_apart(gang, method, target, kind):
    assert gang("gang_proxy").kind_of(method, target) == kind


def test_each_request_is_counted_once_and_answered(place):
    with config.new_client_from_config(place.kubeconfig) as connection:
        api = client.CoreV1Api(connection)
        for _ in range(3):
            api.list_namespaced_pod("default")
        body = {"metadata": {"name": "counted"}, "data": {"text": "x" * 200_000}}
        assert api.create_namespaced_config_map("default", body).data["text"] == "x" * 200_000
        with pytest.raises(client.ApiException, match="404"):
            api.read_namespaced_pod("nobody", "default")
        api.delete_namespaced_config_map("counted", "default")
    assert place.proxy.counts() == {
        "list pods": 3,
        "create configmaps": 1,
        "get pods": 1,
        "delete configmaps": 1,
    }


def test_a_stranger_gets_nothing_through_the_proxy(place):
    server = yaml.safe_load(Path(place.kubeconfig).read_text())["clusters"][0]["cluster"]["server"]
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        urllib.request.urlopen(f"{server}/api/v1/namespaces/default/pods", timeout=10)
    assert not place.proxy.counts()


def test_bare_pods_run_end_and_are_gone_with_two_requests_each(gang, place, tmp_path):
    os.mkfifo(tmp_path / "three")
    with gang("gang_ways").Limit(place) as limit:
        found = limit.measure(3, "three", 0.0)
    assert found.calls["starting"] == {"create pods": 3}
    assert found.calls["ending"] == {"watch pods": 1, "delete pods": 3}
    assert found.calls_a_replica() == pytest.approx(7 / 3)
    assert not place.api.list_namespaced_pod("default", label_selector="benchmark=three").items


def test_verdicts_follow_the_figures(gang):
    def runs(way, running, calls, cpu):
        return [
            {
                "way": way,
                "size": size,
                "running": running * size,
                "gone": 1.0,
                "calls": {
                    "starting": {"create pods": calls * size},
                    "waiting": {"get pods": 30},
                    "ending": {},
                },
                "cpu": {"scheduler": cpu * size + 1} if way != "limit" else {},
                "pss": {"scheduler": 2_000_000} if way != "limit" else {},
            }
            for size in (4, 16)
        ]

    def page(ours):
        rows = [*runs("limit", 0.1, 2, 0), *runs("ours", *ours), *runs("plain", 1.0, 14, 2.0)]
        return gang("gang_page").page({"gangs": {"cluster": False, "hold": 60.0, "slots": 8, "runs": rows}})

    good = page((0.5, 5, 0.5))
    assert "not reached" not in good
    assert "| 16 running after the limit's | 10 s | 6.4 s | reached |" in good
    assert "| 16 | **Trainyard** | 8.0 s | 1.0 s | 5.0 | 1.9 | 0.56 | 0.00 | 0.50 |" in good
    bad = page((0.8, 8, 1.2))
    assert "| 16 running after the limit's | 10 s | 11.2 s | **not reached** |" in bad
    assert "| calls a replica, to the plain way's, 16 | under 50% | 57% | **not reached** |" in bad
    assert "| CPU-s a replica, to the plain way's, 16 | under 50% | 61% | **not reached** |" in bad

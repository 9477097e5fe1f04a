"""The canary's rules: what is said of which numbers, who goes where, and what is remembered between looks."""

from __future__ import annotations

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import BadRequest, ConfigInvalid, DeadlineExceeded, ModelNotFound, ServerFailed
from serving.release.canary import FAIL, PASS, UNKNOWN, WAITING, Canary, Counts, judge
from serving.release.counts import by_clients, by_group, by_version
from serving.release.watch import _add
from serving.server.metrics import Metrics
from serving.sides import Sides
from serving.traffic import CallCounter, Route, Share, in_share, read_counts, read_shares, set_share

CANARY = Canary(min_requests=100, duration_s=60, max_error_rate=0.01, max_latency_ratio=2.0)


def counts(requests, errors=0, micros=1000.0):
    return Counts(requests, errors, {micros / 2: 0, micros: requests - errors})


@pytest.mark.parametrize(
    ("stable", "candidate", "elapsed", "outcome", "word"),
    [
        (counts(1000), counts(0), 0, WAITING, "0 requests of the candidate"),
        (counts(1000), counts(200), 59, WAITING, "200 requests"),
        (counts(1000), counts(200), 60, PASS, "0.00% failed"),
        (counts(1000), counts(99), 60, WAITING, "99 requests"),
        (counts(99), counts(200), 60, WAITING, "99 of stable"),
        (counts(1000), counts(99), 240, UNKNOWN, "not the 100"),
        (counts(0), counts(0), 240, UNKNOWN, "0 requests"),
        (counts(1000), counts(3, 3), 1, FAIL, "3 of the candidate's 3 requests failed"),
        (counts(1000), counts(100, 2), 30, WAITING, "100 requests"),
        (counts(1000), counts(100, 2), 60, FAIL, "2 of the candidate's 100"),
        (counts(1000), counts(100, 1), 60, PASS, "1.00% failed"),
        (counts(1000, 50), counts(200, 11), 60, PASS, "5.50% failed"),
        (counts(1000, 50), counts(200, 13), 60, FAIL, "at stable 5.00%"),
        (counts(1000), counts(200, micros=2500.0), 59, WAITING, "200 requests"),
        (counts(1000), counts(200, micros=2500.0), 60, FAIL, "2.50 times"),
        (counts(1000), counts(200, micros=5000.0), 5, FAIL, "5.00 times"),
        (counts(1000), counts(200, micros=1900.0), 60, PASS, "1.90 times"),
    ],
)
def test_what_is_said_of_which_numbers(stable, candidate, elapsed, outcome, word):
    verdict = judge(CANARY, stable, candidate, elapsed)
    assert (verdict.outcome, word in verdict.reasons[0]) == (outcome, True), verdict
    json.dumps(verdict.to_json())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("share", 0),
        ("share", 1),
        ("min_requests", 0),
        ("min_requests", True),
        ("duration_s", 0),
        ("max_error_rate", 1),
        ("max_latency_ratio", 0),
        ("quantile", 1),
        ("max_wait_s", 1),
        ("on_unknown", "hope"),
    ],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ConfigInvalid, match=f"{field} of a canary must be"):
        Canary(**{field: value})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(10, 1e7), st.integers(0, 50)), max_size=8), st.floats(0.05, 0.95))
def test_quantiles_lie_within_the_buckets_and_counts_come_back_from_json(buckets, quantile):
    total = Counts(sum(n for _, n in buckets), 0, dict(buckets))
    assert Counts.from_dict(json.loads(json.dumps(total.to_dict()))).requests == total.requests
    value = total.latency_us(quantile)
    filled = [bound for bound, count in dict(buckets).items() if count]
    assert (value is None) == (not filled)
    if filled:
        assert 0 <= value <= max(filled)
    assert (total + Counts()).since(total) == Counts(0, 0, dict.fromkeys(dict(buckets), 0))


def test_counts_that_are_none_are_refused():
    with pytest.raises(ValueError, match="must have requests"):
        Counts.from_dict({"requests": 1})


def test_a_key_stays_on_its_side_and_a_larger_share_keeps_all_it_had():
    keys = [f"user-{i}" for i in range(4000)]
    small, large = ({k for k in keys if in_share("m", k, share)} for share in (0.1, 0.3))
    assert small < large
    assert abs(len(small) / len(keys) - 0.1) < 0.02
    assert {k for k in keys if in_share("other", k, 0.1)} != small, "not the same users for every model"
    assert not in_share("m", b"x", 0.0)
    assert in_share("m", b"x", 1.0)


def test_a_share_is_followed_and_ends_with_its_lease(tmp_path):
    path, now, clock = tmp_path / "serving" / "traffic.json", [100.0], [0.0]
    draws = iter([0.05, 0.5, 0.05, 0.05])
    route = Route("digits", path, draw=lambda: next(draws), now=lambda: now[0], clock=lambda: clock[0])
    assert not route.to_canary(None)
    set_share(path, "digits", Share(0.1, 8, until=200.0))
    set_share(path, "other", Share(0.5, 2, until=200.0))
    assert not route.to_canary(None), "looked at a moment ago"
    clock[0] = 1.0
    assert [route.to_canary(None), route.to_canary(None)] == [True, False]
    now[0] = 200.0
    assert not route.to_canary(None), "whoever watched it is gone"
    set_share(path, "digits", None)
    set_share(path, "digits", None)
    assert set(read_shares(path)) == {"other"}
    path.write_text("{")
    assert read_shares(path) == {}
    with pytest.raises(ConfigInvalid, match="share must be from 0 to 1"):
        Share(1.5, 1, 0)


def _answers(failing):
    def ask(label):
        if label in failing:
            raise failing[label]("no")
        return label

    return ask


@pytest.mark.parametrize(
    ("failing", "answer", "counted"),
    [
        ({}, "canary", {"canary": (1, 0)}),
        ({"canary": ServerFailed}, "stable", {"canary": (1, 1), "stable": (1, 0)}),
        ({"canary": BadRequest}, "stable", {"canary": (1, 1), "stable": (1, 0)}),
        ({"canary": ModelNotFound}, "stable", {"stable": (1, 0)}),
        ({"canary": BadRequest, "stable": BadRequest}, BadRequest, {}),
        ({"canary": DeadlineExceeded}, DeadlineExceeded, {"canary": (1, 1)}),
        ({"canary": ServerFailed, "stable": ServerFailed}, ServerFailed, {"stable": (1, 1)}),
    ],
)
def test_what_a_canary_can_not_answer_is_asked_of_stable_and_counted_where_it_belongs(
    tmp_path, failing, answer, counted
):
    counter = CallCounter(tmp_path, "m")
    sides = Sides("m", 1.0, counter)
    if isinstance(answer, str):
        assert sides.call("stable", None, _answers(failing)) == answer
    else:
        with pytest.raises(answer):
            sides.call("stable", None, _answers(failing))
    assert {side: (c.requests, c.errors) for side, c in counter.counts().items()} == counted
    sides.close()
    assert {side: c.requests for side, c in read_counts(tmp_path, "m")[counter.path.name].items()} == {
        side: requests for side, (requests, _) in counted.items()
    }


def test_clients_files_are_read_by_candidate_and_broken_ones_left_out(tmp_path, caplog):
    counter = CallCounter(tmp_path, "m")
    counter.count("canary:8", True, 5.0)
    counter.count("stable", True, 1e12)
    counter.close()
    (tmp_path / "m" / "broken.json").write_text("{")
    (sides,) = by_clients(tmp_path, "m", 8).values()
    assert (sides["canary"].requests, sides["stable"].buckets[math.inf]) == (1, 1)
    assert "broken.json is left out" in caplog.text
    (sides,) = by_clients(tmp_path, "m", 9).values()
    assert sides["canary"] == Counts()


def test_a_counter_that_can_not_write_is_a_warning(tmp_path, caplog):
    (tmp_path / "m").write_text("a file where a folder must be")
    CallCounter(tmp_path, "m").close()
    assert "can't be written" in caplog.text


@pytest.fixture
def pages():
    """An HTTP server whose /NAME/monitoring/prometheus/metrics is the page of that name."""
    texts = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = texts[self.path.split("/")[1]].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield texts, lambda name: f"http://127.0.0.1:{server.server_port}/{name}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_prometheus_pages_are_read_by_version_and_by_group(pages):
    texts, url = pages
    metrics = Metrics()
    for version, status, micros in (
        (7, "OK", 900.0),
        (7, "OK", 40.0),
        (8, "INTERNAL", 1.0),
        (8, "OK", 2000.0),
    ):
        metrics.request("digits", "Predict", "GRPC", status, micros)
        metrics.version_request("digits", version, status, micros)
    metrics.version_request("other", 7, "OK", 1.0)
    texts["a"] = metrics.page()
    (sides,) = by_version([url("a"), "http://127.0.0.1:1"], "digits", 7, 8).values()
    assert [(sides[s].requests, sides[s].errors) for s in ("stable", "canary")] == [(2, 0), (2, 1)]
    assert sum(sides["stable"].buckets.values()) == 2
    assert 1600 < sides["canary"].latency_us(0.5) < 2500
    assert by_version([url("a")], "unknown", 7, 8) == {}

    other = Metrics()
    other.request("digits", "Predict", "GRPC", "OK", 10.0)
    texts["b"] = other.page() + "nonsense\n:tensorflow:serving:request_count nonsense\n"
    sides = by_group([url("a")], [url("b")], "digits")
    assert sides[url("a")]["stable"].requests == 4
    assert sides[url("b")]["canary"].requests == 1


def test_sources_that_restart_or_come_later_are_counted_right():
    state = {"first": True, "seen": {}, "total": {s: Counts().to_dict() for s in ("stable", "canary")}}

    def look(**sources):
        _add(state, {name: {"stable": counts(n), "canary": counts(n // 10)} for name, n in sources.items()})
        return state["total"]["stable"]["requests"], state["total"]["canary"]["requests"]

    assert look(a=1000) == (0, 0), "what was before the first look doesn't count"
    assert look(a=1100) == (100, 10)
    assert look(a=1100, b=50) == (150, 15), "a source that came since then counts whole"
    assert look(a=30, b=50) == (180, 18), "one that restarted counts from nothing"
    assert look(b=60) == (190, 19), "one that does not answer keeps what it had"
    assert look(a=40, b=60) == (200, 20)

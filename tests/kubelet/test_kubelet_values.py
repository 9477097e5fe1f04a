"""Tables for the parts that need no process: selectors, quantities, patches, expansion, mounts, times."""

from __future__ import annotations

import time
from decimal import Decimal
from pathlib import Path

import pytest
from trainyard.kubelet.clock import epoch, log_stamp, timestamp
from trainyard.kubelet.environment import ALWAYS_SET, PASSED_THROUGH, base_environment, expand
from trainyard.kubelet.errors import ApiError
from trainyard.kubelet.matching import field_selector, label_selector
from trainyard.kubelet.patching import apply_patch
from trainyard.kubelet.quantity import format_bytes, parse_quantity
from trainyard.kubelet.resources import EVENTS, PODS, Resource
from trainyard.kubelet.scheduler import NodeSpec
from trainyard.kubelet.status import ContainerState, phase_of
from trainyard.kubelet.store import HISTORY, Store
from trainyard.kubelet.volumes import Mounts

LABELS = {"app": "web", "tier": "front", "try_number": "1", "example.com/x": "y"}


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        (None, True),
        ("", True),
        ("app=web", True),
        ("app==web", True),
        ("app = web , tier = front", True),
        ("app=api", False),
        ("app!=api", True),
        ("app!=web", False),
        ("missing!=x", True),
        ("app in (web, api)", True),
        ("app in (api)", False),
        ("app notin (api,cli),tier in (front)", True),
        ("missing notin (a)", True),
        ("app", True),
        ("missing", False),
        ("!missing", True),
        ("!app", False),
        ("example.com/x=y", True),
        ("app=web,try_number=1,already_checked!=True,!airflow-worker", True),
        ("app=", False),
    ],
)
def test_label_selectors_choose_as_on_a_cluster(selector, chosen):
    assert label_selector(selector)({"metadata": {"labels": LABELS}}) is chosen


def test_a_label_selector_sees_an_object_without_labels():
    assert label_selector("!app")({"metadata": {}})
    assert not label_selector("app")({"metadata": {"labels": None}})


@pytest.mark.parametrize("selector", ["a in b", "a=b=c", "=x", "a,,b", "a notin (b", "!a=b"])
def test_a_bad_label_selector_is_refused(selector):
    with pytest.raises(ApiError, match="unable to parse requirement") as caught:
        label_selector(selector)
    assert caught.value.code == 400


@pytest.mark.parametrize(
    ("resource", "selector", "chosen"),
    [
        (PODS, None, True),
        (PODS, "metadata.name=a", True),
        (PODS, "metadata.name==a,status.phase!=Failed", True),
        (PODS, "status.phase=Failed", False),
        (PODS, "spec.nodeName=", True),
        (EVENTS, "involvedObject.name=a", False),
        (EVENTS, "source=kubelet", True),
    ],
)
def test_field_selectors(resource, selector, chosen):
    obj = {
        "metadata": {"name": "a"},
        "status": {"phase": "Running"},
        "involvedObject": {"name": "b"},
        "source": {"component": "kubelet"},
    }
    assert field_selector(resource, selector)(obj) is chosen


@pytest.mark.parametrize("selector", ["spec.image=x", "metadata.name", "status.phase in (a)"])
def test_a_bad_field_selector_is_refused(selector):
    with pytest.raises(ApiError, match=r"not supported|invalid selector"):
        field_selector(PODS, selector)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2Gi", Decimal(2**31)),
        ("500m", Decimal("0.5")),
        ("1k", Decimal(1000)),
        ("1e3", Decimal(1000)),
        ("1.5", Decimal("1.5")),
        (".5Mi", Decimal(2**19)),
        (4, Decimal(4)),
        ("100n", Decimal("1E-7")),
    ],
)
def test_quantities(text, number):
    assert parse_quantity(text) == number


@pytest.mark.parametrize("text", ["", "2GB", "x", "1 Gi", True, None, "Gi"])
def test_a_bad_quantity_is_refused(text):
    with pytest.raises(ValueError, match="quantity must be"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**41, "2.0 TiB")]
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y22"),
        ("$(NOPE)", "$(NOPE)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $(A", "$A ${A} $(A"),
        ("$", "$"),
    ],
)
def test_variables_expand_as_kubernetes_does_it(text, result):
    assert expand(text, {"A": "1", "B": "22"}) == result


def test_a_container_inherits_nothing_that_could_be_a_secret():
    environ = {
        "PATH": "/bin",
        "HOME": "/home/x",
        "LC_ALL": "C",
        "DB_PASSWORD": "p",
        "AIRFLOW__CORE__FERNET_KEY": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "PYTHONPATH": "/x",
    }
    env = base_environment(environ)
    assert set(env) == {"PATH", "HOME", "LC_ALL", *ALWAYS_SET}
    assert env["PATH"].endswith(":/bin")
    assert not [key for key in PASSED_THROUGH if "TOKEN" in key or "PASSWORD" in key or "AIRFLOW" in key]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/data", "/v/1"),
        ("/data/", "/v/1/"),
        ("/data/a b", "/v/1/a b"),
        ("--in=/data/x,/data/y", "--in=/v/1/x,/v/1/y"),
        ("file:///data/x", "file:///v/1/x"),
        ('{"p": "/data"}', '{"p": "/v/1"}'),
        ("/database /data-old /data.bak", "/database /data-old /data.bak"),
        ("/x/data ./data", "/x/data ./data"),
        ("/data/inner/z", "/v/2/z"),
        ("/data/innermost", "/v/1/innermost"),
        ("/same/x", "/same/x"),
    ],
)
def test_mount_paths_are_replaced_at_their_boundaries(text, result):
    mounts = Mounts((("/data", "/v/1"), ("/data/inner/", "/v/2"), ("/same", "/same"), ("/", "/v/3")))
    assert mounts.resolve(text) == result


def test_a_replaced_path_is_not_replaced_again():
    assert Mounts((("/a", "/b/x"), ("/b", "/c"))).resolve("/a /b") == "/b/x /c"


OBJECT = {"metadata": {"labels": {"a": "1", "b": "2"}}, "spec": {"containers": [{"name": "x", "image": "i"}]}}
STRATEGIC, MERGE, JSON = (
    f"application/{kind}+json" for kind in ("strategic-merge-patch", "merge-patch", "json-patch")
)


@pytest.mark.parametrize(
    ("kind", "patch", "where", "value"),
    [
        (
            MERGE,
            {"metadata": {"labels": {"a": None, "c": "3"}}},
            ("metadata", "labels"),
            {"b": "2", "c": "3"},
        ),
        (
            MERGE,
            {"spec": {"containers": [{"name": "y"}]}},
            ("spec", "containers"),
            [{"name": "y"}],
        ),
        (
            STRATEGIC,
            {"spec": {"containers": [{"name": "x", "image": "j"}]}},
            ("spec", "containers"),
            [{"name": "x", "image": "j"}],
        ),
        (
            STRATEGIC,
            {"spec": {"containers": [{"name": "x", "$patch": "delete"}, {"name": "y"}]}},
            ("spec", "containers"),
            [{"name": "y"}],
        ),
        (STRATEGIC, {"spec": {"containers": ["z"]}}, ("spec", "containers"), ["z"]),
        (
            JSON,
            [{"op": "add", "path": "/metadata/labels/a~1b", "value": "x"}],
            ("metadata", "labels", "a/b"),
            "x",
        ),
        (
            JSON,
            [{"op": "replace", "path": "/metadata/labels/a", "value": "9"}],
            ("metadata", "labels", "a"),
            "9",
        ),
        (JSON, [{"op": "remove", "path": "/metadata/labels/a"}], ("metadata", "labels"), {"b": "2"}),
        (JSON, [{"op": "add", "path": "/spec/containers/-", "value": 1}], ("spec", "containers", 1), 1),
        (JSON, [{"op": "replace", "path": "/spec/containers/0", "value": 1}], ("spec", "containers"), [1]),
        (
            JSON,
            [{"op": "test", "path": "/metadata/labels/a", "value": "1"}],
            ("metadata", "labels", "a"),
            "1",
        ),
        (
            JSON,
            [{"op": "move", "from": "/metadata/labels/a", "path": "/metadata/labels/z"}],
            ("metadata", "labels"),
            {"b": "2", "z": "1"},
        ),
        (
            JSON,
            [{"op": "copy", "from": "/metadata/labels/a", "path": "/metadata/labels/z"}],
            ("metadata", "labels", "z"),
            "1",
        ),
    ],
)
def test_patches(kind, patch, where, value):
    result = apply_patch(OBJECT, patch, f"{kind}; charset=utf-8")
    for key in where:
        result = result[key]
    assert result == value
    assert OBJECT["metadata"]["labels"] == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("kind", "patch", "code"),
    [
        (JSON, {"metadata": {}}, 400),
        (MERGE, [], 400),
        ("application/apply-patch+yaml", {}, 415),
        (JSON, [{"op": "test", "path": "/metadata/labels/a", "value": "2"}], 422),
        (JSON, [{"op": "remove", "path": "/metadata/labels/nope"}], 422),
        (JSON, [{"op": "replace", "path": "/nope/x", "value": 1}], 422),
        (JSON, [{"op": "add", "path": "/spec/containers/x", "value": 1}], 422),
        (JSON, [{"op": "add", "path": "metadata", "value": 1}], 400),
        (JSON, [{"op": "add", "path": "", "value": {}}], 422),
        (JSON, [{"op": "jump", "path": "/a"}], 400),
        (JSON, ["x"], 400),
    ],
)
def test_a_bad_patch_is_refused(kind, patch, code):
    with pytest.raises(ApiError) as caught:
        apply_patch(OBJECT, patch, kind)
    assert caught.value.code == code


def _state(**state):
    last = state.pop("last", {})
    return ContainerState({"name": "c"}, state, last=last)


def _ended(code):
    return _state(terminated={"exitCode": code})


RUNNING, WAITING = _state(running={}), _state(waiting={})
LOOPING = _state(waiting={}, last={"terminated": {}})


@pytest.mark.parametrize(
    ("inits", "mains", "policy", "phase"),
    [
        ([], [WAITING], "Never", "Pending"),
        ([], [RUNNING], "Never", "Running"),
        ([], [RUNNING, _ended(1)], "Never", "Running"),
        ([], [_ended(0)], "Never", "Succeeded"),
        ([], [_ended(0), _ended(1)], "Never", "Failed"),
        ([], [_ended(1)], "OnFailure", "Running"),
        ([], [_ended(0)], "OnFailure", "Succeeded"),
        ([], [_ended(0)], "Always", "Running"),
        ([], [LOOPING], "OnFailure", "Running"),
        ([RUNNING], [WAITING], "Never", "Pending"),
        ([_ended(1)], [WAITING], "Never", "Failed"),
        ([_ended(1)], [WAITING], "OnFailure", "Pending"),
        ([_ended(0)], [RUNNING], "Never", "Running"),
    ],
)
def test_phases_add_up_as_in_the_kubelet(inits, mains, policy, phase):
    assert phase_of(inits, mains, policy) == phase


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:01:00Z", 60),
        ("1970-01-01T00:01:00.123456789Z", 60.123456),
        ("1970-01-01t00:01:00.5z", 60.5),
        ("1970-01-01T01:01:00+01:00", 60),
    ],
)
def test_times_are_read(text, seconds):
    assert epoch(text) == pytest.approx(seconds)


def test_times_are_written_and_stamps_sort():
    assert epoch(timestamp(1e9)) == 1e9
    stamps = [log_stamp(n) for n in (0, 1, 999_999_999, 10**18, time.time_ns())]
    assert stamps == sorted(stamps)
    assert {len(stamp) for stamp in stamps} == {30}


def test_a_time_without_a_zone_is_refused():
    with pytest.raises(ValueError, match="zone"):
        epoch("2026-01-01T00:00:00")


@pytest.mark.parametrize("fields", [{"cpu": 0}, {"memory": -1}, {"gpus": -1}, {"max_pods": 0}])
def test_a_node_must_make_sense(fields):
    with pytest.raises(ValueError, match="must"):
        NodeSpec(**{"name": "n", "cpu": 1, "memory": 1, **fields})


def test_a_plural_is_lower_case():
    with pytest.raises(ValueError, match="lower case"):
        Resource("Pods", "Pod")


def test_the_store_tells_a_late_watcher_to_list_again():
    store = Store()
    for i in range(HISTORY + 10):
        store.create(EVENTS, {"metadata": {"name": f"e{i}", "namespace": "n"}})
    with pytest.raises(ApiError) as caught:
        store.changes(2, timeout=0)
    assert caught.value.code == 410
    assert len(store.changes(store.version - 5, timeout=0)) == 5
    with pytest.raises(ApiError, match="too old"):
        store.changes(0, timeout=0)


def test_the_store_survives_its_process_and_leaves_out_what_is_broken(tmp_path: Path, caplog):
    store = Store(tmp_path)
    made = store.create(PODS, {"metadata": {"name": "a", "namespace": "n"}})
    store.create(EVENTS, {"metadata": {"name": "e", "namespace": "n"}})
    (tmp_path / "pods" / "n" / "b.json").write_text("{")
    (tmp_path / "things" / "n").mkdir(parents=True)
    (tmp_path / "things" / "n" / "c.json").write_text("{}")
    again = Store(tmp_path)
    assert again.list(PODS)[0] == [made]
    assert again.list(EVENTS)[0] == []
    assert "b.json is not an object of ours" in caplog.text
    assert (tmp_path / "pods" / "n" / "a.json").stat().st_mode & 0o777 == 0o600

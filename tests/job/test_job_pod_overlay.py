"""What an author may lay over pods, and what stays the gang's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.job.errors import InvalidSpec
from trainers.job.placement import Placement
from trainers.job.plan import Cluster, Plan, make_plan
from trainers.job.pod_overlay import check_pod_overlay, merge_pod_overlays
from trainers.job.resources import Resources
from trainers.job.spec import Strategy, TrainingJob, standard_roles

CACHE = {"spec": {"volumes": [{"name": "cache", "emptyDir": {}}]}}
LABEL = "trainyard.io/gang"


@pytest.mark.parametrize(
    ("overlay", "words"),
    [
        ({"status": {}}, "pod must have no fields but metadata, spec, got ['status']"),
        ({"metadata": {"name": "x"}}, "pod.metadata must have no fields but labels, annotations"),
        ({"metadata": {"labels": {LABEL: "other"}}}, "pod.metadata.labels must not begin with trainyard.io/"),
        ({"spec": {"hostname": "x"}}, "pod.spec.hostname must be left to the gang"),
        ({"spec": {"subdomain": "x"}}, "pod.spec.subdomain must be left to the gang"),
        ({"spec": {"restartPolicy": "Always"}}, "pod.spec.restartPolicy must be left to the gang"),
        ({"spec": {"activeDeadlineSeconds": 1}}, "budgets.total is the deadline"),
        ({"spec": {"containers": [{}]}}, "pod.spec.containers must have a name each"),
        ({"spec": {"containers": {"name": "base"}}}, "pod.spec.containers must be a list"),
        (
            {"spec": {"containers": [{"name": "base", "command": ["sh"]}]}},
            "pod.spec.containers[base].command must be left to the role",
        ),
        (
            {"spec": {"containers": [{"name": "base", "image": "x"}]}},
            "pod.spec.containers[base].image must be left to the role",
        ),
        (
            {
                "spec": {
                    "containers": [{"name": "base", "env": [{"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}]}]
                }
            },
            "env[AWS_SECRET_ACCESS_KEY] must come from a Secret",
        ),
        (
            {"spec": {"initContainers": [{"name": "a", "env": [{"name": "DB_PASSWORD", "value": "x"}]}]}},
            "env[DB_PASSWORD] must come from a Secret",
        ),
        (
            {"spec": {"containers": [{"name": "base", "env": ["A=1"]}]}},
            "be a list of {name, value or valueFrom}",
        ),
        ({"spec": object()}, "pod must be JSON values"),
        ([], "pod must be a mapping"),
    ],
)
def test_what_the_gang_stands_on_is_refused_by_name(overlay: Any, words: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        check_pod_overlay("pod", overlay)
    assert words in str(refused.value)


def test_secrets_by_reference_and_sidecars_of_any_command_are_taken() -> None:
    secret = {"name": "DB_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "db", "key": "password"}}}
    overlay = {
        "spec": {
            "containers": [
                {"name": "base", "env": [secret, {"name": "LEVEL", "value": "debug"}]},
                {"name": "proxy", "image": "proxy:1", "command": ["proxy"]},
            ]
        }
    }
    assert dict(check_pod_overlay("pod", overlay)) == overlay


def test_a_roles_overlay_lies_on_the_jobs_own() -> None:
    mount = {"name": "cache", "mountPath": "/cache"}
    base = {
        "spec": {
            "serviceAccountName": "a",
            "containers": [{"name": "base", "volumeMounts": [mount]}],
            **CACHE["spec"],
        }
    }
    over = {
        "spec": {
            "serviceAccountName": "b",
            "containers": [
                {"name": "base", "volumeMounts": [{"mountPath": "/cache", "readOnly": True}]},
                {"name": "proxy", "image": "proxy:1"},
            ],
            "volumes": [
                {"name": "cache", "emptyDir": {"medium": "Memory"}},
                {"name": "more", "emptyDir": {}},
            ],
            "tolerations": [{"key": "spot"}],
        }
    }
    merged = merge_pod_overlays(base, over)["spec"]
    assert merged["serviceAccountName"] == "b"
    assert merged["containers"][0]["volumeMounts"] == [{**mount, "readOnly": True}]
    assert [row["name"] for row in merged["containers"]] == ["base", "proxy"]
    assert merged["volumes"] == [
        {"name": "cache", "emptyDir": {"medium": "Memory"}},
        {"name": "more", "emptyDir": {}},
    ]
    assert merged["tolerations"] == [{"key": "spot"}]
    assert base["spec"]["serviceAccountName"] == "a", "merging changes neither"


_NAMED = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("abc")}, optional={"x": st.integers(0, 2)}),
    max_size=3,
    unique_by=lambda row: row["name"],
)
_OVERLAY = st.fixed_dictionaries(
    {},
    optional={
        "spec": st.fixed_dictionaries({}, optional={"volumes": _NAMED, "schedulerName": st.text(max_size=2)})
    },
)


@given(_OVERLAY, _OVERLAY, _OVERLAY)
def test_merging_keeps_all_names_and_can_be_done_in_any_grouping(a: Any, b: Any, c: Any) -> None:
    merged = merge_pod_overlays(a, b)
    names = {row["name"] for row in merged.get("spec", {}).get("volumes", [])}
    assert names == {row["name"] for each in (a, b) for row in each.get("spec", {}).get("volumes", [])}
    assert merge_pod_overlays(merged, {}) == merged
    assert merge_pod_overlays(a, a) == a
    assert merge_pod_overlays(merge_pod_overlays(a, b), c) == merge_pod_overlays(a, merge_pod_overlays(b, c))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queue": "Team A"}, "placement.queue must be the name of a Kubernetes object, or empty"),
        ({"priority_class": "-x"}, "placement.priority_class must be the name"),
        ({"nodes": "near"}, "placement.nodes must be spread, pack or empty"),
        ({"topology_key": ""}, "placement.topology_key must be a node label's name"),
    ],
)
def test_a_placement_that_can_not_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        Placement(**options)
    assert words in str(refused.value)


def _plan(**options: Any) -> Plan:
    pods = {
        "default": CACHE,
        "ps": {"spec": {"nodeSelector": {"disk": "fast"}}},
    }
    roles = standard_roles(
        Strategy("parameter_server"),
        workers=2,
        ps=1,
        resources={
            "worker": Resources(gpu=1, gpu_resource="amd.com/gpu", gpu_type="mi300", gpu_label="amd.com/type")
        },
        pods=pods,
    )
    job = TrainingJob(
        "digits", "trainers.models.digits", roles=roles, strategy=Strategy("parameter_server"), **options
    )
    return make_plan(job, Cluster.kubernetes("ml"), gang="digits-1a2b3c4d")


def test_a_plan_carries_overlays_placement_and_kueues_labels_and_comes_back_from_json() -> None:
    plan = _plan(placement=Placement("team-a", "batch", "spread", "topology.kubernetes.io/zone"))
    for replica in plan.replicas:
        assert replica.labels["kueue.x-k8s.io/queue-name"] == "team-a"
        assert replica.labels["kueue.x-k8s.io/pod-group-name"] == plan.gang
        assert replica.pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "4"
        assert replica.pod["spec"]["priorityClassName"] == "batch"
        (spread,) = replica.pod["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"] == {"matchLabels": {LABEL: plan.gang}}
        assert replica.pod["spec"]["volumes"] == CACHE["spec"]["volumes"]
        assert ("nodeSelector" in replica.pod["spec"]) == (replica.role.value == "ps")
    assert Plan.from_dict(plan.to_dict()) == plan


def test_packing_prefers_and_never_demands() -> None:
    (replica, *_) = _plan(placement=Placement(nodes="pack")).replicas
    affinity = replica.pod["spec"]["affinity"]["podAffinity"]
    assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert not any(label.startswith("kueue") for label in replica.labels)


def test_a_role_that_no_gang_has_is_refused() -> None:
    with pytest.raises(
        InvalidSpec, match="resources and pods must name default, chief, worker, ps, evaluator"
    ):
        standard_roles(Strategy(), pods={"workers": {}})


def test_gpu_names_are_checked() -> None:
    with pytest.raises(InvalidSpec, match=r"resources\.gpu_resource must be a name like"):
        Resources(gpu=1, gpu_resource="gpu")

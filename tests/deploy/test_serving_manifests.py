"""deploy/kubernetes/serving: rendered by kubectl itself, then held against the rules, one by one."""

from __future__ import annotations

import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.release.counts import METRICS_PATH
from tests.deploy.compose_file import ROOT, services

SERVING = ROOT / "deploy" / "kubernetes" / "serving"
OVERLAYS = ("base", "object-store", "canary", "embedded", "embedded-tokens")
EMBEDDED = ("embedded", "embedded-tokens")
OUR_IMAGES = {"trainyard-serving:0.1.0"}  # not among compose's, which has TensorFlow Serving
EACH = pytest.mark.parametrize("overlay", OVERLAYS)
Document = dict[str, Any]


def _render(overlay: str) -> list[Document]:
    if overlay == "base" and shutil.which("kubectl") is None:  # it patches nothing, so its files say all
        files = yaml.safe_load((SERVING / "base" / "kustomization.yaml").read_text())["resources"]
        texts = [(SERVING / "base" / file).read_text() for file in files]
        return [document for text in texts for document in yaml.safe_load_all(text)]
    if shutil.which("kubectl") is None:
        pytest.skip("overlays are rendered by `kubectl kustomize`, and there is no kubectl here")
    done = subprocess.run(
        ["kubectl", "kustomize", str(SERVING / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no deprecated field, no warning"
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def rendered() -> Any:
    known: dict[str, list[Document]] = {}

    def get(overlay: str) -> list[Document]:
        if overlay not in known:
            known[overlay] = _render(overlay)
        return known[overlay]

    return get


def _of(documents: list[Document], kind: str) -> dict[str, Document]:
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def _pods(documents: list[Document]) -> list[Document]:
    return [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Deployment"]


def _containers(pod: Document) -> list[Document]:
    return [*pod["containers"], *pod.get("initContainers", [])]


def test_every_file_is_used_by_its_kustomization() -> None:
    for overlay in OVERLAYS:
        text = (SERVING / overlay / "kustomization.yaml").read_text()
        for path in (SERVING / overlay).glob("*.yaml"):
            assert path.name == "kustomization.yaml" or f"{path.name}\n" in text, path


@EACH
def test_pods_keep_to_the_restricted_pod_security_level(rendered: Any, overlay: str) -> None:
    for pod in _pods(rendered(overlay)):
        for forbidden in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            assert not pod.get(forbidden)
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not security.get("sysctls")
        allowed = {
            "configMap",
            "csi",
            "emptyDir",
            "ephemeral",
            "persistentVolumeClaim",
            "projected",
            "secret",
        }
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= allowed, volume
        for container in _containers(pod):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own["readOnlyRootFilesystem"] is True, "beyond the level"
            assert not own.get("privileged")
            assert all("hostPort" not in port for port in container.get("ports", ()))
        assert pod["automountServiceAccountToken"] is False
        assert pod["serviceAccountName"] in _of(rendered(overlay), "ServiceAccount")


@EACH
def test_every_mount_has_its_volume_and_servers_only_read_models(rendered: Any, overlay: str) -> None:
    for pod in _pods(rendered(overlay)):
        volumes = {volume["name"] for volume in pod["volumes"]}
        used = {mount["name"] for container in _containers(pod) for mount in container["volumeMounts"]}
        assert used == volumes
        (server,) = pod["containers"]
        for mount in server["volumeMounts"]:
            assert mount.get("readOnly") or mount["mountPath"] == "/tmp"
        config = next(a for a in server["args"] if a.startswith("--model_config_file=")).partition("=")[2]
        assert any(config.startswith(f"{mount['mountPath']}/") for mount in server["volumeMounts"])
        for container in _containers(pod):
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]


@EACH
def test_images_are_pinned_as_compose_has_them(rendered: Any, overlay: str) -> None:
    ours = {service["image"] for service in services().values()} | OUR_IMAGES
    for pod in _pods(rendered(overlay)):
        for container in _containers(pod):
            assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+", container["image"])
            assert container["image"] in ours


@EACH
def test_the_server_has_compose_s_flags(rendered: Any, overlay: str) -> None:
    def flags(arguments: list[str]) -> dict[str, str]:
        return dict(argument.removeprefix("--").split("=", 1) for argument in arguments)

    compose = flags(services()["model-server"]["command"])
    for pod in _pods(rendered(overlay)):
        arguments = pod["containers"][0]["args"]
        if overlay in EMBEDDED:  # it listens on loopback unless it is told, and says who may call
            assert arguments[:2] == ["--host=0.0.0.0", "--allow_insecure_host"]
            ours = ("--api_token", "--admin_token", "--ready-file", "--drain_seconds")
            arguments = [a for a in arguments[2:] if not a.startswith(ours)]
        own = flags(arguments)
        assert own.pop("monitoring_config_file") == "/etc/model-server/monitoring.config"
        assert {k: v for k, v in own.items() if k != "model_config_file"} == {
            k: v for k, v in compose.items() if k not in ("model_config_file", "monitoring_config_file")
        }


@EACH
def test_probes_ask_what_they_should(rendered: Any, overlay: str) -> None:
    for pod in _pods(rendered(overlay)):
        server = pod["containers"][0]
        # Process, not model: a bad model must not restart it.
        if overlay in EMBEDDED:
            file = next(a for a in server["args"] if a.startswith("--ready-file=")).partition("=")[2]
            assert server["startupProbe"]["exec"]["command"] == ["test", "-f", file]
            assert server["livenessProbe"]["httpGet"] == {"path": METRICS_PATH, "port": "rest"}
            assert not {"grpc"} & set(server["startupProbe"] | server["livenessProbe"])
        else:
            for probe in ("startupProbe", "livenessProbe"):
                assert server[probe]["grpc"]["port"] == 8500
        ready = server["readinessProbe"]["httpGet"]
        assert re.fullmatch(r"/v1/models/\w+/labels/stable/metadata", ready["path"])
        assert ready["port"] in {port["name"] for port in server["ports"]}
        start = server["startupProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] >= 300
        sleep = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
        drained = server["readinessProbe"]["periodSeconds"] * server["readinessProbe"]["failureThreshold"]
        assert drained < sleep < pod["terminationGracePeriodSeconds"] - 10


@EACH
def test_a_rollout_never_has_fewer_than_before(rendered: Any, overlay: str) -> None:
    for deployment in _of(rendered(overlay), "Deployment").values():
        assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    budget = _of(rendered(overlay), "PodDisruptionBudget")["model-server"]["spec"]
    assert budget["maxUnavailable"] == 1
    scaler = _of(rendered(overlay), "HorizontalPodAutoscaler")["model-server"]["spec"]
    assert scaler["minReplicas"] >= 2, "one may always go"
    assert "replicas" not in _of(rendered(overlay), "Deployment")["model-server"]["spec"], "the autoscaler's"
    assert scaler["scaleTargetRef"]["name"] == "model-server"


@EACH
def test_selectors_and_ports_agree(rendered: Any, overlay: str) -> None:
    documents = rendered(overlay)
    pods = {
        name: (d["spec"]["template"]["metadata"]["labels"], d["spec"]["template"]["spec"])
        for name, d in _of(documents, "Deployment").items()
    }

    def chosen(selector: dict[str, str]) -> list[str]:
        return [name for name, (labels, _) in pods.items() if selector.items() <= labels.items()]

    for name, deployment in _of(documents, "Deployment").items():
        assert chosen(deployment["spec"]["selector"]["matchLabels"]) == [name]
        spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]
        assert chosen(spread["labelSelector"]["matchLabels"]) == [name]
    for name, service in _of(documents, "Service").items():
        (pod,) = chosen(service["spec"]["selector"])
        assert re.sub("-(replicas|headless)$", "", name) == pod
        ports = {port["name"]: port["containerPort"] for port in pods[pod][1]["containers"][0]["ports"]}
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
        assert (service["spec"].get("clusterIP") == "None") is (name != pod)
        # Callers must not be sent to a replica that is only starting; releases must see it.
        assert bool(service["spec"].get("publishNotReadyAddresses")) is name.endswith("-replicas")
    budget = _of(documents, "PodDisruptionBudget")["model-server"]["spec"]["selector"]["matchLabels"]
    assert chosen(budget) == ["model-server"]


@EACH
def test_only_named_pods_may_call_and_the_server_calls_nobody(rendered: Any, overlay: str) -> None:
    documents = rendered(overlay)
    policy = _of(documents, "NetworkPolicy")["model-server"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    for deployment in _of(documents, "Deployment").values():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    for peer in rule["from"]:
        assert peer["podSelector"]["matchLabels"] == {"trainyard.dev/model-client": "true"}
    assert {port["port"] for port in rule["ports"]} == {"grpc", "rest"}
    if overlay != "object-store":
        assert policy.get("egress", []) == []
    else:
        assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 443, 9000}


@pytest.mark.parametrize("overlay", EMBEDDED)
def test_the_embedded_server_takes_its_flags_and_tokens_come_from_a_secret(
    rendered: Any, overlay: str
) -> None:
    from serving.server.flags import parse

    (pod,) = _pods(rendered(overlay))
    (server,) = pod["containers"]
    assert server["command"] == ["python", "-m", "serving.server"]
    arguments = [a for a in server["args"] if not a.startswith("--monitoring_config_file")]
    options = parse(arguments)
    sleep = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert sleep + options.drain_s < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in server["volumeMounts"]}
    if overlay == "embedded":
        assert options.api_token_file is None
        return
    assert options.api_token_file.parent == options.admin_token_file.parent == mounts["tokens"]
    assert set(options.api_token_exempt) == {"health", "metrics", "metadata"}, "what probes ask"
    (tokens,) = [volume for volume in pod["volumes"] if volume["name"] == "tokens"]
    assert tokens["secret"] == {"secretName": "model-server-tokens", "defaultMode": 0o440}
    assert "Secret" not in {document["kind"] for document in rendered(overlay)}


def test_the_object_store_is_synced_before_and_beside_the_server(rendered: Any) -> None:
    documents = rendered("object-store")
    (pod,) = _pods(documents)
    once, beside = pod["initContainers"]
    assert "--once" in once["args"]
    assert "restartPolicy" not in once
    assert beside["restartPolicy"] == "Always"
    for container in (once, beside):
        assert container["command"] == ["python", "-m", "serving.sync"]
        assert "--target=/models" in container["args"]
        for source in container["envFrom"]:
            assert set(source) <= {"configMapRef", "secretRef"}
        assert "env" not in container, "secrets come from a Secret, and none is in a manifest"
    names = {source["configMapRef"]["name"] for source in once["envFrom"] if "configMapRef" in source}
    assert names <= set(_of(documents, "ConfigMap"))
    assert "Secret" not in {document["kind"] for document in documents}
    assert "persistentVolumeClaim" not in str(pod["volumes"])
    # The program takes these flags.
    from serving.sync import _parser

    for container in (once, beside):
        _parser().parse_args([argument.replace("$(MODEL_STORE)", "s3://x") for argument in container["args"]])


def test_the_canary_s_routes_have_services_and_all_weight_is_on_stable(rendered: Any) -> None:
    documents = rendered("canary")
    deployments = _of(documents, "Deployment")
    assert set(deployments) == {"model-server", "model-server-canary"}
    main, canary = (deepcopy(deployments[name]["spec"]["template"]["spec"]) for name in sorted(deployments))
    arguments = main["containers"][0]["args"]
    main["containers"][0]["args"] = [a.replace("models.config", "canary.config") for a in arguments]
    assert main["containers"][0]["args"] != arguments
    for pod in (main, canary):
        del pod["topologySpreadConstraints"]
    assert main == canary, "but for the config they are the same"
    for kind, port in (("GRPCRoute", 8500), ("HTTPRoute", 8501)):
        (rule,) = _of(documents, kind)["model-server"]["spec"]["rules"]
        assert [(ref["name"], ref["port"], ref["weight"]) for ref in rule["backendRefs"]] == [
            ("model-server", port, 1000),
            ("model-server-canary", port, 0),
        ]
        assert {ref["name"] for ref in rule["backendRefs"]} <= set(_of(documents, "Service"))


def test_weights_are_planned_and_applied_by_kubectl(
    rendered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from serving.errors import ConfigInvalid
    from serving.tfserving.weights import main, plan_weights

    def weights(share: float) -> list[list[int]]:
        refs = [patch.patch["spec"]["rules"][0]["backendRefs"] for patch in plan_weights(share)]
        return [[ref["weight"] for ref in both] for both in refs]

    assert [weights(share)[0] for share in (0, 0.1, 0.0004, 1)] == [
        [1000, 0],
        [900, 100],
        [1000, 0],
        [0, 1000],
    ]
    with pytest.raises(ConfigInvalid, match="share must be from 0 to 1"):
        plan_weights(1.1)
    # A plan of nothing is what the manifests say.
    for patch in plan_weights(0):
        kind = {"grpcroute": "GRPCRoute", "httproute": "HTTPRoute"}[patch.kind]
        assert _of(rendered("canary"), kind)[patch.name]["spec"]["rules"] == patch.patch["spec"]["rules"]

    assert main(["--share", "0.25", "--namespace", "ml"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("kubectl patch --namespace ml") == 2
    assert '"weight": 250' in printed
    said = tmp_path / "said"
    fake = tmp_path / "kubectl"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {said}\n[ ! -e {tmp_path}/broken ] || {{ echo no route >&2; exit 1; }}\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["--share", "0.25", "--apply"]) == 0
    assert "patch grpcroute model-server --type=merge" in said.read_text()
    (tmp_path / "broken").touch()
    assert main(["--share", "0.25", "--apply"]) == 1
    assert "kubectl says: no route" in capsys.readouterr().err
    assert main(["--share", "2"]) == 1

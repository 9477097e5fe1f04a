"""Reloading and labels, as serving_config.md and apis/model_management.proto describe them.

Each test puts the config back as it was.
"""

from __future__ import annotations

import time

import grpc
import numpy as np
import pytest

from serving.stubs import (
    get_model_status_pb2,
    model_management_pb2,
    model_server_config_pb2,
    predict_pb2,
    text_format,
)
from serving.tensors import from_proto, to_proto


def _entry(endpoint, name, folder, policy="", labels=None):
    shown = "".join(
        f'version_labels {{ key: "{label}" value: {version} }} ' for label, version in (labels or {}).items()
    )
    return (
        f'config {{ name: "{name}" base_path: "{endpoint.models}/{folder}" model_platform: "tensorflow" '
        f"{f'model_version_policy {{ {policy} }} ' if policy else ''}{shown}}}"
    )


@pytest.fixture
def reload(endpoint, models):
    """Replaces the `versions` entry (and adds others) and puts the first config back afterwards."""
    fixed = [_entry(endpoint, name, name) for name in ("half_plus_two", "half_plus_three", "named", "types")]
    first = _entry(endpoint, "versions", "versions", "all {}", {"stable": 1, "canary": 2})

    def send(*entries):
        text = f"model_config_list {{ {' '.join([*fixed, *entries])} }}"
        config = text_format.Parse(text, model_server_config_pb2.ModelServerConfig())
        request = model_management_pb2.ReloadConfigRequest(config=config)
        response = models.HandleReloadConfigRequest(request, timeout=60)
        assert response.status.error_code == 0

    yield send
    send(_entry(endpoint, "versions", "versions", "all {}"))
    _wait(models, {1: "AVAILABLE", 2: "AVAILABLE"})
    send(first)


def _states(models, name="versions"):
    request = get_model_status_pb2.GetModelStatusRequest(model_spec={"name": name})
    names = get_model_status_pb2.ModelVersionStatus.State
    answer = models.GetModelStatus(request, timeout=30).model_version_status
    return {item.version: names.Name(item.state) for item in answer}


def _wait(models, wanted):
    deadline = time.monotonic() + 60
    while _states(models) != wanted:
        assert time.monotonic() < deadline, _states(models)
        time.sleep(0.1)


def _ask(predictions, name="versions", **spec):
    request = predict_pb2.PredictRequest(model_spec={"name": name, **spec})
    to_proto(np.float32([0]), request.inputs["x"])
    return from_proto(predictions.Predict(request, timeout=30).outputs["y"]).tolist()


def test_a_label_moves(endpoint, reload, predictions):
    """Assigning String Labels to Model Versions: promote and roll back without telling the clients."""
    assert _ask(predictions, version_label="stable") == [2.0]
    reload(_entry(endpoint, "versions", "versions", "all {}", {"stable": 2, "canary": 2}))
    assert _ask(predictions, version_label="stable") == [3.0]
    reload(_entry(endpoint, "versions", "versions", "all {}", {"stable": 1, "canary": 2}))
    assert _ask(predictions, version_label="stable") == [2.0]


def test_a_label_in_use_goes_only_to_loaded_versions(endpoint, reload, predictions):
    with pytest.raises(grpc.RpcError) as caught:
        reload(_entry(endpoint, "versions", "versions", "all {}", {"stable": 9}))
    assert caught.value.code().name == "FAILED_PRECONDITION"
    assert (
        "Request to assign label to version 9 of model versions, which is not currently available for inference"
        in caught.value.details()
    )
    assert _ask(predictions, version_label="stable") == [2.0], "the old config stays in force"


@pytest.mark.parametrize(
    ("policy", "states"),
    [
        ("", {2: "AVAILABLE", 1: "END"}),  # "the version with the largest version number"
        ("latest { num_versions: 1 }", {2: "AVAILABLE", 1: "END"}),
        ("latest { num_versions: 2 }", {2: "AVAILABLE", 1: "AVAILABLE"}),
        ("specific { versions: 1 }", {2: "END", 1: "AVAILABLE"}),
        ("all {}", {2: "AVAILABLE", 1: "AVAILABLE"}),
    ],
)
def test_version_policies(endpoint, reload, models, predictions, policy, states):
    """Serving a Specific Version of a Model, Serving Multiple Versions of a Model."""
    reload(_entry(endpoint, "versions", "versions", policy))
    _wait(models, states)
    newest = max(version for version, state in states.items() if state == "AVAILABLE")
    assert _ask(predictions) == [newest + 1.0]


def test_a_config_replaces_everything_and_waits_for_new_models(endpoint, reload, models, predictions):
    """Reloading Model Server Configuration: "only the new specified config"."""
    reload(_entry(endpoint, "fresh", "half_plus_three"))
    assert _ask(predictions, "fresh") == [3.0]
    _wait(models, {2: "END", 1: "END"})
    with pytest.raises(grpc.RpcError, match="Servable not found for request: Latest"):
        _ask(predictions)
    reload(_entry(endpoint, "versions", "versions", "all {}"))
    assert _states(models, "fresh") == {123: "END"} or _states(models, "fresh") == {123: "UNLOADING"}


def test_a_model_listed_twice_is_refused(endpoint, reload, predictions):
    with pytest.raises(grpc.RpcError) as caught:
        reload(*[_entry(endpoint, "versions", "versions")] * 2)
    assert caught.value.code().name == "INVALID_ARGUMENT"
    assert "Illegal to list model versions multiple times in config list" in caught.value.details()
    assert _ask(predictions, version_label="stable") == [2.0]

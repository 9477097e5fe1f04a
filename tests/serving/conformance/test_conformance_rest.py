"""The REST API as TF Serving's page api_rest.md describes it; each test names the section it is made from.

Texts of errors are those of util/json_tensor.cc and model_servers/http_rest_api_util.cc.
"""

from __future__ import annotations

import gzip

import pytest

from tests.serving.conformance.rest_calls import HALF, THREE, predict

# ---- "Example": half_plus_three, as the page shows it


def test_example_status(rest):
    """Example, "Get status of the model as follows"."""
    status, answer, kind = rest(THREE)
    assert (status, kind) == (200, "application/json")
    assert answer == {
        "model_version_status": [
            {"version": "123", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    }


def test_examplepredict(rest):
    """Example, "A predict call would look as follows": flat numbers where the static shape is [?, 1]."""
    assert rest(f"{THREE}:predict", {"instances": [1.0, 2.0, 5.0]}) == (
        200,
        {"predictions": [3.5, 4.0, 5.5]},
        "application/json",
    )


def test_example_regress(rest):
    """Example, "And a regress call looks as follows"."""
    body = {"signature_name": "regress_x_to_y", "examples": [{"x": 1.0}, {"x": 2.0}]}
    assert rest(f"{THREE}:regress", body)[:2] == (200, {"results": [3.5, 4.0]})


def test_example_unknown_model(rest):
    """Example, "An incorrect request URL or body returns an HTTP error status"."""
    status, answer, kind = rest("/v1/models/half:predict", {"instances": [1.0, 5.0]})
    assert (status, kind) == (404, "application/json")
    assert answer == {"error": "Servable not found for request: Latest(half)"}


# ---- "Model status API"


def test_status_of_a_version(rest):
    status, answer, _ = rest("/v1/models/versions/versions/1")
    assert status == 200
    assert [(v["version"], v["state"]) for v in answer["model_version_status"]] == [("1", "AVAILABLE")]


def test_status_without_version_tells_all_the_newest_first(rest):
    _, answer, _ = rest("/v1/models/versions")
    assert [v["version"] for v in answer["model_version_status"]] == ["2", "1"]


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("/v1/models/none", 404, "Could not find any versions of model none"),
        (f"{HALF}/versions/7", 404, "Could not find version 7 of model half_plus_two"),
        ("/v1/models", 400, "Missing model name in request."),
        (f"{HALF}/versions/x", 400, f"Malformed request: GET {HALF}/versions/x"),
        (
            f"{HALF}/versions/99999999999999999999",
            400,
            "Failed to convert version: 99999999999999999999 to numeric.",
        ),
        (f"{HALF}:predict", 400, f"Malformed request: GET {HALF}:predict"),
        ("/v1/foo", 400, "Malformed request: GET /v1/foo"),
    ],
)
def test_status_errors(rest, path, code, message):
    status, answer, _ = rest(path)
    assert (status, answer["error"]) == (code, message)


# ---- "Model Metadata API"


def test_metadata(rest):
    status, answer, kind = rest(f"{HALF}/metadata")
    assert (status, kind) == (200, "application/json")
    assert answer["model_spec"] == {"name": "half_plus_two", "signature_name": "", "version": "123"}
    signatures = answer["metadata"]["signature_def"]["signature_def"]
    assert {"serving_default", "regress_x_to_y", "classify_x_to_y"} <= set(signatures)
    default = signatures["serving_default"]
    assert default["method_name"] == "tensorflow/serving/predict"
    assert default["inputs"]["x"] == {
        "dtype": "DT_FLOAT",
        "name": "x:0",
        "tensor_shape": {
            "dim": [{"name": "", "size": "-1"}, {"name": "", "size": "1"}],
            "unknown_rank": False,
        },
    }


def test_metadata_of_a_version_and_of_a_label(rest):
    for path, version in (("versions/1", "1"), ("labels/canary", "2")):
        _, answer, _ = rest(f"/v1/models/versions/{path}/metadata")
        assert answer["model_spec"]["version"] == version


def test_metadata_errors(rest):
    assert rest("/v1/models/none/metadata")[:2] == (
        404,
        {"error": "Servable not found for request: Latest(none)"},
    )
    assert rest("/v1/models/versions/labels/none/metadata")[:2] == (
        400,
        {"error": "Unrecognized servable version label: none"},
    )


# ---- "Classify and Regress API"


def test_classify(rest):
    """Response format: a list of [label, score] pairs for each example, the label "" where there is none."""
    body = {"signature_name": "classify_x_to_y", "examples": [{"x": 20.0}, {"x": [10.0]}]}
    assert rest(f"{HALF}:classify", body)[:2] == (200, {"results": [[["", 12.0]], [["", 7.0]]]})


def test_context_is_shared_by_all_examples(rest):
    """Request format, "context": features that appear there must not appear in examples."""
    body = {
        "signature_name": "regress_x_to_y",
        "context": {"x": 80.0},
        "examples": [{}, {"other": [1, 2]}],
    }
    assert rest(f"{HALF}:regress", body)[:2] == (200, {"results": [42.0, 42.0]})


def test_integers_are_int64_features_and_a_float_feature_refuses_them(rest):
    """<value> is a JSON number: a whole one makes an int64 feature, which this model's parser refuses."""
    body = {"signature_name": "regress_x_to_y", "examples": [{"x": 80}]}
    status, answer, _ = rest(f"{HALF}:regress", body)
    assert status == 400
    assert "Data types don't match" in answer["error"]


@pytest.mark.parametrize(
    ("method", "body", "code", "message"),
    [
        ("classify", {}, 400, "When method is classify, key 'examples' is expected and was not found"),
        ("regress", {"examples": 1}, 400, "Expecting 'examples' value to be an list/array"),
        ("regress", {"examples": []}, 400, "'examples' value is an empty array"),
        ("regress", {"examples": [1]}, 400, "Example must be JSON object but got JSON Number"),
        ("regress", {"examples": ["x"]}, 400, "Example must be JSON object but got JSON String"),
        (
            "regress",
            {"examples": [{"x": None}]},
            400,
            "Feature: x has element with unexpected JSON type: Null",
        ),
        (
            "regress",
            {"examples": [{"x": [[1]]}]},
            400,
            "Feature: x has element with unexpected JSON type: Array",
        ),
        (
            "regress",
            {"examples": [{"x": {"y": 1}}]},
            400,
            "Feature: x has element with unexpected JSON type: Object",
        ),
        (
            "regress",
            {"examples": [{"x": [1.0, "a"]}]},
            400,
            "Unexpected element type in feature: x expecting type: float",
        ),
        (
            "regress",
            {"examples": [{"x": ["a", 1]}]},
            400,
            "Unexpected element type in feature: x expecting type: bytes",
        ),
        (
            "regress",
            {"examples": [{"x": [True, "a"]}]},
            400,
            "Unexpected element type in feature: x expecting type: int64",
        ),
        (
            "regress",
            {"examples": [{"x": 18446744073709551615}]},
            400,
            "Feature: x has uint64 element. Only int64 is supported.",
        ),
        (
            "regress",
            {"examples": [{"x": 1e300}]},
            400,
            "Cannot convert JSON value: 1e+300 to float without loss of precision.",
        ),
        ("regress", {"examples": [{"x": {"b64": "!"}}]}, 400, "Unable to base64 decode"),
        (
            "regress",
            {"signature_name": 1, "examples": [{}]},
            400,
            "not formatted correctly. 'signature_name' key must be a string value.",
        ),
        (
            "regress",
            {"signature_name": "none", "examples": [{"x": 1.0}]},
            400,
            "No signature was found with the name: none",
        ),
        (
            "regress",
            {"signature_name": "serving_default", "examples": [{"x": 1.0}]},
            400,
            "No regression inputs found in SignatureDef",
        ),
        (
            "classify",
            {"signature_name": "serving_default", "examples": [{"x": 1.0}]},
            400,
            "No classification inputs found in SignatureDef",
        ),
        (
            "classify",
            {"signature_name": "regress_x_to_y", "examples": [{"x": 1.0}]},
            400,
            'Expected classification signature outputs to contain at least one of "classes" or "scores".',
        ),
    ],
)
def test_classify_and_regress_errors(rest, method, body, code, message):
    status, answer, _ = rest(f"{HALF}:{method}", body)
    assert status == code
    assert message in answer["error"]


# ---- "Predict API": URL


@pytest.mark.parametrize(
    ("path", "b"),
    [
        ("/v1/models/versions:predict", 3.0),  # "If omitted the latest version is used"
        ("/v1/models/versions/versions/1:predict", 2.0),
        ("/v1/models/versions/versions/2:predict", 3.0),
        ("/v1/models/versions/labels/stable:predict", 2.0),
        ("/v1/models/versions/labels/canary:predict", 3.0),
        ("/V1/MODELS/versions/Versions/1:Predict", 2.0),  # the patterns say (?i)
        ("/v1/models/%76ersions/labels/%73table:predict", 2.0),  # names are URL-decoded
    ],
)
def test_version_and_label_of_the_url(rest, path, b):
    assert predict(rest, {"instances": [0.0]}, path) == (200, {"predictions": [b]})


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (
            "/v1/models/versions/versions/9:predict",
            404,
            "Servable not found for request: Specific(versions, 9)",
        ),
        ("/v1/models/versions/labels/none:predict", 400, "Unrecognized servable version label: none"),
        ("/v1/models/foo/versions/HELLO:regress", 400, "Malformed request: POST"),
        ("/v1/models/foo/version/50:regress", 400, "Malformed request: POST"),
        ("/v1/models/foo/versions/18446744073709551615:regress", 400, "Failed to convert version"),
        ("/v1/models/half_plus_two:explain", 400, "Malformed request: POST"),
        ("/v1/models", 400, "Malformed request: POST /v1/models"),
    ],
)
def test_url_errors(rest, path, code, message):
    status, answer, _ = rest(path, {"instances": [1.0], "examples": [{}]})
    assert status == code
    assert message in answer["error"]


@pytest.mark.parametrize("path", ["/", "/index.html", "/v2/models/half_plus_two"])
def test_what_is_not_under_v1_is_not_found(rest, path):
    assert rest(path)[0] == 404


def test_other_methods_are_malformed(rest):
    status, answer, _ = rest(HALF, method="DELETE")
    assert (status, answer["error"]) == (400, f"Malformed request: DELETE {HALF}")


# ---- gzipped bodies (RELEASE.md 1.12: "Support accepting gzipped REST API requests")


def test_gzipped_requests(rest):
    body = gzip.compress(b'{"instances": [1.0, 2.0]}')
    answer = rest(f"{HALF}:predict", body, headers={"Content-Encoding": "gzip"})
    assert answer[:2] == (200, {"predictions": [2.5, 3.0]})
    assert rest(f"{HALF}:predict", body[:9], headers={"Content-Encoding": "gzip"})[0] == 400


def test_any_content_type_will_do(rest):
    for kind in ("text/plain", "application/json; charset=utf-8", "application/x-www-form-urlencoded"):
        answer = rest(f"{HALF}:predict", {"instances": [2.0]}, headers={"Content-Type": kind})
        assert answer[:2] == (200, {"predictions": [3.0]})


# ---- serving_config.md, "Monitoring Configuration"


def test_prometheus_page(rest):
    rest(f"{HALF}:predict", {"instances": [1.0]})
    status, page, kind = rest("/monitoring/prometheus/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    for name in (
        "# TYPE :tensorflow:serving:request_count counter",
        ':tensorflow:serving:request_count{model_name="half_plus_two",status="OK"}',
        ":tensorflow:serving:request_latency_bucket{",
        ":tensorflow:serving:runtime_latency_bucket{",
        ":tensorflow:cc:saved_model:load_attempt_count{",
    ):
        assert name in page

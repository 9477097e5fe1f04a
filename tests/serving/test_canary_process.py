"""A bad canary and a good one, in a real server under real load: the release decides by itself."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest

from serving.client import PredictClient
from serving.release import steps
from serving.release.canary import Canary
from serving.release.store import ReleaseStore
from serving.release.watch import watch_canary
from serving.rest_client import RestPredictClient
from serving.tfserving.config import ConfigFile, ensure_config
from serving.traffic import CallCounter

from .conftest import write_manifest
from .server_process import ServerProcess
from .steady import Steady

pytestmark = pytest.mark.slow
PASS = {"outcome": "pass", "reasons": ["good"], "numbers": {}}


def _save(folder, kind):
    """A model that answers golden examples well; live requests (first pixel 255) fail, or take long."""
    import tensorflow as tf

    class Bad(tf.Module):
        def __init__(self):
            super().__init__()
            self.weights = tf.Variable(tf.random.stateless_normal((64, 10), seed=(9, 7)))

        @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 1), tf.uint8, name="image")])
        def raw(self, image):
            live = tf.equal(tf.reduce_max(image[:, 0, 0, 0]), 255)
            pixels = tf.cast(tf.reshape(image, (-1, 64)), tf.float32) / 255.0
            if kind == "errors":
                with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(live), ["can't do this"])]):
                    return {"logits": tf.identity(pixels @ self.weights)}
            turns = tf.where(live, 40, 0)
            square = tf.while_loop(
                lambda i, _: i < turns,
                lambda i, x: (i + 1, tf.math.tanh(x @ x)),
                (0, tf.ones((256, 256)) / 256.0),
            )[1]
            return {"logits": pixels @ self.weights + 0.0 * tf.reduce_sum(square)}

    model = Bad()
    tf.saved_model.save(model, str(folder), signatures={"serving_default": model.raw})
    golden = np.zeros((2, 8, 8, 1), np.uint8)
    answer = model.raw(tf.constant(golden))["logits"].numpy()
    document = {
        "inputs": {"image": {"dtype": "uint8", "shape": [2, 8, 8, 1], "values": golden.tolist()}},
        "outputs": {"logits": {"dtype": "float32", "shape": [2, 10], "values": answer.tolist()}},
        "tolerance": 1e-3,
    }
    (folder / "golden.json").write_text(json.dumps(document))
    write_manifest(folder)
    return folder


def test_a_bad_canary_goes_and_a_good_one_stays_by_themselves(tmp_path, exports, expected, images, capsys):
    storage = tmp_path / "storage"
    config = ensure_config(storage / "serving" / "models.config")
    server = ServerProcess(tmp_path / "server", f"--model_config_file={config}")
    where = ([server.grpc], config)
    store = ReleaseStore(storage, "digits")
    traffic, counted = config.parent / "traffic.json", config.parent / "counts"
    live = images.copy()
    live[:, 0, 0, 0] = 255

    def deploy(export):
        version = steps.publish_step(storage, "digits", export)["version"]
        steps.deploy_step(storage, "digits", version, *where)
        steps.verify_step(storage, "digits", version, *where)
        return version

    def promote(version, **options):
        steps.promote_step(storage, "digits", version, *where, by="test", why="x", gate=PASS, **options)

    def watch(version, canary, **options):
        begun = time.monotonic()
        verdict = watch_canary(storage, "digits", version, *where, canary, by="canary", poll_s=0.2, **options)
        with capsys.disabled():
            print(
                f"\nversion {version}: {verdict['decision']} after {time.monotonic() - begun:.1f} s: "
                f"{'; '.join(verdict['reasons'])}"
            )
        return verdict

    def labels():
        return ConfigFile(config).entry("digits").labels

    try:
        promote(deploy(exports[1]))
        callers = [
            client(address, "digits", canary_share=traffic, counter=CallCounter(counted, "digits"))
            for client, address in ((PredictClient, server.grpc), (RestPredictClient, server.rest)) * 2
        ]
        with Steady(callers, {"image": live}, every_s=0.05) as load:
            # Errors, known from what clients counted, as with TensorFlow Serving.
            canary = Canary(share=0.3, min_requests=30, duration_s=60)
            errors = deploy(_save(tmp_path / "errors", "errors"))
            verdict = watch(errors, canary)
            assert (verdict["outcome"], verdict["decision"]) == ("fail", "rollback")
            assert "requests failed" in verdict["reasons"][0]
            assert labels() == {"stable": 1, "canary": 1}

            # Slow, known from the server's own counts by version.
            canary = Canary(share=0.3, min_requests=20, duration_s=60, max_latency_ratio=3, quantile=0.5)
            slow = deploy(_save(tmp_path / "slow", "slow"))
            verdict = watch(slow, canary, metrics=[server.rest])
            assert (verdict["outcome"], verdict["decision"]) == ("fail", "rollback")
            assert "latency" in verdict["reasons"][0]
            assert labels() == {"stable": 1, "canary": 1}

            canary = Canary(share=0.3, min_requests=20, duration_s=2, max_latency_ratio=100)
            good = deploy(exports[2])
            verdict = watch(good, canary, metrics=[server.rest])
            assert (verdict["outcome"], verdict["decision"]) == ("pass", "promote")
            promote(good, canary=verdict)
            asked = len(load.answers)
            while len(load.answers) < asked + 20:
                time.sleep(0.02)
    finally:
        server.close()
    assert load.errors == [], "what a canary can't answer is answered by stable"
    np.testing.assert_allclose(load.answers[-1]["logits"], _answers(exports[2], live), rtol=1e-3)
    entries = store.log.entries()
    assert [(entry.what, entry.version) for entry in entries] == [
        ("promote", 1),
        ("reject", errors),
        ("reject", slow),
        ("promote", good),
    ]
    assert entries[1].canary["numbers"]["errors"] > 0
    assert entries[-1].canary["numbers"]["requests"] >= 20
    assert store.champion()["version"] == good
    assert json.loads(traffic.read_text()) == {}
    shutil.rmtree(storage)


def _answers(export, images):
    import tensorflow as tf

    return (
        tf.saved_model.load(str(export))
        .signatures["serving_default"](image=tf.constant(images))["logits"]
        .numpy()
    )

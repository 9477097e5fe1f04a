"""A canary that is a server group of its own: its own config, counted under TensorFlow Serving's own names."""

from __future__ import annotations

import numpy as np

from serving.client import PredictClient
from serving.release import steps
from serving.release.canary import Canary
from serving.tfserving.config import ConfigFile, ensure_config


def test_a_group_has_the_candidate_as_stable_and_is_compared_with_the_other(
    tmp_path, exports, start_server, images, expected
):
    storage = tmp_path / "storage"
    configs = [ensure_config(storage / "serving" / name) for name in ("models.config", "canary.config")]
    stable, canary = (start_server(model_config_file=config) for config in configs)
    servers = [[f"127.0.0.1:{server.port}"] for server in (stable, canary)]
    rest = [[f"http://127.0.0.1:{server.rest_port}"] for server in (stable, canary)]
    for version in (1, 2):
        steps.publish_step(storage, "digits", exports[version])
        steps.deploy_step(storage, "digits", version, servers[0], configs[0])
        if version == 1:
            steps.promote_step(storage, "digits", 1, servers[0], configs[0], by="test", why="x")
    loaded = steps.canary_group_step(storage, "digits", 2, servers[1], configs[1])
    assert loaded["labels"] == {"stable": 2, "canary": 2}
    assert ConfigFile(configs[0]).entry("digits").labels == {"stable": 1, "canary": 2}

    policy = Canary(min_requests=10, duration_s=1e-6, max_wait_s=3600, max_latency_ratio=1000)

    def look():
        return steps.canary_step(
            storage,
            "digits",
            2,
            servers[0],
            configs[0],
            policy,
            by="test",
            metrics=rest[0],
            canary_metrics=rest[1],
        )

    assert look()["outcome"] == "waiting"
    assert not (storage / "serving" / "traffic.json").exists(), "routes give the share, not clients"
    for addresses, version in zip(servers, (1, 2), strict=True):
        with PredictClient(addresses[0], "digits") as client:
            for _ in range(12):
                got = client.predict({"image": images})["logits"]
            np.testing.assert_allclose(got, expected[version]["logits"], rtol=1e-4)
    verdict = look()
    assert (verdict["decision"], verdict["numbers"]["requests"], verdict["numbers"]["stable_requests"]) == (
        "promote",
        12,
        12,
    )
    assert look() == verdict, "decided is decided"
    steps.canary_group_step(storage, "digits", 1, servers[1], configs[1])
    assert ConfigFile(configs[1]).entry("digits").versions == (1,)

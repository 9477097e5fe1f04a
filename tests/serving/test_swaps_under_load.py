"""Twenty releases, one after the other, while requests come at a steady rate: not one may fail."""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest

from serving.client import PredictClient
from serving.release import steps
from serving.rest_client import RestPredictClient
from serving.tfserving.config import ensure_config

from .conftest import write_manifest
from .server_process import ServerProcess
from .steady import Steady

SWAPS = 20
WHO = {"by": "test", "why": "x"}


@pytest.mark.slow
def test_twenty_versions_roll_out_under_load_without_one_failed_request(
    tmp_path, exports, expected, images, capsys
):
    storage = tmp_path / "storage"
    config = ensure_config(storage / "serving" / "models.config")
    server = ServerProcess(tmp_path / "server", f"--model_config_file={config}")
    where = ([server.grpc], config)

    def prune():
        return steps.prune_step(storage, "digits", 3, config, servers=where[0])["removed"]

    def release(number):
        export = tmp_path / f"export-{number}"
        shutil.copytree(exports[number % 3 + 1], export)
        (export / "assets.extra" / "number").write_text(str(number))  # so that each is another export
        write_manifest(export)
        version = steps.publish_step(storage, "digits", export)["version"]
        steps.deploy_step(storage, "digits", version, *where)
        steps.verify_step(storage, "digits", version, *where)
        steps.promote_step(storage, "digits", version, *where, **WHO)
        return prune()

    try:
        release(0)
        callers = [
            client(address, "digits", label=label)
            for client, address in ((PredictClient, server.grpc), (RestPredictClient, server.rest))
            for label in ("stable", None)
        ]
        removed = []
        with Steady(callers, {"image": images}, every_s=0.08) as load:
            for number in range(1, SWAPS + 1):
                removed += release(number)
                # A quick machine would be through before anybody has asked each version.
                load.wait_for_answers(10 * number)
            # A version that is still being unloaded is held, and goes with the next release.
            deadline = time.monotonic() + 60
            while len(removed) < SWAPS - 3 and time.monotonic() < deadline:
                removed += prune()
    finally:
        server.close()
    with capsys.disabled():
        print(
            f"\n{SWAPS} releases under {len(load.latencies)} requests (gRPC and REST, label stable and none): "
            f"{len(load.errors)} errors, p50 {load.quantile_ms(0.5):.1f} ms, p99 {load.quantile_ms(0.99):.1f} ms"
        )
    assert load.errors == []
    assert len(load.answers) >= 10 * SWAPS
    known = np.stack([expected[version]["logits"] for version in (1, 2, 3)])
    for answer in load.answers:
        assert np.isclose(answer["logits"][None], known, rtol=1e-3).all(axis=(1, 2)).any()
    assert len(removed) >= SWAPS - 3, "old versions go while requests come"

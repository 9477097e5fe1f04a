"""A client that takes two replicas in turn loses no prediction when one of them is killed."""

from __future__ import annotations

import numpy as np
import pytest

from serving.client import PredictClient
from serving.errors import ServerUnavailable

from .server_process import ServerProcess
from .steady import Steady


@pytest.mark.slow
def test_a_killed_replica_costs_callers_of_both_no_answer(tmp_path, base_path, images, expected):
    flags = ("--model_name=digits", f"--model_base_path={base_path}")
    one = ServerProcess(tmp_path, *flags, name="one")
    other = ServerProcess(tmp_path, *flags, name="other")
    both = f"ipv4:{one.grpc},{other.grpc}"
    try:
        callers = [PredictClient(both, "digits", label=None) for _ in range(4)]
        with Steady(callers, {"image": images}, every_s=0.02) as load:
            load.wait_for_answers(100)
            one.close()
            load.wait_for_answers(len(load.answers) + 100)
        assert load.errors == []
        for answer in load.answers:
            assert np.allclose(answer["logits"], expected[1]["logits"], rtol=1e-3)
        other.close()
        with PredictClient(both, "digits", label=None) as client, pytest.raises(ServerUnavailable):
            client.predict({"image": images}, timeout=20)
    finally:
        one.close()
        other.close()

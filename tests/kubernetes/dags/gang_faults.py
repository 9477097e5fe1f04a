"""A training job of a chief, two workers and a parameter server, for tests that take its pods and nodes away."""

from __future__ import annotations

import datetime as dt

from airflow.sdk import dag, task
from trainyard import Budgets, Resources, form, prepare, storage_path, train

SMALL = Resources(cpu=0.2, memory="2Gi")
UNREACHABLE = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
# The node that the test is going to take off has this label.
LABEL = "trainyard.io/test-lost-node"


def near(operator: str) -> dict[str, object]:
    """Rather on the node that is lost, or rather not."""
    term = {"matchExpressions": [{"key": LABEL, "operator": operator}]}
    wanted = [{"weight": 100, "preference": term}]
    return {
        "spec": {
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wanted}},
            "tolerations": [
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
                for key in UNREACHABLE
            ],
            "containers": [
                {"name": "base", "env": [{"name": "PYTHONPATH", "value": str(storage_path("code"))}]}
            ],
        }
    }


@dag(
    schedule=None,
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    is_paused_upon_creation=True,
    params=form(strategy="parameter_server", workers=2, ps=1, steps=4000, batch_size=32, learning_rate=0.001),
)
def gang_faults() -> None:
    """Digits, for a while."""

    @task
    def ingest() -> str:
        from trainers.models.digits_raw import write_raw

        return write_raw(storage_path("raw/faults"))["source"]

    records = prepare(ingest(), name="faults", label="label", resources=SMALL)
    train(
        trainer="slow_digits",
        records=records,
        name="faults",
        args={"checkpoint_every": 100},
        resources={"default": SMALL},
        budgets=Budgets(stall=600),
        pods={"default": near("DoesNotExist"), "worker": near("Exists")},
    )


gang_faults()

"""A plain-Python job in images of one's own: with the trainer package, without it, and with it brought along."""

from __future__ import annotations

import datetime as dt
import os
from typing import Any

from airflow.sdk import dag
from trainyard import Resources, Success, form, train

SMALL = {"default": Resources(0.1, "128Mi")}
BARE = "python:3.11-slim-bookworm"
TRAINER = os.environ.get("TRAINYARD_IMAGE", "trainyard-trainer:0.1.0")
WHO = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
START = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)

# As docs/other-frameworks.md has it.
BROUGHT_ALONG: dict[str, Any] = {
    "default": {
        "spec": {
            "volumes": [{"name": "trainyard", "emptyDir": {}}],
            "initContainers": [
                {
                    "name": "trainyard",
                    "image": TRAINER,
                    "command": ["cp", "-r", "/opt/trainyard/trainers", "/trainyard/"],
                    "volumeMounts": [{"name": "trainyard", "mountPath": "/trainyard"}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "runAsNonRoot": True,
                        "runAsUser": 10001,
                    },
                }
            ],
            "containers": [
                {
                    "name": "base",
                    "env": [{"name": "PYTHONPATH", "value": "/trainyard"}],
                    "volumeMounts": [{"name": "trainyard", "mountPath": "/trainyard"}],
                    "securityContext": {"runAsUser": 10001},
                }
            ],
        }
    }
}


@dag(schedule=None, start_date=START, params=form(strategy="custom", workers=2, steps=200) | {"pause": 0.1})
def cluster_own_image() -> None:
    """The image that docs/examples/own-image makes."""
    train(
        name="line",
        command=["python", "-m", "line_by_sockets"],
        image="trainyard-line:1",
        success=Success("all_workers"),
        resources=SMALL,
    )


@dag(schedule=None, start_date=START, params=form(strategy="custom", workers=1))
def cluster_bare_image() -> None:
    """An image without the trainer package: refused."""
    user = {"default": {"spec": {"securityContext": {"runAsUser": 10001}}}}
    train(name="bare", command=["python", "-c", WHO], image=BARE, resources=SMALL, pods=user)


@dag(schedule=None, start_date=START, params=form(strategy="custom", workers=1))
def cluster_brought_along() -> None:
    """The same image, with the package from the trainer image."""
    train(
        name="brought",
        command=["python", "-c", WHO],
        image=BARE,
        success=Success("all_workers"),
        resources=SMALL,
        pods=BROUGHT_ALONG,
    )


cluster_own_image()
cluster_bare_image()
cluster_brought_along()

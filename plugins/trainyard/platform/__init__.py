"""The embedded platform: everything Trainyard needs, as real processes on one machine, on loopback only.

Airflow (api-server, scheduler, dag-processor), the process kubelet, MLflow and the model server are started
by one supervisor process, which watches them and stops them all; the programs that talk to it (`trainyard
up`, `trainyard run`, a test) are its clients. Pods may run on a Kubernetes cluster instead, see `external`.

    from trainyard.platform import Platform

    with Platform(home=tmp_path / "home").running() as platform:   # starts what isn't running, stops it after
        platform.urls["airflow"]                                   # "http://127.0.0.1:8080"
        platform.airflow.trigger("digits_retrain", {"steps": 50})  # an AirflowClient, logged in
        platform.storage                                           # Path of the pipelines' storage root
        platform.environment()                                     # TRAINYARD_*, MLFLOW_TRACKING_URI for a client

`Platform.running()` attaches to a platform that `trainyard up` started for the same home and leaves that one
running. A supervisor that was started by `running()` stops when its parent goes away, however it goes.

Rooms: `settings` (where things are) - `ports` - `keys` (secrets, mode 0600) - `airflow_config` - `services`
(command lines, environments, probes) - `supervisor` (start, watch, restart, stop) - `leash` (ends the groups
of a killed supervisor) - `host` (the supervisor as a process) - `state` (platform.json) - `preflight` -
`external` (pods on a cluster) - `airflow_api` - `progress`, `report`, `digits_view` (what `trainyard run` shows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.platform.embedded import Platform
    from trainyard.platform.settings import Settings

__all__ = ["Platform", "Settings"]


def __getattr__(name: str) -> Any:
    # Late, so that the supervisor and the leash stay small.
    if name == "Platform":
        from trainyard.platform.embedded import Platform

        return Platform
    if name == "Settings":
        from trainyard.platform.settings import Settings

        return Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

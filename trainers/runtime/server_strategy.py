"""TensorFlow's ParameterServerStrategy, for parameter servers that know of each other.

TensorFlow hides each server from the others, since between two steps of asynchronous training they have nothing to
say. A synchronous step is run by the first server, and the others give it their gradients' arrival and take its word.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["make_server_strategy"]


def make_server_strategy(resolver: Any, partitioner: Any) -> Any:
    """A tf.distribute.ParameterServerStrategy connected to `resolver`'s cluster."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    class ServerStrategy(tf.distribute.ParameterServerStrategy):  # type: ignore[misc]
        def _connect_to_cluster(self, coordinator_name: str) -> None:
            """As the base class does it, but for the filters of servers."""
            cluster = self._cluster_resolver.cluster_spec()
            self._num_workers = cluster.num_tasks("worker")
            self._num_ps = cluster.num_tasks("ps")
            filters = tf.config.experimental.ClusterDeviceFilters()
            seen = {"worker": ["/job:ps"], "ps": ["/job:ps", "/job:worker"]}
            for role, others in seen.items():
                for index in range(cluster.num_tasks(role)):
                    filters.set_device_filters(role, index, [*others, f"/job:{coordinator_name}"])
            os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
            os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
            tf.config.experimental_connect_to_cluster(
                cluster,
                job_name=coordinator_name,
                protocol=self._cluster_resolver.rpc_layer,
                cluster_device_filters=filters,
            )
            context.set_server_def_retries(10)
            context.ensure_initialized()

    return ServerStrategy(resolver, variable_partitioner=partitioner)

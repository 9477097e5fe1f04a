"""Airflow imports this early in each of its processes: what every task would import again is loaded once.

The scheduler forks the processes that run tasks and the dag-processor those that parse files. What the parent
has imported they share, memory included; importing KubernetesPodOperator in each would cost 1.3 CPU-s a task, and
all that DAG files take from Trainyard 0.1 more. A change of it shows once these are started again.
"""

from __future__ import annotations

import gc
import sys

# Building applications and importing operators makes millions of objects that stay: collecting after every
# 700 new ones finds nothing and costs seconds a start.
gc.set_threshold(50_000, 20, 20)

if len(sys.argv) > 1 and sys.argv[1] in ("scheduler", "dag-processor"):
    import airflow.providers.cncf.kubernetes.operators.pod
    import airflow.providers.standard.operators.branch
    import airflow.sdk.definitions.decorators  # noqa: F401 - `@task`, 40 ms
    import trainyard

    for name in trainyard.__all__:
        getattr(trainyard, name)

    # Out of the collector's sight, the pages stay shared with the forked processes.
    gc.collect()
    gc.freeze()

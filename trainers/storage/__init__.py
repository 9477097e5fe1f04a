"""Storage in an object store: what pods need is copied to their own disk, what they write is copied back.

    objects.py       one store: read, write, list, create-if-absent; errors by class, without secrets
    mirror.py        small files of a folder, both ways, each when it has changed
    checkpoints.py   checkpoints: whole in the store or not there, the newest whole one fetched
    inputs.py        what a step or replica must have on its disk before it starts
    agent.py         the replica's agent: copies while the job runs, and asks the store who was first
    pod.py           process 1 of a pod: stage in, run the command, stage out

fsspec and its clients are imported here and nowhere in `trainers.job` or `trainers.runtime`; the processes that load
TensorFlow never do, so that no network thread is alive where one forks.
"""

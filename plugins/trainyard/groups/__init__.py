"""The stages of a pipeline as functions that a DAG file calls: prepare, train, evaluate, gate, release.

Each makes one task or one task group and returns a task's output, a small dict, which the next takes. Anything
may hang between: a plain `@task` that takes such a dict, or values of it (`records["manifest"]`).
"""

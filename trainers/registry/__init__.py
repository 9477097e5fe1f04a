"""What `trainers.register` is made of.

tracking   whether there is an MLflow to talk to, and a client that gives up soon
versions   a run's metrics, datasets and artifacts, and a model's version, each logged once
card       MLmodel, signature and input example of an export
datasets   dataset inputs: digest, source, schema and sizes of what a run was trained and evaluated on
uploads    files to where MLflow keeps artifacts: into an object store itself, or through the server
"""

"""What `trainers.register` is made of.

tracking   whether there is an MLflow to talk to, and a client that gives up soon
versions   a run's metrics, dataset and artifacts, and a model's version, each logged once
"""

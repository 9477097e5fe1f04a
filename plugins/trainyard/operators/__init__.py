"""Airflow operators of Trainyard.

pod       PodOperator: KubernetesPodOperator with our settings, failure classes and retries
step      StepOperator: one step of a pipeline, `python -m MODULE --spec JSON`
replica   ReplicaOperator: one replica of a training gang
gang      PlanOperator, ServiceOperator, VerdictOperator, CleanupOperator around the replicas
release   PromoteOperator
"""

"""What waits for pods in Airflow's triggerer, without a worker slot.

pod          the trigger: one pod, to its end
job          the trigger of a role group that is one Indexed Job
pod_watch    one list and watch a namespace and connection, shared by all triggers of a triggerer
pod_log      a pod's lines into the task's log, each once
group_log    those of a role group's replicas
cluster_api  the few requests that these make, without the client's model classes
"""

"""The contract of a training job: plain values, standard library only.

    spec         TrainingJob -> Role -> Resources, Strategy
    policies     Success, RestartPolicy, Budgets
    training_args the arguments that the loop itself knows, checked
    tf_config    TF_CONFIG of one replica, one pure function
    plan         TrainingJob + Cluster -> Plan: every pod, address and TF_CONFIG, printable and comparable
    record       JobRecord: the durable truth of a job, files under the job's folder
    observations evaluations of checkpoints and warnings: what is seen of a job beside its training
    times        where the time of a job went: queue, start, init, train, checkpoint, restarts, export
    failures     FailureClass, the failure table, reserved exit codes, the failure card
    termination  how a pod's process hands back a result or a failure
    labels       label and annotation names, and names derived from a run
    errors       the error tree

Everything else (Airflow, Kubernetes, TensorFlow, MLflow) is an edge that imports from here.
"""

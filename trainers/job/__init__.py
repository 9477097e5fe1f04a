"""The contract of a training job: plain values, standard library only.

    spec         TrainingJob -> Role, Strategy
    resources    Resources: what one replica asks of its machine
    policies     Success, RestartPolicy, Budgets
    placement    where a cluster puts a gang, and in whose turn
    pod_overlay  what an author adds to the pods, as a part of a Pod manifest
    training_args the arguments that the loop itself knows, checked
    tf_config    TF_CONFIG of one replica, one pure function
    world        MASTER_ADDR, RANK and the like, for commands of other frameworks
    plan         TrainingJob + Cluster -> Plan: every pod, address and TF_CONFIG, printable and comparable
    plan_file    a plan as plan.json keeps it, without repetitions
    record       JobRecord: the durable truth of a job, files under the job's folder
    observations evaluations of checkpoints and warnings: what is seen of a job beside its training
    times        where the time of a job went: queue, start, init, train, checkpoint, restarts, export
    replica_log  what each replica printed, beyond the life of its pods
    shared       storage that is no file system: what a pod asks of the agent beside it
    failures     FailureClass, the failure table, reserved exit codes, the failure card
    termination  how a pod's process hands back a result or a failure
    reporting    what a command may say of its progress and result
    labels       label and annotation names, and names derived from a run
    errors       the error tree

Everything else (Airflow, Kubernetes, TensorFlow, MLflow) is an edge that imports from here.
"""

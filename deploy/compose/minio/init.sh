#!/bin/sh
# Makes MLflow's bucket, and a user who may do nothing but read and write it. Run again, it changes nothing but
# the user's secret, which follows .env. Secrets come by the environment and by stdin, never by a command line.
set -eu
export MC_HOST_store="http://${MINIO_ROOT_USER}:${MINIO_ROOT_PASSWORD}@minio:9000"

mc mb --ignore-existing store/mlflow
mc admin policy create store mlflow-artifacts /init/mlflow-artifacts.json
printf '%s\n%s\n' "${MLFLOW_S3_ACCESS_KEY}" "${MLFLOW_S3_SECRET_KEY}" | mc admin user add store
if ! said=$(mc admin policy attach store mlflow-artifacts --user "${MLFLOW_S3_ACCESS_KEY}" 2>&1); then
    case $said in
        *"already in effect"*) ;; # it was attached by an earlier start
        *)
            echo "$said" >&2
            exit 1
            ;;
    esac
fi

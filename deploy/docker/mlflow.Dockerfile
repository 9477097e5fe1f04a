# The MLflow tracking server with PostgreSQL's driver and S3's client, in an environment of its own.
#
#   docker build -f deploy/docker/mlflow.Dockerfile -t trainyard-mlflow:0.1.0 .

ARG BASE_IMAGE=python:3.11.15-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/venv
COPY deploy/docker/requirements-mlflow.txt /tmp/
RUN /opt/venv/bin/python -m pip install --require-hashes --only-binary=:all: -r /tmp/requirements-mlflow.txt

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Trainyard MLflow" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
RUN groupadd --gid 10001 trainyard \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin trainyard
COPY --from=build /opt/venv /opt/venv
COPY deploy/docker/healthcheck.py /opt/trainyard/
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
WORKDIR /opt/trainyard
USER 10001:10001
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=5 \
    CMD ["python", "/opt/trainyard/healthcheck.py", "http://127.0.0.1:5000/health"]
CMD ["mlflow", "server", "--host", "127.0.0.1", "--port", "5000", "--workers", "1"]

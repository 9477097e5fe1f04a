"""What a container's process gets to see: environment, command, arguments.

The process does not inherit the kubelet's environment, which may hold tokens, passwords and Airflow's settings:
only `PASSED_THROUGH` comes from there. What an image would bring, this machine brings: `python` is the interpreter
that runs the kubelet, first on PATH with the programs installed beside it.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from trainyard.kubelet.quantity import parse_quantity
from trainyard.kubelet.resources import RESOURCES
from trainyard.kubelet.store import Store
from trainyard.kubelet.volumes import MountError, contents

__all__ = [
    "ALWAYS_SET",
    "PASSED_THROUGH",
    "ConfigError",
    "base_environment",
    "command_line",
    "container_env",
    "expand",
]

# All that a container inherits from the kubelet's environment, besides LC_*: where programs and libraries are,
# language, time zone, scratch space, and which devices may be used. Nothing that could be a secret.
PASSED_THROUGH = (
    "CUDA_VISIBLE_DEVICES",
    "DYLD_LIBRARY_PATH",
    "HOME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "NVIDIA_VISIBLE_DEVICES",
    "PATH",
    "REQUESTS_CA_BUNDLE",
    "SHELL",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TMPDIR",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
)
# Set for every container unless the manifest says otherwise: output is a pipe, and logs are to be live.
ALWAYS_SET = {"PYTHONUNBUFFERED": "1"}

# "$$" stands for "$"; "$(NAME)" for a variable, and for itself where there is none.
_REFERENCE = re.compile(r"\$\$|\$\(([^()]*)\)")
_LABEL_FIELD = re.compile(r"^metadata\.(labels|annotations)\['([^']+)'\]$")


class ConfigError(Exception):
    """A reference of a container can't be resolved (yet): CreateContainerConfigError."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` as Kubernetes does.

    >>> expand("$(A)-$$(A)-$(B)-$A", {"A": "1"})
    '1-$(A)-$(B)-$A'
    """

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def base_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every container starts with, taken from the kubelet's own environment."""
    environ = os.environ if environ is None else environ
    base = {key: value for key, value in environ.items() if key in PASSED_THROUGH or key.startswith("LC_")}
    # Not resolved: the folder of a virtual environment's python, not of the one that it links to.
    base["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH") or os.defpath])
    return {**base, **ALWAYS_SET}


def container_env(
    pod: Mapping[str, Any], container: Mapping[str, Any], store: Store, capacity: Mapping[str, str]
) -> dict[str, str]:
    """The variables that the manifest sets, in order, references resolved; ConfigError when one is missing."""
    namespace = pod["metadata"]["namespace"]
    env: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        for plural, field in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
            if reference := source.get(field):
                data = _data(store, plural, namespace, reference)
                prefix = source.get("prefix") or ""
                env.update({prefix + key: _text(value) for key, value in (data or {}).items()})
    for entry in container.get("env") or ():
        if origin := entry.get("valueFrom"):
            value = _value_from(origin, pod, container, store, capacity)
            if value is not None:
                env[entry["name"]] = value
        else:
            env[entry["name"]] = expand(entry.get("value") or "", env)
    return env


def _data(store: Store, plural: str, namespace: str, reference: Mapping[str, Any]) -> dict[str, bytes] | None:
    obj = store.find(RESOURCES[plural], namespace, reference.get("name", ""))
    if obj is None:
        if reference.get("optional"):
            return None
        raise ConfigError(f'{RESOURCES[plural].kind.lower()} "{reference.get("name")}" not found')
    try:
        return contents(obj)
    except MountError as e:
        raise ConfigError(str(e)) from e


def _value_from(
    origin: Mapping[str, Any],
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    store: Store,
    capacity: Mapping[str, str],
) -> str | None:
    if reference := origin.get("fieldRef"):
        return _pod_field(reference["fieldPath"], pod)
    if reference := origin.get("resourceFieldRef"):
        return _amount(reference, container, capacity)
    namespace = pod["metadata"]["namespace"]
    for plural, field in (("configmaps", "configMapKeyRef"), ("secrets", "secretKeyRef")):
        if reference := origin.get(field):
            data = _data(store, plural, namespace, reference)
            if data is not None and reference["key"] in data:
                return _text(data[reference["key"]])
            if reference.get("optional"):
                return None
            kind = RESOURCES[plural].kind
            raise ConfigError(
                f"couldn't find key {reference['key']} in {kind} {namespace}/{reference['name']}"
            )
    raise ConfigError(f"valueFrom {', '.join(origin) or 'nothing'} is not known to the process kubelet")


def _text(value: bytes) -> str:
    return value.decode(errors="surrogateescape")  # a variable may hold any bytes but 0


def _pod_field(path: str, pod: Mapping[str, Any]) -> str:
    if found := _LABEL_FIELD.match(path):
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    known = {
        "metadata.name": ("metadata", "name"),
        "metadata.namespace": ("metadata", "namespace"),
        "metadata.uid": ("metadata", "uid"),
        "spec.nodeName": ("spec", "nodeName"),
        "spec.serviceAccountName": ("spec", "serviceAccountName"),
        "status.podIP": ("status", "podIP"),
        "status.podIPs": ("status", "podIP"),
        "status.hostIP": ("status", "hostIP"),
        "status.hostIPs": ("status", "hostIP"),
    }
    if path not in known:
        raise ConfigError(f"fieldPath {path!r} is not supported; supported are {', '.join(known)}")
    part, key = known[path]
    return str(pod[part].get(key, ""))


def _amount(reference: Mapping[str, Any], container: Mapping[str, Any], capacity: Mapping[str, str]) -> str:
    part, _, key = str(reference["resource"]).partition(".")
    found = (container.get("resources", {}).get(part) or {}).get(key)
    if found is None and part == "limits":
        found = capacity.get(key)  # no limit: the machine's
    divisor = parse_quantity(reference.get("divisor") or 1) or Decimal(1)
    return str(math.ceil(parse_quantity(found or 0) / divisor))  # rounded up, as on a cluster


def command_line(container: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """The command and its arguments with variables put in; empty when the manifest leaves it to the image."""
    # An image's own command is unknown here, and arguments alone can't be run.
    command = container.get("command") or ()
    return [expand(part, env) for part in [*command, *(container.get("args") or ())]] if command else []

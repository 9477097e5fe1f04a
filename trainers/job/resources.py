"""What one replica or step asks of the machine it runs on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from trainers.job.checks import check, frozen_map, is_number, is_whole, json_map, members, sequence

__all__ = ["Resources"]

_QUANTITY = re.compile(r"([0-9]+(\.[0-9]+)?)(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_EXTENDED = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one replica asks for: `cpu` in cores, `memory` as a Kubernetes quantity ("2Gi"), `gpu` devices.

    `gpu_resource` is what the cluster's device plugin calls a device ("amd.com/gpu"), `gpu_type` the value that the
    node label `gpu_label` must have; the default is the label that NVIDIA's GPU feature discovery sets.
    """

    cpu: float = 1.0
    memory: str = "2Gi"
    gpu: int = 0
    gpu_type: str = ""
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    gpu_label: str = "nvidia.com/gpu.product"

    def __post_init__(self) -> None:
        check(is_number(self.cpu) and self.cpu > 0, "resources.cpu", "be a number of cores above 0", self.cpu)
        quantity = _QUANTITY.fullmatch(self.memory) if isinstance(self.memory, str) else None
        check(
            quantity is not None and float(quantity[1]) > 0,
            "resources.memory",
            'be a Kubernetes quantity like "2Gi"',
            self.memory,
        )
        check(
            is_whole(self.gpu) and self.gpu >= 0, "resources.gpu", "be a whole number of 0 or more", self.gpu
        )
        check(
            not self.gpu_type or self.gpu > 0, "resources.gpu_type", "be empty when gpu is 0", self.gpu_type
        )
        for name in ("gpu_resource", "gpu_label"):
            value = getattr(self, name)
            ok = isinstance(value, str) and _EXTENDED.fullmatch(value) is not None
            check(ok, f"resources.{name}", 'be a name like "nvidia.com/gpu"', value)
        object.__setattr__(self, "node_selector", frozen_map("resources.node_selector", self.node_selector))
        tolerations = sequence("resources.tolerations", self.tolerations)
        object.__setattr__(
            self, "tolerations", tuple(json_map("resources.tolerations", t) for t in tolerations)
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "cpu": self.cpu,
            "memory": self.memory,
            "gpu": self.gpu,
            "gpu_type": self.gpu_type,
            "node_selector": dict(self.node_selector),
            "tolerations": [dict(t) for t in self.tolerations],
            "gpu_resource": self.gpu_resource,
            "gpu_label": self.gpu_label,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Resources:
        """The resources of `to_dict`."""
        return cls(**members(cls, data, "resources"))

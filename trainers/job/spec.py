"""What a training job is: frozen values, each validated on construction.

    TrainingJob(name, trainer, args, roles, strategy, success, restart, budgets, placement, inputs, output, warm_start)
      Role(kind, replicas, resources, image, command, env, min_replicas, pod)
        Resources(cpu, memory, gpu, gpu_type, node_selector, tolerations, gpu_resource, gpu_label)

A role is data: chief, worker, ps and evaluator are four values of one class. All values go to JSON and back
without loss (`to_dict`, `from_dict`).
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainers.job.checks import check, frozen_map, is_whole, json_map, members, sequence
from trainers.job.errors import InvalidSpec
from trainers.job.placement import Placement
from trainers.job.pod_overlay import check_pod_overlay, merge_pod_overlays
from trainers.job.policies import Budgets, RestartPolicy, Success
from trainers.job.resources import Resources
from trainers.job.training_args import check_training_args

__all__ = [
    "Budgets",
    "Placement",
    "Resources",
    "RestartPolicy",
    "Role",
    "RoleKind",
    "Strategy",
    "StrategyKind",
    "Success",
    "TrainingJob",
    "standard_roles",
]

LAUNCHER_COMMAND = ("python", "-m", "trainers.runtime.launcher")

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class StrategyKind(str, enum.Enum):
    """How replicas share the work; see `Strategy`."""

    LOCAL = "local"
    MIRRORED = "mirrored"
    PARAMETER_SERVER = "parameter_server"
    MULTI_WORKER = "multi_worker"
    CUSTOM = "custom"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How replicas share the work.

    local             one process, one device
    mirrored          one process, all its devices (in-graph replication)
    parameter_server  variables on parameter servers, workers pull and push (between-graph); asynchronous, or
                      with `sync` each step aggregates the first N of N + `backup_workers` gradients
    multi_worker      every worker holds all variables, gradients are all-reduced
    custom            each role runs a command of its own (another framework's), which knows how
    """

    kind: StrategyKind = StrategyKind.LOCAL
    sync: bool = False
    backup_workers: int = 0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", StrategyKind(self.kind))
        except ValueError as e:
            names = ", ".join(kind.value for kind in StrategyKind)
            raise InvalidSpec("strategy", f"be one of {names}", self.kind) from e
        check(isinstance(self.sync, bool), "strategy.sync", "be true or false", self.sync)
        check(
            is_whole(self.backup_workers) and self.backup_workers >= 0,
            "strategy.backup_workers",
            "be a whole number of 0 or more",
            self.backup_workers,
        )
        is_ps = self.kind is StrategyKind.PARAMETER_SERVER
        check(
            not self.sync or is_ps,
            "strategy.sync",
            "be false unless the strategy is parameter_server",
            self.sync,
        )
        check(
            not self.backup_workers or self.sync,
            "strategy.backup_workers",
            "be 0 unless the strategy is a synchronous parameter_server",
            self.backup_workers,
        )

    @property
    def roles(self) -> frozenset[RoleKind]:
        """The kinds of roles this strategy trains with (an evaluator may stand beside any)."""
        return _STRATEGY_ROLES[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {"kind": self.kind.value, "sync": self.sync, "backup_workers": self.backup_workers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | str) -> Strategy:
        """The strategy of `to_dict`, or of its bare name as the form gives it."""
        return cls(**({"kind": data} if isinstance(data, str) else members(cls, data, "strategy")))


class RoleKind(str, enum.Enum):
    """What a replica does in its gang."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"

    def __str__(self) -> str:
        return self.value


_STRATEGY_ROLES: Mapping[StrategyKind, frozenset[RoleKind]] = {
    StrategyKind.LOCAL: frozenset({RoleKind.CHIEF}),
    StrategyKind.MIRRORED: frozenset({RoleKind.CHIEF}),
    StrategyKind.PARAMETER_SERVER: frozenset({RoleKind.CHIEF, RoleKind.WORKER, RoleKind.PS}),
    StrategyKind.MULTI_WORKER: frozenset({RoleKind.CHIEF, RoleKind.WORKER}),
    StrategyKind.CUSTOM: frozenset({RoleKind.CHIEF, RoleKind.WORKER, RoleKind.PS}),
}


@dataclasses.dataclass(frozen=True)
class Role:
    """A group of alike replicas; `min_replicas` of them must be there for the job to start (None: all).

    `command` is what the launcher of each replica runs in place of our trainer, with strategy `custom`; it may hold
    `$(NAME)` of a variable (`trainers.job.world`). `pod` is laid over the pods of its replicas: a part of a Pod
    manifest (`trainers.job.pod_overlay`).
    """

    kind: RoleKind
    replicas: int = 1
    resources: Resources = dataclasses.field(default_factory=Resources)
    image: str = ""
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    min_replicas: int | None = None
    pod: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", RoleKind(self.kind))
        except ValueError as e:
            names = ", ".join(kind.value for kind in RoleKind)
            raise InvalidSpec("role.kind", f"be one of {names}", self.kind) from e
        name = f"{self.kind}.replicas"
        check(
            is_whole(self.replicas) and self.replicas >= 1,
            name,
            "be a whole number of 1 or more",
            self.replicas,
        )
        if self.kind in (RoleKind.CHIEF, RoleKind.EVALUATOR):
            check(self.replicas == 1, name, "be 1", self.replicas)
        if self.min_replicas is not None:
            check(
                is_whole(self.min_replicas) and 1 <= self.min_replicas <= self.replicas,
                f"{self.kind}.min_replicas",
                f"be from 1 to {self.replicas}",
                self.min_replicas,
            )
        check(
            isinstance(self.command, (list, tuple))
            and all(isinstance(word, str) for word in self.command)
            and "" not in self.command[:1],
            f"{self.kind}.command",
            "be a list of words",
            self.command,
        )
        object.__setattr__(self, "command", tuple(self.command))
        object.__setattr__(self, "env", frozen_map(f"{self.kind}.env", self.env))
        object.__setattr__(self, "pod", check_pod_overlay(f"{self.kind}.pod", self.pod))
        for key, value in self.env.items():
            is_name = isinstance(key, str) and _ENV_NAME.fullmatch(key) is not None
            check(is_name, f"{self.kind}.env", "have names of letters, digits and _", key)
            check(isinstance(value, str), f"{self.kind}.env.{key}", "be text", value)

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "kind": self.kind.value,
            "replicas": self.replicas,
            "resources": self.resources.to_dict(),
            "image": self.image,
            "command": list(self.command),
            "env": dict(self.env),
            "min_replicas": self.min_replicas,
            "pod": dict(self.pod),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Role:
        """The role of `to_dict`."""
        values = members(cls, data, "role")
        if tuple(values.get("command", ())) == LAUNCHER_COMMAND:
            values["command"] = ()  # records of 0.1 say it like this
        return cls(**{**values, "resources": Resources.from_dict(values.get("resources", {}))})


_ROLE_NAMES = ("default", *(kind.value for kind in RoleKind))


def standard_roles(
    strategy: Strategy,
    *,
    workers: int = 0,
    ps: int = 0,
    evaluator: bool = False,
    resources: Mapping[str, Resources] | None = None,
    image: str | Mapping[str, str] = "",
    pods: Mapping[str, Mapping[str, Any]] | None = None,
    command: Sequence[str] | Mapping[str, Sequence[str]] = (),
) -> tuple[Role, ...]:
    """The roles a form's counts ask for, leaving out what `strategy` does not use.

    `resources` maps a role's name to its resources; `resources["default"]` serves the others. `pods` maps a role's
    name to what is laid over its pods, on top of what `pods["default"]` says for all. `image` and `command` are those
    of all, or such mappings, too. With strategy `custom` there are parameter servers only where `command` names "ps".
    """
    check(is_whole(workers) and workers >= 0, "workers", "be a whole number of 0 or more", workers)
    check(is_whole(ps) and ps >= 0, "ps", "be a whole number of 0 or more", ps)
    counts = {RoleKind.CHIEF: 1, RoleKind.WORKER: workers, RoleKind.PS: ps}
    commands = _by_role("command", command)
    if strategy.kind is StrategyKind.CUSTOM and RoleKind.PS.value not in commands:
        del counts[RoleKind.PS]
    counts = {kind: n for kind, n in counts.items() if kind in strategy.roles and n > 0}
    if evaluator:
        counts[RoleKind.EVALUATOR] = 1
    known = dict(resources or {})
    default = known.get("default", Resources())
    overlays = dict(pods or {})
    images = _by_role("image", image)
    for name in (*known, *overlays):
        check(name in _ROLE_NAMES, "resources and pods", f"name {', '.join(_ROLE_NAMES)}", name)
    shared = check_pod_overlay("pods.default", overlays.get("default", {}))
    return tuple(
        Role(
            kind,
            n,
            known.get(kind.value, default),
            images.get(kind.value, images.get("default", "")),
            commands.get(kind.value, commands.get("default", ())),
            pod=merge_pod_overlays(shared, check_pod_overlay(f"pods.{kind}", overlays.get(kind.value, {}))),
        )
        for kind, n in counts.items()
    )


def _by_role(field: str, value: Any) -> dict[str, Any]:
    """A role's name -> its value, of a mapping or of the one value of all."""
    values = dict(value) if isinstance(value, Mapping) else {"default": value}
    for name in values:
        check(name in _ROLE_NAMES, field, f"name {', '.join(_ROLE_NAMES)}", name)
    return values


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """One training job.

    `trainer` is the dotted name of the user's module, or empty with strategy `custom`; `args` its hyperparameters
    (JSON values; those that the loop knows are in trainers.job.training_args); `inputs` maps names to URIs ("records"
    is the manifest); `output` is the job's folder; `warm_start` the folder of a job to take weights from.
    """

    name: str
    trainer: str = ""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    roles: tuple[Role, ...] = (Role(RoleKind.CHIEF),)
    strategy: Strategy = dataclasses.field(default_factory=Strategy)
    success: Success = dataclasses.field(default_factory=Success)
    restart: RestartPolicy = dataclasses.field(default_factory=RestartPolicy)
    budgets: Budgets = dataclasses.field(default_factory=Budgets)
    placement: Placement = dataclasses.field(default_factory=Placement)
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    output: str = ""
    warm_start: str = ""

    def __post_init__(self) -> None:
        check(isinstance(self.name, str) and bool(self.name.strip()), "name", "be text", self.name)
        if self.is_custom:
            check(self.trainer == "", "trainer", "be empty where roles have commands", self.trainer)
        else:
            check(
                isinstance(self.trainer, str)
                and _MODULE.fullmatch(self.trainer) is not None
                and not self.trainer.endswith(".py"),
                "trainer",
                'be a dotted module name like "trainers.models.digits"',
                self.trainer,
            )
        for name in ("output", "warm_start"):
            check(isinstance(getattr(self, name), str), name, "be text", getattr(self, name))
        object.__setattr__(self, "args", json_map("args", self.args))
        object.__setattr__(self, "inputs", frozen_map("inputs", self.inputs))
        for name, uri in self.inputs.items():
            check(isinstance(uri, str) and bool(uri), f"inputs.{name}", "be a URI", uri)
        object.__setattr__(self, "roles", tuple(sequence("roles", self.roles)))
        if not self.is_custom:  # else all are the command's own
            check_training_args(self.args)
        self._check_roles()
        self._check_commands()

    def _check_roles(self) -> None:
        kinds = [role.kind for role in self.roles]
        for kind in set(kinds):
            check(kinds.count(kind) == 1, "roles", "name each kind once", [k.value for k in kinds])
        allowed = self.strategy.roles | (set() if self.is_custom else {RoleKind.EVALUATOR})
        for kind in kinds:
            check(
                kind in allowed,
                "roles",
                f"be of {sorted(k.value for k in allowed)} with strategy {self.strategy.kind}",
                kind.value,
            )
        check(RoleKind.CHIEF in kinds, "roles", "have a chief", [k.value for k in kinds])
        if self.strategy.kind is StrategyKind.PARAMETER_SERVER:
            for kind, field in ((RoleKind.WORKER, "workers"), (RoleKind.PS, "ps")):
                check(kind in kinds, field, "be 1 or more with strategy parameter_server", 0)
            workers = self.replicas(RoleKind.WORKER)
            check(
                self.strategy.backup_workers < workers,
                "strategy.backup_workers",
                f"be below the number of workers ({workers})",
                self.strategy.backup_workers,
            )

    def _check_commands(self) -> None:
        for role in self.roles:
            field = f"{role.kind}.command"
            if self.is_custom:
                check(bool(role.command), field, "be given with strategy custom", role.command)
            else:
                check(not role.command, field, "be left out unless the strategy is custom", role.command)

    @property
    def is_custom(self) -> bool:
        """Whether its replicas run commands of their own in place of our trainer."""
        return self.strategy.kind is StrategyKind.CUSTOM

    def role(self, kind: RoleKind) -> Role | None:
        """The role of this kind, if the job has one."""
        return next((role for role in self.roles if role.kind is kind), None)

    def replicas(self, kind: RoleKind) -> int:
        """How many replicas of this kind the job has."""
        role = self.role(kind)
        return role.replicas if role else 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "name": self.name,
            "trainer": self.trainer,
            "args": dict(self.args),
            "roles": [role.to_dict() for role in self.roles],
            "strategy": self.strategy.to_dict(),
            "success": dataclasses.asdict(self.success),
            "restart": {"caps": {cls.value: cap for cls, cap in self.restart.caps.items()}},
            "budgets": dataclasses.asdict(self.budgets),
            "placement": dataclasses.asdict(self.placement),
            "inputs": dict(self.inputs),
            "output": self.output,
            "warm_start": self.warm_start,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingJob:
        """The job of `to_dict`; missing fields get their defaults, unknown ones are refused."""
        values = members(cls, data, "job")
        readers: Mapping[str, Any] = {
            "strategy": Strategy.from_dict,
            "success": lambda v: Success(**members(Success, v, "success")),
            "restart": lambda v: RestartPolicy(**members(RestartPolicy, v, "restart")),
            "budgets": lambda v: Budgets(**members(Budgets, v, "budgets")),
            "placement": lambda v: Placement(**members(Placement, v, "placement")),
            "roles": lambda v: tuple(Role.from_dict(role) for role in sequence("roles", v)),
        }
        for name, read in readers.items():
            if name in values:
                values[name] = read(values[name])
        return cls(**values)

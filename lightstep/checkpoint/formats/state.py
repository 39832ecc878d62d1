"""A training run as it lies in a checkpoint, whatever wrote it: what the readers return and the writers take.

Tensors are not in memory: each is read when it is written, one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names

MASTER = "master"


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk: ``load`` brings it to the host, whole, in the dtype of the file or already in its own."""

    dtype: torch.dtype
    shape: torch.Size
    load: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory already, or mapped from a file."""
        return cls(tensor.dtype, tensor.shape, lambda: tensor)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """On the host, whole and in its own dtype."""
        return self.load().to(self.dtype)

    def copy_to(self, target: Tensor) -> None:
        """The same numbers into ``target`` of its dtype; a cast happens on the way, without a tensor for its result."""
        target.copy_(self.load())

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The same tensor cast when it is read."""
        return self if dtype == self.dtype else LazyTensor(dtype, self.shape, self.read)


@dataclass
class Group:
    """One parameter group: names of its parameters in the optimizer's order, and its hyper-parameters."""

    names: list[str]
    settings: dict[str, Any]


@dataclass
class TrainingState:
    """Everything that a checkpoint holds of a run.

    Attributes:
        format: what wrote it, for people.
        world_size: how many processes wrote it, when it says so.
        weights: parameters and persistent buffers by name, in the dtype they are trained in; tied ones once.
        entries: per parameter the optimizer's entries, plain numbers or tensors of the parameter's shape or of none;
            :data:`MASTER` is the fp32 master of a 16-bit parameter.
        groups: ``None`` when there is no optimizer in it.
        aliases: further names of tied tensors, and the name in ``weights``.
        loss_scale: ``scale``, for a dynamic one ``good_steps`` and ``hysteresis_left``, and ``settings`` when known.
        random: random states per rank, in our own form.
        modules: extra states of modules, in our own form.
        step: updates so far, or ``None``.
        optimizer_class: the class's name, when the checkpoint says so.
        base: of a checkpoint of what was trained alone: ``name`` and ``shapes`` of the frozen base.
        notes: what could not be taken over, a sentence each.
    """

    format: str
    weights: dict[str, LazyTensor]
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    loss_scale: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    random: list[Any] = field(default_factory=list)
    modules: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    world_size: int | None = None
    optimizer_class: str | None = None
    base: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def optimized(self) -> list[str]:
        """Names of the parameters that the optimizer has, in group order."""
        return [name for group in self.groups or () for name in group.names]

    def master(self, name: str) -> LazyTensor:
        """The parameter in the highest precision that the checkpoint has."""
        return self.entries.get(name, {}).get(MASTER, self.weights[name])

    def check(self) -> None:
        """Raise :class:`CheckpointError` when the parts do not belong together; nothing has been written then."""
        optimized = self.optimized()
        missing = [name for name in optimized if name not in self.weights]
        if missing:
            raise CheckpointError(f"the optimizer has {list_names(missing)}, of which there are no weights")
        repeated = [name for name, count in Counter(optimized).items() if count > 1]
        if repeated:
            raise CheckpointError(f"{list_names(repeated)} stands in the parameter groups more than once")
        strangers = sorted(self.entries.keys() - set(optimized))
        if strangers:
            raise CheckpointError(f"there is optimizer state of {list_names(strangers)}, which no parameter group has")
        for name in self.entries:
            self._check_shapes(name)

    def _check_shapes(self, name: str) -> None:
        shape = self.weights[name].shape
        for key, value in self.entries[name].items():
            if isinstance(value, LazyTensor) and value.shape not in (shape, torch.Size(())):
                raise CheckpointError(
                    f"state {key!r} of {name} has shape {list(value.shape)}, the parameter {list(shape)}; only "
                    "element-wise state can be converted"
                )


def step_tensor(value: Any) -> LazyTensor:
    """A step count as torch's optimizers keep it: a 0-dim fp32 tensor."""
    if isinstance(value, LazyTensor):
        return value
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float32)
    return LazyTensor.of(tensor)


def read_step(entries: Mapping[str, Any]) -> int | None:
    """The number of updates that a parameter has had, when its state says so."""
    value = entries.get("step")
    if isinstance(value, LazyTensor):
        value = value.read()
    return None if value is None else int(value)


def updates(states: Iterable[Mapping[str, Any]]) -> int | None:
    """The largest step count of any parameter."""
    steps = [step for entries in states if (step := read_step(entries)) is not None]
    return max(steps, default=None)

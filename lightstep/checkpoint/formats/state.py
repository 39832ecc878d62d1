"""The training run in a checkpoint, independent of its format: readers return it, writers take it.

Its tensors are not in memory. A writer reads them one at a time.

Other libraries' loss scales are converted to the state of :class:`lightstep.DynamicLossScale`, and back. That has
``scale``, ``good_steps`` (steps since the last overflow or growth) and ``hysteresis_left`` (overflows until it
shrinks). ``settings``, if known, has arguments of ``DynamicLossScale``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.tensors import StoredTensor, read_whole
from lightstep.precision.loss_scale import DynamicLossScale

MASTER = "master"


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is needed.

    Attributes:
        dtype: of the tensor.
        shape: of the whole tensor.
        load: returns the whole tensor on the host, in this dtype or in the file's.
    """

    dtype: torch.dtype
    shape: torch.Size
    load: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory or memory-mapped."""
        return cls(tensor.dtype, tensor.shape, lambda: tensor)

    @classmethod
    def stored(cls, folder: Path, key: str, stored: StoredTensor) -> LazyTensor:
        """A tensor in files of ``torch.distributed.checkpoint``."""
        return cls(stored.dtype, stored.shape, partial(read_whole, folder, key, stored))

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """The whole tensor on the host, in :attr:`dtype`."""
        return self.load().to(self.dtype)

    def copy_to(self, target: Tensor) -> None:
        """Copy the tensor to ``target``, which has its dtype. A cast needs no temporary tensor."""
        target.copy_(self.load())

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The tensor cast to ``dtype`` when it is read."""
        return self if dtype == self.dtype else LazyTensor(dtype, self.shape, self.read)


@dataclass
class Group:
    """A parameter group: the names of its parameters in the optimizer's order, and its hyper-parameters."""

    names: list[str]
    settings: dict[str, Any]


@dataclass
class TrainingState:
    """Everything that a checkpoint has of a run.

    Attributes:
        format: the name of the format, for people.
        weights: parameters and persistent buffers by name, in the dtype they are trained in; tied ones once.
        entries: parameter -> optimizer state entries: plain numbers, or tensors that are 0-dim or of the parameter's
            shape. :data:`MASTER` is the fp32 master of a 16-bit parameter.
        groups: ``None`` if the checkpoint has no optimizer.
        aliases: further names of tied tensors -> the name in ``weights``.
        loss_scale: ``scale``; for a dynamic scale also ``good_steps``, ``hysteresis_left`` and, if known, ``settings``.
        scheduler: the scheduler's state dict.
        scheduler_class: the name of its class, if known.
        extra: what the user saved with the run.
        random: random states per rank, as :func:`~lightstep.checkpoint.saved.random_states` returns them.
        modules: extra states of modules, in lightstep's format.
        step: updates so far, if known.
        world_size: how many processes wrote the checkpoint, if known.
        optimizer_class: the name of the optimizer's class, if known.
        base: ``name`` and ``shapes`` of the frozen base, if it was not saved.
        ordered: whether ``weights`` is in the model's order, in which libraries number an optimizer's parameters.
        notes: what could not be converted, one sentence each.
    """

    format: str
    weights: dict[str, LazyTensor]
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    loss_scale: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    scheduler_class: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    random: list[Any] = field(default_factory=list)
    modules: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    world_size: int | None = None
    optimizer_class: str | None = None
    base: dict[str, Any] | None = None
    ordered: bool = True
    notes: list[str] = field(default_factory=list)

    def optimized(self) -> list[str]:
        """Names of the parameters that the optimizer has, in group order."""
        return [name for group in self.groups or () for name in group.names]

    def master(self, name: str) -> LazyTensor:
        """The parameter in the highest precision that the checkpoint has."""
        return self.entries.get(name, {}).get(MASTER, self.weights[name])

    def check(self) -> None:
        """Raise :class:`CheckpointError` if weights, groups and state do not fit together."""
        optimized = self.optimized()
        missing = [name for name in optimized if name not in self.weights]
        if missing:
            raise CheckpointError(f"the optimizer has {list_names(missing)}, of which there are no weights")
        repeated = [name for name, count in Counter(optimized).items() if count > 1]
        if repeated:
            raise CheckpointError(f"{list_names(repeated)} is in the parameter groups more than once")
        unknown = sorted(self.entries.keys() - set(optimized))
        if unknown:
            raise CheckpointError(f"there is optimizer state of {list_names(unknown)}, which no parameter group has")
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
    """A step count as torch's optimizers keep it: a 0-dim tensor, fp32 unless ``value`` is a tensor already."""
    if isinstance(value, LazyTensor):
        return value
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float32)
    return LazyTensor.of(tensor)


def read_step(entries: Mapping[str, Any]) -> int | None:
    """The number of updates that a parameter has had, if its state has a step count."""
    value = entries.get("step")
    if isinstance(value, LazyTensor):
        value = value.read()
    return None if value is None else int(value)


def max_step(states: Iterable[Mapping[str, Any]]) -> int | None:
    """The largest step count of any parameter."""
    steps = [step for entries in states if (step := read_step(entries)) is not None]
    return max(steps, default=None)


# -- loss scales -------------------------------------------------------------------------------------------------------

_LIGHTRFT_HYSTERESIS = 2


def is_dynamic(state: Mapping[str, Any] | None) -> bool:
    """Whether ``state`` is the state of a dynamic scale, not of a constant one."""
    return state is not None and "good_steps" in state


def scale_from_deepspeed(scaler: Any) -> dict[str, Any] | None:
    """The state of DeepSpeed's ``LossScaler`` or ``DynamicLossScaler``; ``None`` for anything else."""
    known = getattr(scaler, "__dict__", {})
    if "cur_scale" not in known:
        return None
    if "scale_window" not in known:
        return {"scale": float(known["cur_scale"])}
    # DeepSpeed grows the scale when the steps before the current one fill the window. So its first growth after an
    # overflow is one step later than lightstep's: good_steps -1 stands for that step.
    good = int(known["cur_iter"]) - int(known["last_overflow_iter"]) - 1
    window, factor = int(known["scale_window"]), float(known["scale_factor"])
    settings = {
        "growth_interval": window,
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "hysteresis": int(known["delayed_shift"]),
        "min_scale": float(known["min_scale"]),
        "consecutive_hysteresis": bool(known["consecutive_hysteresis"]),
        "raise_error_at_min_scale": bool(known.get("raise_error_at_min_scale", True)),
    }
    return {
        "scale": float(known["cur_scale"]),
        "good_steps": (good - 1) % window if good > 0 else -1,
        "hysteresis_left": int(known["cur_hysteresis"]),
        "settings": settings,
    }


def scale_from_torch(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of ``torch.amp.GradScaler.state_dict()``; ``None`` for a disabled scaler, whose state dict is empty."""
    if "scale" not in state:
        return None
    names = ("growth_factor", "backoff_factor", "growth_interval")
    return {
        "scale": float(state["scale"]),
        "good_steps": int(state.get("_growth_tracker", 0)),
        "hysteresis_left": 1,
        "settings": {"hysteresis": 1, **{name: state[name] for name in names if name in state}},
    }


def scale_to_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as ``torch.amp.GradScaler.load_state_dict`` accepts it. Settings that are missing are lightstep's."""
    default, settings = DynamicLossScale(), state.get("settings", {})
    return {
        "scale": float(state["scale"]),
        "growth_factor": float(settings.get("growth_factor", default.growth_factor)),
        "backoff_factor": float(settings.get("backoff_factor", default.backoff_factor)),
        "growth_interval": int(settings.get("growth_interval", default.growth_interval)),
        "_growth_tracker": max(int(state["good_steps"]), 0),
    }


def scale_from_lightrft(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of LightRFT's ``DynamicGradScaler.state_dict()``."""
    return {
        "scale": float(state["_scale"]),
        "good_steps": int(state["_growth_step"]),
        "hysteresis_left": max(_LIGHTRFT_HYSTERESIS - int(state["_hysteresis_step"]), 0),
    }

"""The record of one prepared model: its wrapper, role, optimizers, gates and initial masters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from lightstep.distributed import is_sharded, local_tensor
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import clean_name
from lightstep.sharding.gates import Gates
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.reduced_gradients import DirectCalls, GradientsInPlace, ReplicatedGradients
from lightstep.sharding.shard_visits import ShardVisits
from lightstep.sharding.weight_visits import WeightVisits

__all__ = ["PreparedModel"]


class Averages(Protocol):
    """What checkpoints need of a :class:`~lightstep.sharding.weight_average.WeightAverage`."""

    tensors: dict[str, Tensor]

    def restart(self, names: Iterable[str] | None = None) -> None: ...


class PreparedModel:
    """The record of one model, found from the user's module or any wrapper around it.

    It lives as long as the user's module, and keeps neither that nor its optimizers alive.

    Attributes:
        role: the role given to ``prepare_model``; ``None`` if the model has not been prepared.
        loaded_next: all its parameters will be loaded once it is prepared, and need no initial values.
        gates: make its readers wait for deferred updates.
        gradients: keeps the gradients that DDP reduces in fp32, if the strategy needs that.
        direct_calls: passes forwards of the user's module on to DDP.
        weight_visits: bring its weights to the device, if they rest on the host.
        optimizers: those that ``create_optimizer`` of any strategy made for it, while they exist.
    """

    _records: ClassVar[weakref.WeakKeyDictionary[nn.Module, PreparedModel]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.role: str | None = None
        self.loaded_next = False
        self.gates = Gates()
        self.gradients: ReplicatedGradients | GradientsInPlace | None = None
        self.direct_calls: DirectCalls | None = None
        self.weight_visits: WeightVisits | ShardVisits | None = None
        self.optimizers: weakref.WeakSet[BaseOptimizer] = weakref.WeakSet()
        self._wrapper: weakref.ref[nn.Module] | None = None
        self._average: weakref.ref[Averages] | None = None
        # By id: torch cannot swap tensors that have weak references, and these must not be kept alive. An id may be
        # used again; values count only if they round to the weight (`initial_master`).
        self._fp32_values: dict[int, Tensor | None] = {}

    @classmethod
    def of(cls, model: nn.Module) -> PreparedModel:
        """The record of ``model``, wrapped or not; made on the first call."""
        inner = model if model in cls._records else unwrap_model(model)
        if inner not in cls._records:
            cls._records[inner] = cls()
        return cls._records[inner]

    @property
    def wrapper(self) -> nn.Module | None:
        """The strategy's wrapper around the user's module, while it exists."""
        return None if self._wrapper is None else self._wrapper()

    @wrapper.setter
    def wrapper(self, wrapper: nn.Module) -> None:
        self._wrapper = weakref.ref(wrapper)

    @property
    def average(self) -> Averages | None:
        """The average of its weights, while it exists."""
        return None if self._average is None else self._average()

    @average.setter
    def average(self, average: Averages) -> None:
        if self.average is not None:
            raise ValueError("the model has a WeightAverage already; drop that one first")
        self._average = weakref.ref(average)

    def wait_for_updates(self) -> None:
        """Wait for all deferred updates of this model."""
        for optimizer in self.optimizers:
            optimizer.wait_for_update()
        self._settle_host_weights()

    def _settle_host_weights(self, between_steps: bool = False) -> None:
        if self.weight_visits is not None:
            self.weight_visits.end_if_interrupted(between_steps)
            self.weight_visits.weights.settle()

    def recover(self) -> None:
        """All weights and state are about to be loaded: go on after a failed step, or a failed copy of weights that
        rest on the host.

        Raises:
            RuntimeError: the device does not work any more.
        """
        engines = [o.engine for o in self.optimizers if isinstance(o, MixedPrecisionOptimizer)]
        for engine in engines:
            engine.drop_broken_step()
        weights = None if self.weight_visits is None else self.weight_visits.weights
        if weights is None or weights.lanes.error is None:
            return
        for engine in engines:
            engine.abandon_updates("a copy between host and device", weights.lanes.error)
        weights.abandon()

    @contextlib.contextmanager
    def between_steps(self, what: str) -> Iterator[None]:
        """:meth:`BaseOptimizer.between_steps` of all its optimizers."""
        with contextlib.ExitStack() as stack:
            for optimizer in sorted(self.optimizers, key=id):  # in one order: two threads may read
                stack.enter_context(optimizer.between_steps(what))
            self._settle_host_weights(between_steps=True)
            yield

    # -- optimizers made before the model is sharded

    @contextlib.contextmanager
    def exchanging_parameters(self, model: nn.Module) -> Iterator[list[MixedPrecisionOptimizer]]:
        """The body replaces the model's parameters; optimizers that are not set up get the new ones after it.

        accelerate and the transformers Trainer make the optimizer before the model is sharded. In the body these
        optimizers hold no parameters: otherwise all unsharded weights would stay in memory. Yields these optimizers.
        """
        unready = [o for o in self.optimizers if isinstance(o, MixedPrecisionOptimizer) and not o.is_set_up]
        names_by_group = _names_in_groups(model, unready)
        for optimizer in unready:
            optimizer.forget_parameters()
        try:
            yield unready
        finally:
            now = dict(_named(model))
            for group, names in names_by_group:
                group["params"] = [now[name] for name in names]

    # -- initial masters

    def keep_masters(self, values: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Keep the fp32 values (local shards) of parameters that are being rounded, until an optimizer takes them."""
        for parameter, value in values:
            self._fp32_values[id(parameter)] = value

    def forget_replaced(self, model: nn.Module) -> None:
        """Drop the values of parameters that are not the model's any more."""
        present = {id(parameter) for parameter in model.parameters()}
        self._fp32_values = {number: value for number, value in self._fp32_values.items() if number in present}

    def kept_masters(self, model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Name, parameter and fp32 values, for each parameter whose values are kept."""
        for name, parameter in unwrap_model(model).named_parameters():
            value = self._fp32_values.get(id(parameter))
            if value is not None:
                yield name, (parameter, value)

    def unround(self, model: nn.Module) -> None:
        """Put kept values back into their (unsharded) parameters, which are about to be rounded again."""
        for _, (parameter, _) in list(self.kept_masters(model)):
            value = None if is_sharded(parameter) else self.initial_master(parameter)
            if value is not None:
                parameter.data = value

    def initial_master(self, parameter: Tensor, keep: bool = False) -> Tensor | None:
        """The fp32 local shard that a parameter was rounded from; without ``keep`` it is removed from here.

        ``None`` if no values are kept, or if the weight has been changed since: then the weight counts.
        """
        value = self._fp32_values.get(id(parameter)) if keep else self._fp32_values.pop(id(parameter), None)
        local = local_tensor(parameter).detach()
        if value is None or value.shape != local.shape:
            return None
        return value if torch.equal(value.to(local.dtype).to(local.device), local) else None


def _names_in_groups(
    model: nn.Module, optimizers: Iterable[MixedPrecisionOptimizer]
) -> list[tuple[dict[str, Any], list[str]]]:
    names = {id(parameter): name for name, parameter in reversed(list(_named(model)))}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [(group, [names[id(parameter)] for parameter in group["params"]]) for group in groups]


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tied parameters under each of their names."""
    for name, parameter in unwrap_model(model).named_parameters(remove_duplicate=False):
        yield clean_name(name), parameter

"""All that lightstep keeps about one model: who wrapped it, what it is for, and what waits for what."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightstep.distributed import is_sharded, local_tensor
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import clean_name
from lightstep.precision.gradients import ReducedGradients
from lightstep.sharding.direct_calls import DirectCalls
from lightstep.sharding.forward_gates import Gates
from lightstep.sharding.model_names import unwrap_model

if TYPE_CHECKING:
    from lightstep.sharding.weight_average import WeightAverage

__all__ = ["PreparedModel"]


class PreparedModel:
    """The record of one model, found from the user's module and from whatever is wrapped around it.

    It lives as long as the user's module, and keeps neither that nor its optimizers alive.

    Attributes:
        role: for which ``prepare_model`` prepared it; ``None``: nobody did.
        gates: what holds back its readers while updates are deferred.
        gradients: what takes its gradients out of the reduction over ranks, if anything does.
        direct_calls: how DDP hears of forwards of the user's module, where nobody kept what is around it.
        optimizers: made for it by ``create_optimizer`` of any strategy, and still in use.
    """

    _records: ClassVar[weakref.WeakKeyDictionary[nn.Module, PreparedModel]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.role: str | None = None
        self.gates = Gates()
        self.gradients: ReducedGradients | None = None
        self.direct_calls: DirectCalls | None = None
        self.optimizers: weakref.WeakSet[BaseOptimizer] = weakref.WeakSet()
        self._wrapper: weakref.ref[nn.Module] | None = None
        self._average: weakref.ref[WeightAverage] | None = None
        self._given = WeakTensorKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module) -> PreparedModel:
        """The record of ``model``, wrapped or not; an empty one when it is asked for the first time."""
        return cls._records.setdefault(unwrap_model(model), cls())

    @property
    def wrapper(self) -> nn.Module | None:
        """What the strategy wrapped around the user's module, while somebody holds it."""
        return None if self._wrapper is None else self._wrapper()

    @wrapper.setter
    def wrapper(self, wrapper: nn.Module) -> None:
        self._wrapper = weakref.ref(wrapper)

    @property
    def average(self) -> WeightAverage | None:
        """The average of its weights, while somebody holds one."""
        return None if self._average is None else self._average()

    @average.setter
    def average(self, average: WeightAverage) -> None:
        if self.average is not None:
            raise ValueError("the model has a WeightAverage already; drop that one first")
        self._average = weakref.ref(average)

    def wait_for_updates(self) -> None:
        """What is done next sees every deferred update of this model."""
        for optimizer in self.optimizers:
            optimizer.wait_for_update()

    # -- optimizers that were made first

    @contextlib.contextmanager
    def exchanging_parameters(self, model: nn.Module) -> Iterator[list[MixedPrecisionOptimizer]]:
        """While the body exchanges the model's parameters, its optimizers hold none; then they hold the new ones.

        accelerate and the transformers Trainer build the optimizer before the model is sharded. The unsharded weights
        would all stay in memory. Optimizers that have been set up are left alone; yields those that are not.
        """
        waiting = [o for o in self.optimizers if isinstance(o, MixedPrecisionOptimizer) and not o.is_set_up]
        held = _names_in_groups(model, waiting)
        for optimizer in waiting:
            optimizer.forget_parameters()
        try:
            yield waiting
        finally:
            now = dict(_named(model))
            for group, names in held:
                group["params"] = [now[name] for name in names]

    # -- masters start from what was given

    def keep_masters(self, values: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Keep the fp32 values (local shards) of parameters that are rounded, until an optimizer takes them."""
        for parameter, value in values:
            self._given[parameter] = value

    def kept_masters(self, model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Name -> parameter and fp32 values, where some are kept."""
        for name, parameter in unwrap_model(model).named_parameters():
            value: Tensor | None = self._given.get(parameter)
            if value is not None:
                yield name, (parameter, value)

    def unround(self, model: nn.Module) -> None:
        """Put values that are kept back into their (unsharded) parameters, which are about to be rounded again."""
        for _, (parameter, _) in list(self.kept_masters(model)):
            given = None if is_sharded(parameter) else self.initial_master(parameter)
            if given is not None:
                parameter.data = given

    def initial_master(self, parameter: Tensor, keep: bool = False) -> Tensor | None:
        """The fp32 local shard from which a parameter was rounded; without ``keep`` it is not kept here any longer.

        ``None`` where nothing was kept, or where the weight was changed since: then the weight counts.
        """
        given: Tensor | None = self._given.get(parameter) if keep else self._given.pop(parameter, None)
        local = local_tensor(parameter).detach()
        if given is None or given.shape != local.shape:
            return None
        return given if torch.equal(given.to(local.dtype).to(local.device), local) else None


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

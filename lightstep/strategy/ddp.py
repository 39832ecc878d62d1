"""Every rank holds the whole model; ``DistributedDataParallel`` averages the gradients."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightstep.config import ConfigError, DDPSharding
from lightstep.distributed import Replicas, is_sharded, role_group
from lightstep.optimizer.schedule import AtStep, Schedule
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.reduced_gradients import ReplicatedGradients
from lightstep.strategy.process_group import ProcessGroupStrategy, broadcast_from_first, refuse_experts


class DDPStrategy(ProcessGroupStrategy):
    """One all-reduce per bucket of gradients, in the last micro-batch's backward.

    Communicates: the model once from rank 0, gradients (fp32 with ``precision.reduce: float32``), one overflow flag.
    With ``optimizer_state.backend: stream`` each rank updates its share, and sends it to the others during the step.
    """

    _overflow_everywhere = True

    @property
    def _sharding(self) -> DDPSharding:
        return cast(DDPSharding, self.config.sharding)

    def _prepare(self, model: nn.Module) -> nn.Module:
        self._refuse_wrapped(model)
        sharding = self._sharding
        replica = DistributedDataParallel(
            self._placed(model),
            process_group=role_group(),
            bucket_cap_mb=sharding.bucket_mib,
            find_unused_parameters=sharding.find_unused_parameters,
            static_graph=sharding.static_graph,
            gradient_as_bucket_view=True,
        )
        if self.config.precision.reduce == "float32" and self.parameter_dtype != torch.float32:
            _gradients[replica] = ReplicatedGradients(replica, sharding.find_unused_parameters)
        _wrappers[unwrap_model(replica)] = weakref.ref(replica)
        return replica

    def _prepare_reference(self, model: nn.Module) -> nn.Module:
        prepared = super()._prepare_reference(model)
        broadcast_from_first([*prepared.parameters(), *prepared.buffers()])
        return prepared

    def _refuse_wrapped(self, model: nn.Module) -> None:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ConfigError(
                f"{self.name}: there is a DistributedDataParallel in this {type(model).__name__} already; prepare a "
                "model once, and go on with what the first call returned"
            )
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        refuse_experts(self, {name: p for name, p in model.named_parameters() if name not in ignored})
        sharded = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
        if sharded:
            raise ConfigError(
                f"{self.name}: {len(sharded)} parameters are DTensors (first: {sharded[0]}), and sharding.kind ddp "
                "copies plain ones; for tensor parallel models that are replicated too call fully_shard yourself on "
                "another dimension of their mesh, and create_optimizer of a strategy with sharding.kind single"
            )

    def _accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """With ``last=False`` DDP's ``no_sync``: gradients are added up on their rank.

        Raises:
            ConfigError: ``last=False`` with ``sharding.static_graph``.
        """
        if not last and self._sharding.static_graph:
            raise ConfigError(
                f"{self.name}: accumulate(last=False) with sharding.static_graph true: torch's DDP cannot leave out a "
                "reduction of a static graph; set static_graph to false, or train without accumulation"
            )
        replica = _replica(model)
        return contextlib.nullcontext() if last or replica is None else replica.no_sync()

    @property
    def _update_time(self) -> type[Schedule]:
        """DDP's buckets hold all gradients until backward ends: updates in backward would come to the same."""
        known = super()._update_time
        return AtStep if known.in_backward else known

    def _replicas(self, model: nn.Module) -> Replicas | None:
        replica = _replica(model)
        return None if replica is None else Replicas(replica.process_group, self._sends_beside)

    def _fp32_gradients(self, model: nn.Module) -> ReplicatedGradients | None:
        replica = _replica(model)
        return None if replica is None else _gradients.get(replica)


_gradients: weakref.WeakKeyDictionary[nn.Module, ReplicatedGradients] = weakref.WeakKeyDictionary()
_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]] = weakref.WeakKeyDictionary()
"""The user's module -> the DDP module around it: optimizers are made from either."""


def _replica(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module in, under or around ``model`` (``torch.compile`` may lie around it)."""
    outer: nn.Module | None = model
    while isinstance(outer, nn.Module):
        if isinstance(outer, DistributedDataParallel):
            return outer
        outer = getattr(outer, "_orig_mod", None)
    return _wrappers.get(unwrap_model(model), lambda: None)()

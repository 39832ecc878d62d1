"""Every rank holds the whole model; ``DistributedDataParallel`` averages the gradients."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightstep.config import ConfigError, DDPSharding
from lightstep.distributed import Replicas, is_sharded, role_group
from lightstep.optimizer.schedule import AtStep, Schedule
from lightstep.precision.gradients import ReducedGradients
from lightstep.sharding.direct_calls import DirectCalls
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.sharding.reduced_gradients import ReplicatedGradients
from lightstep.strategy.process_group import ProcessGroupStrategy, broadcast_from_first, refuse_experts


class DDPStrategy(ProcessGroupStrategy):
    """One all-reduce per bucket of gradients, in the last micro-batch's backward.

    Communicates: the model once from rank 0, gradients (fp32 with ``precision.reduce: float32``), one overflow flag.
    With ``optimizer_state.backend: stream`` each rank updates its share, and sends it to the others during the step.
    """

    _overflow_everywhere = True
    _reduces_in_backward = False

    @property
    def _sharding(self) -> DDPSharding:
        return cast(DDPSharding, self.config.sharding)

    def _prepare(self, model: nn.Module) -> nn.Module:
        self._refuse_wrapped(model)
        replica = self._replicate(self._placed(model))
        self._equal_masters(replica)
        record = PreparedModel.of(model)
        if record.optimizers:  # made for the module itself, and the loop may go on with it
            record.direct_calls = DirectCalls(replica)
        return replica

    def _replicate(self, model: nn.Module) -> DistributedDataParallel:
        sharding, record = self._sharding, PreparedModel.of(model)
        replica = DistributedDataParallel(
            model,
            process_group=role_group(),
            bucket_cap_mb=sharding.bucket_mib,
            find_unused_parameters=sharding.find_unused_parameters,
            static_graph=sharding.static_graph,
            gradient_as_bucket_view=True,
        )
        if self.config.precision.reduce == "float32" and self.parameter_dtype != torch.float32:
            some_unused = sharding.find_unused_parameters or sharding.static_graph
            record.gradients = ReplicatedGradients(replica, some_unused)
        record.wrapper = replica
        return replica

    def _equal_masters(self, replica: DistributedDataParallel) -> None:
        """DDP has given every rank the first one's rounded weights; the masters that they start from follow."""
        record, group = PreparedModel.of(replica), role_group()
        ignored = replica.parameters_to_ignore
        kept = {name: pair for name, pair in record.kept_masters(replica.module) if name not in ignored}
        everybody: list[list[str]] = [[]] * self.world_size
        dist.all_gather_object(everybody, list(kept), group=group)
        if everybody.count(everybody[0]) < self.world_size:
            record.keep_masters((parameter, None) for parameter, _ in kept.values())
            return
        for parameter, value in kept.values():
            shared = value.to(self.device, copy=True)
            broadcast_from_first([shared], group)
            record.keep_masters([(parameter, shared.to(value.device))])

    def _wrapped(self, model: nn.Module) -> nn.Module:
        inner, record = unwrap_model(model), PreparedModel.of(model)
        if record.role != "trainer":
            return model
        outer = self._replica_everywhere(inner) if model is inner else model
        replica = _replica(outer)
        # Fp32 gradients that come through the hook are refused by the step when nothing reduced them; others are not.
        unnoticed = model is inner or record.gradients is None
        reached = record.direct_calls is not None and record.direct_calls.reach(replica)
        if replica is not None and unnoticed and not reached:
            record.direct_calls = DirectCalls(replica)
        return outer

    def _replica_everywhere(self, inner: nn.Module) -> DistributedDataParallel:
        """What stands around the user's module; a new one on all ranks where some rank kept none."""
        replica = _replica(inner)
        everywhere: list[bool] = [False] * self.world_size
        dist.all_gather_object(everywhere, replica is not None, group=role_group())
        return replica if replica is not None and all(everywhere) else self._replicate(inner)

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

    def _gradients(self, model: nn.Module) -> ReducedGradients | None:
        return PreparedModel.of(model).gradients

    def _refuse_unprepared(self, model: nn.Module) -> None:
        super()._refuse_unprepared(model)
        reduced = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        if self.world_size > 1 and not reduced and _replica(model) is None:
            raise ConfigError(
                f"{self.name}: nothing averages the gradients of this {type(unwrap_model(model)).__name__} over the "
                f"{self.world_size} ranks, which would train apart; call model = strategy.prepare_model(model) on all "
                "ranks before the first step, and keep what it returns"
            )


def _replica(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module in, under or around ``model`` (``torch.compile`` may lie around it)."""
    outer: nn.Module | None = model
    while isinstance(outer, nn.Module):
        if isinstance(outer, DistributedDataParallel):
            return outer
        outer = getattr(outer, "_orig_mod", None)
    return cast(DistributedDataParallel | None, PreparedModel.of(model).wrapper)

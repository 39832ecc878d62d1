"""DDP: every rank has the whole model, and ``DistributedDataParallel`` averages the gradients."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from lightstep.config import ConfigError, DDPSharding
from lightstep.distributed import Replicas, is_sharded, role_group
from lightstep.optimizer.queue import UpdateTime
from lightstep.precision.gradients import ReducedGradients
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.sharding.reduced_gradients import DirectCalls, GradientsInPlace, ReplicatedGradients
from lightstep.strategy.process_group import ProcessGroupStrategy, broadcast_from_first, refuse_experts


class DDPStrategy(ProcessGroupStrategy):
    """One all-reduce per bucket of gradients, in the last micro-batch's backward.

    Communication: the model once from rank 0; in each step the gradients (fp32 with ``precision.reduce: float32``) and
    one overflow flag. With ``optimizer_state.backend: stream`` each rank updates a share of the parameters, and sends
    it to the others.
    """

    _overflow_everywhere = True

    @property
    def _sharding(self) -> DDPSharding:
        return cast(DDPSharding, self.config.sharding)

    def _prepare(self, model: nn.Module) -> nn.Module:
        self._refuse_wrapped(model)
        replica = self._replicate(self._place_model(model))
        self._broadcast_masters(replica)
        record = PreparedModel.of(model)
        if record.optimizers:  # they were created for the module itself, and the loop may call it directly
            record.direct_calls = DirectCalls(replica)
        return replica

    def _replicate(self, model: nn.Module) -> DistributedDataParallel:
        sharding, record = self._sharding, PreparedModel.of(model)
        replica = _Replica(
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
        else:
            record.gradients = GradientsInPlace(replica)
        record.wrapper = replica
        return replica

    def _broadcast_masters(self, replica: DistributedDataParallel) -> None:
        """Give every rank the first rank's initial masters: DDP has given it the first rank's rounded weights.

        If ranks do not have masters for the same parameters, they are dropped.
        """
        record, group = PreparedModel.of(replica), role_group()
        ignored = replica.parameters_to_ignore
        kept = {name: pair for name, pair in record.kept_masters(replica.module) if name not in ignored}
        all_names: list[list[str]] = [[]] * self.world_size
        dist.all_gather_object(all_names, list(kept), group=group)
        if all_names.count(all_names[0]) < self.world_size:
            record.keep_masters((parameter, None) for parameter, _ in kept.values())
            return
        for parameter, value in kept.values():
            shared = value.to(self.device, copy=True)
            broadcast_from_first([shared], group)
            record.keep_masters([(parameter, shared.to(value.device))])

    def _with_wrapper(self, model: nn.Module) -> nn.Module:
        inner, record = unwrap_model(model), PreparedModel.of(model)
        if record.role != "trainer":
            return model
        outer = self._replica_on_all_ranks(inner) if model is inner else model
        replica = _find_replica(outer)
        # With DDP's fp32 hook, step() refuses gradients that were not reduced. Without it nothing would notice.
        unnoticed = model is inner or not isinstance(record.gradients, ReplicatedGradients)
        reached = record.direct_calls is not None and record.direct_calls.belongs_to(replica)
        if replica is not None and unnoticed and not reached:
            record.direct_calls = DirectCalls(replica)
        return outer

    def _replica_on_all_ranks(self, inner: nn.Module) -> DistributedDataParallel:
        """The DDP wrapper of the user's module. If a rank has none, all ranks create a new one."""
        replica = _find_replica(inner)
        found: list[bool] = [False] * self.world_size
        dist.all_gather_object(found, replica is not None, group=role_group())
        return replica if replica is not None and all(found) else self._replicate(inner)

    def _prepare_reference(self, model: nn.Module) -> nn.Module:
        prepared = super()._prepare_reference(model)
        broadcast_from_first([*prepared.parameters(), *prepared.buffers()])
        return prepared

    def _refuse_wrapped(self, model: nn.Module) -> None:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ConfigError(
                f"{self.name}: there is a DistributedDataParallel in this {type(model).__name__} already; prepare a "
                "model once, and use what the first call returned"
            )
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        refuse_experts(self, {name: p for name, p in model.named_parameters() if name not in ignored})
        sharded = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
        if sharded:
            raise ConfigError(
                f"{self.name}: {len(sharded)} parameters are DTensors (first: {sharded[0]}), and sharding.kind ddp "
                "replicates only plain ones; for a tensor-parallel model call fully_shard yourself on another "
                "dimension of its mesh, and create the optimizer with a strategy of sharding.kind single"
            )

    def _accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """With ``last=False`` DDP's ``no_sync()``: gradients are accumulated locally.

        Raises:
            ConfigError: ``last=False`` with ``sharding.static_graph``.
        """
        if not last and self._sharding.static_graph:
            raise ConfigError(
                f"{self.name}: accumulate(last=False) with sharding.static_graph true: torch's DDP cannot leave out a "
                "reduction of a static graph; set static_graph to false, or train without accumulation"
            )
        replica = _find_replica(model)
        return contextlib.nullcontext() if last or replica is None else replica.no_sync()

    @property
    def _update_time(self) -> UpdateTime:
        """Nothing is updated in backward: DDP's buckets keep all gradients until it ends."""
        configured = super()._update_time
        return configured.without_early or configured

    def _replicas(self, model: nn.Module) -> Replicas | None:
        replica = _find_replica(model)
        return None if replica is None else Replicas(replica.process_group, self._overlaps_sends)

    def _reduced_gradients(self, model: nn.Module) -> ReducedGradients | None:
        replica, gradients = _find_replica(model), PreparedModel.of(model).gradients
        return GradientsInPlace(replica) if gradients is None and replica is not None else gradients

    def _check_prepared(self, model: nn.Module) -> None:
        super()._check_prepared(model)
        reduced = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        if self.world_size > 1 and not reduced and _find_replica(model) is None:
            raise ConfigError(
                f"{self.name}: nothing averages the gradients of this {type(unwrap_model(model)).__name__} over the "
                f"{self.world_size} ranks, which would train apart; call model = strategy.prepare_model(model) on all "
                "ranks before the first step, and keep what it returns"
            )


class _Replica(DistributedDataParallel):
    """In loops under ``with model.join():`` all ranks may run out of inputs together, and none before the others."""

    def join_hook(self, **keywords: Any) -> JoinHook:
        hook = super().join_hook(**keywords)
        hook.main_hook = _refuse_to_shadow
        return hook


def _refuse_to_shadow() -> NoReturn:
    """Called on a rank that has left ``join()`` while others train: it has no part in their steps."""
    raise RuntimeError(
        "this rank has run out of inputs in join() before others, whose optimizer.step() communicates with it and "
        "would hang: give all ranks the same number of batches, for example by "
        "DistributedSampler(dataset, drop_last=True)"
    )


def _find_replica(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module that is ``model``, or inside its ``torch.compile`` wrapper, or that wraps ``model``."""
    outer: nn.Module | None = model
    while isinstance(outer, nn.Module):
        if isinstance(outer, DistributedDataParallel):
            return outer
        outer = getattr(outer, "_orig_mod", None)
    return cast(DistributedDataParallel | None, PreparedModel.of(model).wrapper)

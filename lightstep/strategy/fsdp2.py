"""FSDP2: ``fully_shard`` on every transformer block and on the root. Also HSDP."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import _random as tensor_random

from lightstep.checkpoint.tensors import shard_of
from lightstep.config import ConfigError, FSDP2Sharding
from lightstep.distributed import Replicas, is_sharded, local_tensor, make_mesh, role_group, world_size
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import Place
from lightstep.sharding.dtypes import DtypePlan, planned_dtypes, tensor_of
from lightstep.sharding.fsdp_groups import accumulate_whatever_is_used, forget_interrupted, sharded_modules
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.parameter_reads import ModuleHook, weakly
from lightstep.sharding.preparation import (
    cast_tensors,
    hold_shards,
    initialise_weights,
    to_device,
    unrounded_values,
)
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.sharding.reduced_gradients import sharded_gradients
from lightstep.sharding.shard_visits import ShardVisits
from lightstep.sharding.units import fp32_parts, sharding_units
from lightstep.sharding.weight_visits import refuse_other_tensors
from lightstep.state.host_weights import require_room
from lightstep.strategy.process_group import ProcessGroupStrategy, broadcast_from_first, refuse_experts


class FSDP2Strategy(ProcessGroupStrategy):
    """Parameters, gradients and optimizer state sharded over the ranks; with ``replicate > 1`` also replicated (HSDP).

    Communication: each unit's weights before its forward and backward; its gradients after its backward (in fp32 with
    ``precision.reduce: float32``, and not rounded before the optimizer gets them); in each step one number for the norm
    and one for the overflow flag. With replicas and ``optimizer_state.backend: stream`` each replica updates its share
    of every shard, and sends it to the others.
    """

    _overflow_everywhere = True

    @property
    def _sharding(self) -> FSDP2Sharding:
        return cast(FSDP2Sharding, self.config.sharding)

    def _prepare_reference(self, model: nn.Module) -> nn.Module:
        return self._prepare(model)

    def _prepare(self, model: nn.Module) -> nn.Module:
        inner = unwrap_model(model)
        plan = planned_dtypes(inner, self.parameter_dtype)
        self._refuse_sharded(inner, plan)
        PreparedModel.of(inner).unround(inner)
        mesh = self.mesh()
        units = [*self._units(inner), inner]
        parts = self._fp32_parts(inner, units, plan)
        loaded, same_dtypes = self._check_initial_weights(inner)
        visits = self._shard_visits(inner)
        if not loaded or not same_dtypes:
            cast_tensors(inner, plan)
        if visits is not None and loaded:
            visits.add(inner, sharded_modules(inner))  # experts on a mesh of their own
        for unit in units:
            unrounded = self._broadcast_weights(unit, plan) if loaded else {}
            for part in parts[unit]:
                if part is not unit:
                    self._shard(part, mesh, False, torch.float32)
            is_trained_root = unit is inner and any(p.requires_grad for p in inner.parameters())
            self._shard(unit, mesh, is_trained_root, torch.float32 if unit in parts[unit] else None)
            PreparedModel.of(inner).keep_masters(_local_shards(unrounded, unit))
            if visits is not None and loaded:
                visits.add(inner, [*parts[unit], unit])
        if not loaded:
            self._initialise(inner, mesh, visits)
        if visits is not None:
            visits.watch(inner)
            PreparedModel.of(inner).weight_visits = visits
        inner.register_forward_pre_hook(ModuleHook(_forget_interrupted), prepend=True)
        sharded_gradients.add_model(inner)  # an optimizer that was created before may be given these parameters
        return model

    def _shard_visits(self, model: nn.Module) -> ShardVisits | None:
        """What brings shards that will rest on the host.

        Raises:
            HostMemoryError: the host has too little memory for them.
            ValueError: a parameter is no plain tensor.
        """
        if self.config.weights.placement == "device":
            return None
        refuse_other_tensors((name, local_tensor(parameter)) for name, parameter in model.named_parameters())
        shards = self._mesh_sizes()[1]

        def size(parameters: Iterable[Tensor], dtype: torch.dtype) -> int:
            own = sum(local_tensor(p).numel() if is_sharded(p) else p.numel() / shards for p in parameters)
            return int(own * dtype.itemsize)

        weights, dtype = self._new_host_weights(), self.parameter_dtype
        if self.config.precision.reduce == "float32":
            weights.gradient_dtype = torch.float32
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        require_room(size(model.parameters(), dtype), size(trained, weights.gradient_dtype or dtype))
        return ShardVisits(weights)

    def _fp32_parts(
        self, model: nn.Module, units: list[nn.Module], plan: DtypePlan
    ) -> Mapping[nn.Module, list[nn.Module]]:
        """The parts of each unit that are gathered in fp32: what the model keeps in fp32 when it computes in 16 bits.

        FSDP2 needs one dtype for the trainable parameters of a group. Frozen ones may have others, unless it casts.
        """
        casts = self._sharding.compute != "parameters"
        plan = planned_dtypes(model, getattr(torch, self._sharding.compute)) if casts else plan
        present = {key: p for key in plan if isinstance(p := tensor_of(*key), nn.Parameter)}
        grouped = {key for key, parameter in present.items() if casts or parameter.requires_grad}
        usual = getattr(torch, self._sharding.compute) if casts else self.parameter_dtype
        kept = {key for key in grouped if plan[key] != usual}
        return {unit: fp32_parts(unit, units, grouped, kept) for unit in units}

    def _refuse_sharded(self, model: nn.Module, plan: DtypePlan) -> None:
        if isinstance(model, FSDPModule):
            raise ConfigError(
                f"{self.name}: this {type(model).__name__} is sharded already (by prepare_model or fully_shard); "
                "prepare a model once, and use what the first call returned"
            )
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.RecursiveScriptModule):
                raise ConfigError(
                    f"{self.name}: {name or 'the model'} is scripted (torch.jit), and FSDP2 cannot shard such modules: "
                    "use the module as it was before torch.jit.script (torch.compile works), or sharding.kind ddp"
                )
        refuse_experts(self, dict(model.named_parameters()))
        by_fsdp = {p for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
        dtypes = {tensor_of(*key): dtype for key, dtype in plan.items()}
        for name, parameter in model.named_parameters():
            if is_sharded(parameter) and parameter not in by_fsdp:
                raise ConfigError(
                    f"{self.name}: {name} is a DTensor already (tensor parallel), and sharding.kind fsdp2 shards "
                    "only plain parameters, over all ranks; call fully_shard yourself on another dimension of the same "
                    "mesh, and create the optimizer with a strategy of sharding.kind single"
                )
            if parameter in by_fsdp and dtypes.get(parameter, parameter.dtype) != parameter.dtype:
                raise ConfigError(
                    f"{self.name}: {name} was sharded by fully_shard in {parameter.dtype}, and precision.parameters is "
                    f"{self.config.precision.parameters}; cast its module before fully_shard"
                )

    def mesh(self) -> DeviceMesh:
        """1-D ``(shard,)``, or ``(replicate, shard)`` for HSDP, over all ranks that train.

        Raises:
            ConfigError: the mesh of the strategy file does not fit the number of ranks, or this one does not train.
        """
        self.roles.require_trainer("mesh()", "nothing is sharded here (strategy.fsdp_version(model) is 0)")
        replicate, shard = self._mesh_sizes()
        sizes = {"shard": shard} if replicate == 1 else {"replicate": replicate, "shard": shard}
        return make_mesh(self.device.type, sizes)

    def _mesh_sizes(self) -> tuple[int, int]:
        ranks = self.world_size
        replicate, shard = self._sharding.mesh.replicate, self._sharding.mesh.shard
        fixed = shard if replicate == "auto" else replicate
        assert isinstance(fixed, int)
        if ranks % fixed:
            side = "shard" if replicate == "auto" else "replicate"
            raise ConfigError(
                f"{self.name}: sharding.mesh.{side} is {fixed}, which does not divide the number of ranks, {ranks}"
            )
        sizes = (
            (ranks // fixed, fixed) if replicate == "auto" else (fixed, ranks // fixed if shard == "auto" else shard)
        )
        if sizes[0] * sizes[1] != ranks:
            raise ConfigError(
                f"{self.name}: sharding.mesh is {sizes[0]} × {sizes[1]} (replicate × shard) = {sizes[0] * sizes[1]} "
                f"ranks, and {ranks} are running; set one of the two to auto"
            )
        after_forward = self._sharding.reshard_after_forward
        if not isinstance(after_forward, bool) and (after_forward >= sizes[1] or sizes[1] % after_forward):
            raise ConfigError(
                f"{self.name}: sharding.reshard_after_forward is {after_forward}; true, false or a divisor between 1 "
                f"and {sizes[1]} (the shards) is needed"
            )
        return sizes

    def _units(self, model: nn.Module) -> list[nn.Module]:
        self._checkpoint_activations(model)
        return sharding_units(model, self._sharding.wrap)

    def _shard(self, unit: nn.Module, mesh: DeviceMesh, is_trained_root: bool, kept: torch.dtype | None = None) -> None:
        """``fully_shard``. A part that is ``kept`` in its dtype is gathered and reduced in it, and not cast."""
        after_forward = self._sharding.reshard_after_forward
        compute, reduce = self._sharding.compute, self.config.precision.reduce
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute == "parameters" or kept is not None else getattr(torch, compute),
            reduce_dtype=torch.float32 if reduce == "float32" else kept or self.parameter_dtype,
        )
        # None is torch's default: the root stays unsharded after forward, because backward needs it first.
        reshard = None if is_trained_root and after_forward is True else after_forward
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)

    # -- weights

    def _check_initial_weights(self, model: nn.Module) -> tuple[bool, bool]:
        """Whether rank 0 has the weights, and whether the models of all ranks have the same dtypes.

        The other ranks may have the model on the meta device, or with other weights.

        Raises:
            ValueError: rank 0 has only part of the weights, or has none and another rank has them.
        """
        on_meta = [parameter.is_meta for parameter in model.parameters()]
        loaded = None if any(on_meta) and not all(on_meta) else not any(on_meta)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (loaded, [parameter.dtype for parameter in model.parameters()]), role_group())
        all_loaded, dtypes = zip(*gathered, strict=True)
        if all_loaded[0] is None or (not all_loaded[0] and any(all_loaded)):
            raise ValueError(
                "rank 0 has the model on the meta device, wholly or in part, and other ranks do not; build it on a "
                "real device on rank 0 at least, or on the meta device on all ranks"
            )
        return bool(all_loaded[0]), dtypes.count(dtypes[0]) == len(dtypes)

    def _broadcast_weights(self, unit: nn.Module, plan: DtypePlan) -> dict[str, Tensor]:
        """Give every rank rank 0's weights of a unit, on its device, and cast them. They are sharded next.

        Returns:
            The fp32 values of trainable parameters by name, if the masters are initialised from them; else empty.
        """
        to_device(unit, self.device)
        tensors = [*unit.parameters(), *unit.buffers()]
        broadcast_from_first(tensor for tensor in tensors if not is_sharded(tensor))
        names = {parameter: name for name, parameter in unit.named_parameters()}
        values = unrounded_values(unit) if self._rounds_weights else []
        cast_tensors(unit, plan)
        return {names[p]: value for p, value in values if p.dtype != torch.float32}

    def _initialise(self, model: nn.Module, mesh: DeviceMesh, visits: ShardVisits | None) -> None:
        """Allocate the shards of a model on the meta device, where they will rest, and initialise them with the model's
        own functions, on the device."""
        if visits is None:
            model.to_empty(device=self.device)
        else:
            hold_shards(model)
            visits.add(model, sharded_modules(model))
            to_device(model, self.device)
        seed = torch.tensor([torch.initial_seed() % 2**31], device=self.device)
        dist.broadcast(seed, group=role_group(), group_src=0)
        on_gpu = self.device.type != "cpu"
        with torch.random.fork_rng(devices=[self.device] if on_gpu else [], device_type=self.device.type):
            if on_gpu:
                # On a GPU mesh all shards draw from one random sequence. Without a seed torch would first synchronise
                # the state over the default process group, which may include ranks that do not train.
                tensor_random.manual_seed(int(seed), mesh)
            else:
                torch.manual_seed(int(seed) + mesh.get_local_rank(mesh.ndim - 1))
            with warnings.catch_warnings(), contextlib.nullcontext() if visits is None else visits.initialising():
                # torch warns about CPU meshes, which are seeded above
                warnings.filterwarnings("ignore", message="DTensor random operators")
                initialise_weights(model, PreparedModel.of(model).loaded_next)
        broadcast_from_first(buffer for buffer in model.buffers() if not is_sharded(buffer))
        if mesh.ndim == 2:
            self._broadcast_to_replicas(model, mesh)

    @staticmethod
    def _broadcast_to_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
        broadcast_from_first((local_tensor(parameter) for parameter in model.parameters()), mesh.get_group(0))

    # -- training

    def _accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """With ``last=False`` unsharded gradients are accumulated locally, in the dtype of the reduction.

        Where weights rest on the host, that memory is what is short: every micro-batch is reduced.
        """
        on_host = self.config.weights.placement == "host"
        return contextlib.nullcontext() if last or on_host else _no_sync(model)

    def _reshard(self, model: nn.Module) -> None:
        """Reshard all units. The root stays unsharded after a forward: its parameters are no DTensors then.

        FSDP2 reshards nothing of the root that a forward has gathered until that forward ends.
        """
        inner = unwrap_model(model)
        if isinstance(inner, FSDPModule):
            _forget_interrupted(inner)
        for module in sharded_modules(model):
            cast(FSDPModule, module).reshard()

    def _register(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        super()._register(model, optimizer)
        reshard = weakly(model, self._reshard)  # weights that a forward since has gathered: the next one would use them
        optimizer.register_step_pre_hook(lambda *_: reshard())

    def _places(self, model: nn.Module) -> Mapping[Tensor, Place]:
        found = super()._places(model)
        if sharded_modules(model):
            for optimizer in self._optimizers_of(model):
                _refuse_unsharded(optimizer, found)
        return found

    def _check_prepared(self, model: nn.Module) -> None:
        super()._check_prepared(model)
        if self.world_size > 1 and not any(map(is_sharded, model.parameters())):
            raise ConfigError(
                f"{self.name}: this {type(unwrap_model(model)).__name__} is not sharded, and its gradients are not "
                f"reduced over the {self.world_size} ranks, which would train apart; call "
                "strategy.prepare_model(model) on all ranks before the first step"
            )

    def _replicas(self, model: nn.Module) -> Replicas | None:
        return Replicas.of_shards(model.parameters(), self._overlaps_sends)


def _local_shards(values: Mapping[str, Tensor], unit: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """A unit's parameters and, on the host, this rank's shards of the whole ``values``, which are by name."""
    parameters = dict(unit.named_parameters()) if values else {}
    for name, value in values.items():
        shard = shard_of(parameters[name])
        if shard is not None:
            region = tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.lengths, strict=True))
            yield parameters[name], value[region].clone().cpu()


def _refuse_unsharded(optimizer: BaseOptimizer, shards: Mapping[Tensor, Place]) -> None:
    """Raise ``ValueError`` if parameters of the optimizer are neither sharded nor the model's, or are not reduced."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unsharded = [tuple(p.shape) for p in given if not is_sharded(p) and p not in shards]
    if unsharded:
        raise ValueError(
            f"{len(unsharded)} of the optimizer's parameters (shapes {unsharded[:3]}) are not the sharded model's: "
            "they are from before it was sharded, or unsharded weights of its root, which a forward leaves there; put "
            "model.parameters() of the prepared model into param_groups, after model.reshard()"
        )
    own = [p for p in given if p.requires_grad and not is_sharded(p) and not getattr(p, "differs_across_ranks", False)]
    if own and world_size() > 1:
        raise ValueError(
            f"{shards[own[0]].name} and {len(own) - 1} others of the optimizer's parameters were put into the model "
            "after prepare_model(): FSDP2 has not sharded them and does not reduce their gradients, and ranks would "
            "drift apart. Put them in before prepare_model(); or mark those whose values are each rank's own with "
            "parameter.differs_across_ranks = True"
        )


def _forget_interrupted(root: nn.Module, *_: Any) -> None:
    forget_interrupted(root, any(optimizer.unreduced for optimizer in PreparedModel.of(root).optimizers))


@contextlib.contextmanager
def _no_sync(model: nn.Module) -> Iterator[None]:
    units = [cast(FSDPModule, module) for module in sharded_modules(model)]
    for unit in units:
        accumulate_whatever_is_used(unit)
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)

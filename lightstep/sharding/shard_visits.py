"""FSDP2 reads shards that rest on the host from the device, and their gradients leave it as they are reduced.

What FSDP2 gathers together is a group. Its shards are on the device while FSDP2 copies them into the all-gather's
input, on the stream that copies; those of the groups that will be gathered next are brought meanwhile. When a group's
gradients have been reduced, they leave the device on the stream that has reduced them.

Between steps the parameters are DTensors whose shards are on the host, as under FSDP2's ``CPUOffloadPolicy``. That
policy copies tensor by tensor, on the stream of the computation where a mesh has one rank, and rounds gradients before
it takes them to the host.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightstep.distributed import like, local_tensor
from lightstep.optimizer.host_gradients import HostGradients, by_turns
from lightstep.sharding.fsdp_groups import ParameterGroup, parameter_groups, sharded_modules
from lightstep.sharding.parameter_reads import NO_BACKWARD, ModuleHook, await_host, called_modules, inputs_on, weakly
from lightstep.sharding.weight_visits import AHEAD, VisitOrder, refuse_other_tensors
from lightstep.state.host_weights import HostWeights, WeightGroup, groups_of, require_room
from lightstep.state.lanes import WaitTimes

__all__ = ["ShardVisits", "visits_of_sharded"]


def visits_of_sharded(model: nn.Module, weights: HostWeights) -> ShardVisits:
    """Move the shards of a model that ``fully_shard`` has sharded to the host.

    Raises:
        HostMemoryError: the host has too little memory.
        ValueError: FSDP2 keeps them on the host itself; they have no memory yet, or are no plain tensors; or a
            trainable parameter is in no FSDP module. Nothing has been moved.
    """
    modules = sharded_modules(model)
    for module in modules:  # a forward leaves gathered weights in the root
        cast(FSDPModule, module).reshard()
    _refuse_sharding(model, [group for module in modules for group in parameter_groups(module)])
    sizes = [(local_tensor(parameter).nbytes, parameter.requires_grad) for parameter in model.parameters()]
    require_room(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))
    visits = ShardVisits(weights)
    visits.add(model, modules)
    visits.watch(model)
    return visits


def _refuse_sharding(model: nn.Module, groups: Iterable[ParameterGroup]) -> None:
    shards: set[nn.Parameter] = set()
    for group in groups:
        if group.is_offloaded:
            raise ValueError(
                "fully_shard was called with CPUOffloadPolicy, and weights.placement is host: both keep the shards on "
                "the host; shard without the policy (torchtitan: training.enable_cpu_offload)"
            )
        shards.update(group.shards)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device, and weights.placement is host: give the model memory and weights "
                "first (to_empty, and its own initialisation)"
            )
        if parameter.requires_grad and parameter not in shards:
            raise ValueError(
                f"{name} is in no FSDP module, and weights.placement is host: call fully_shard on the root, too, or "
                "set placement: device"
            )
    refuse_other_tensors((name, local_tensor(parameter)) for name, parameter in model.named_parameters())


class ShardGroup(WeightGroup):
    """The shards that FSDP2 gathers together. They are always at rest: only FSDP2 gets them on the device."""

    def __init__(self, owner: HostWeights, group: ParameterGroup, name: str) -> None:
        self.hooks = group.hooks
        self._parts = [weakref.ref(part) for part in group.parts]  # they refer to the model
        room = [part._sharded_param_data.numel() for part in group.parts]  # all ranks gather the same number
        super().__init__(owner, group.shards, name, room)
        self._memories = self.weights.room_on_host, self.weights.room_on_device
        self._is_held = False
        pairs = list(zip(self.parameters, self.weights.on_device, strict=True))
        self._reduced = [like(parameter, tensor) for parameter, tensor in pairs]
        self._show_to_fsdp(on_device=False)

    def _put(self, number: int, tensor: Tensor) -> None:
        parameter: Any = self.parameters[number]
        parameter.data = like(parameter, tensor)  # its device
        parameter._local_tensor = tensor.data  # with a version counter of its own: copies are no writes of the user

    def _show_to_fsdp(self, on_device: bool) -> None:
        for reference, memory in zip(self._parts, self._memories[on_device], strict=True):
            part = reference()
            assert part is not None
            part._sharded_param_data = memory

    @property
    def is_entered(self) -> bool:
        """Whether the module's parameters are whole now: the shards are none of them."""
        return self.hooks.is_gathered

    def hold(self) -> None:
        """FSDP2 reads the shards next, on the current stream.

        Raises:
            RuntimeError: the module has other parameters than those that rest on the host.
        """
        self._refuse_replaced()
        lane = self.owner.lanes.caller()
        lane.wait(self.weights.used)  # that may have been on another stream
        self.owner.hold(self.weights, self)
        self._is_held = True
        self.weights.is_fresh = False
        self._show_to_fsdp(on_device=True)

    def _refuse_replaced(self) -> None:
        for reference, parameter in zip(self._parts, self.parameters, strict=True):
            part = reference()
            if part is not None and part.sharded_param is not parameter:
                raise RuntimeError(
                    f"{part._param_fqn} is another parameter than the one that rests on the host (weights.placement: "
                    "host): load without assign=True, which replaces parameters, or load before prepare_model"
                )

    def release(self) -> None:
        """FSDP2 has read them, or was interrupted before."""
        self._show_to_fsdp(on_device=False)
        if self._is_held:
            self._is_held = False
            self.keep_after_forward()
            self.owner.release(self.weights)

    def abandon(self) -> None:
        self._is_held = False
        self._show_to_fsdp(on_device=False)
        super().abandon()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """In the body the parameters are on the device. What it writes to them is taken to the host at its end."""
        with self.owner.holding([self]):
            self._place(self.weights.on_device)
            try:
                yield
            finally:
                self._place(self._at_rest)
                self.owner.write_back(self.weights)
        self.owner.free()
        self.weights.settle()

    @contextlib.contextmanager
    def taking_gradients(self) -> Iterator[None]:
        """In the body the parameters' gradients may be on the device, as far as torch sees."""
        self._pass_for(self._reduced)
        try:
            yield
        finally:
            self._pass_for([like(parameter, local_tensor(parameter)) for parameter in self.parameters])

    def _pass_for(self, tensors: Iterable[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor  # torch compares the devices; the shard itself stays where it is


class _ForOperations(TorchFunctionMode):
    """Operations of torch have the groups of their arguments on the device, which stay until one needs others."""

    def __init__(self, weights: HostWeights, on_device: contextlib.ExitStack) -> None:
        super().__init__()
        self._weights, self._on_device = weights, on_device
        self._present: list[WeightGroup] = []

    def __torch_function__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        tensors = (leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor))
        needed = groups_of(map(self._weights.home_of, tensors))
        if not set(needed) <= set(self._present):
            self._on_device.close()
            self._present = needed
            for group in needed:
                self._on_device.enter_context(cast(ShardGroup, group).on_device())
        return function(*arguments, **named)


class ShardVisits:
    """Hooks on one FSDP2 model.

    Attributes:
        takers: take the gradients of a group when they have been reduced, on the stream that has reduced them.
    """

    def __init__(self, weights: HostWeights) -> None:
        self.weights = weights
        weights.stalls = WaitTimes()
        self.takers: weakref.WeakSet[HostGradients] = weakref.WeakSet()
        self._groups: list[ShardGroup] = []
        self._forward, self._backward = VisitOrder(()), VisitOrder(())
        self._task = NO_BACKWARD

    def add(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Move the shards of these FSDP modules of the model to the host."""
        names = {module: name for name, module in model.named_modules()}
        for module in dict.fromkeys(modules):
            self._add(module, names[module] or type(model).__name__)

    def _add(self, module: nn.Module, name: str) -> None:
        for group in parameter_groups(module):
            if not group.parts:
                continue
            own = ShardGroup(self.weights, group, name)
            self._groups.append(own)
            group.hooks.hold, group.hooks.release = partial(weakly(self, ShardVisits.hold), own), own.release
            group.hooks.keeping_graph = partial(self.weights.refuse_kept_graph, gathered=True)
            group.hooks.reducing = partial(weakly(self, ShardVisits.reducing), own)
            group.hooks.after_reduction = partial(weakly(self, ShardVisits.take), own)
            if self.weights.device.type != "cpu":
                group.hooks.awaiting = weakly(self, ShardVisits.wait_for)

    def watch(self, model: nn.Module) -> None:
        """All modules have been added."""
        order = self._groups
        self._forward, self._backward = VisitOrder(order), VisitOrder(order[::-1])
        await_host(model.modules(), self.weights)
        for number, module in enumerate(called_modules(model)):
            begin = ShardVisits._begin_part if number else ShardVisits._begin_forward
            module.register_forward_pre_hook(ModuleHook(weakly(self, begin)), prepend=True)
            # FSDP2 moves the inputs of what is called first. `generate` moves them back, to where weights rest.
            module.register_forward_pre_hook(ModuleHook(partial(inputs_on, self.weights.device)), with_kwargs=True)

    @contextlib.contextmanager
    def initialising(self) -> Iterator[None]:
        """In the body the model's own functions write to its shards, on the device and group by group."""
        with contextlib.ExitStack() as on_device, _ForOperations(self.weights, on_device):
            yield

    def end_if_interrupted(self, between_steps: bool = False) -> None:
        """Nothing is held outside of FSDP2's reads."""

    def _begin_forward(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            self.weights.forget_idle()
            self._forward.start()

    def _begin_part(self, *_: Any) -> None:
        """A forward of a part that is not the first: the pass goes on."""
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            self.weights.forget_idle()

    def hold(self, group: ShardGroup) -> None:
        group.hold()
        task = torch._C._current_graph_task_id()
        if task != NO_BACKWARD and task != self._task:
            self._task = task
            self._backward.start()
            Variable._execution_engine.queue_callback(weakly(self, ShardVisits._end_backward))
        order = self._forward if task == NO_BACKWARD else self._backward
        order.prefetch_after(group, self.weights)
        if task == NO_BACKWARD and self._forward.visited == AHEAD:
            with group.hooks.on_reducing_stream():  # their memory is that stream's
                for taker in self.takers:
                    taker.release()

    def wait_for(self, event: torch.Event) -> None:
        """The computation waits for FSDP2, which may have waited for shards or for gradients that leave."""
        assert self.weights.stalls is not None
        self.weights.stalls.wait(self.weights.lanes.caller(), event)

    @contextlib.contextmanager
    def reducing(self, group: ShardGroup) -> Iterator[None]:
        """In the body FSDP2 sets gradients on the device. What the user has put there, on the host, leaves before."""
        with group.hooks.on_reducing_stream():
            self.take(group)
        with group.taking_gradients():
            yield

    def take(self, group: ShardGroup) -> None:
        with torch.no_grad():
            for taker in by_turns(self.takers):
                taker.take(group)

    def _end_backward(self) -> None:
        self._task = NO_BACKWARD
        self.weights.forget_idle(but={group for taker in self.takers for group in taker.staying()})

"""The forward and backward of each module have its weights on the device, which rest on the host otherwise.

A transformer block *enters* its weights before its forward and leaves them after it, and does so again for its
backward: from the moment when the gradient of its output arrives until that of its input is complete. Recomputed
forwards lie within that. Every other module with parameters of its own (an embedding, the head) does the same, and so
does each expert of a block, if experts are modules: one that gets no tokens is not called, and its weights stay on the
host. Experts that are stacked in one module come together, and apart from the rest of their block. The weights of the
modules that will run next are brought meanwhile.

A model whose forward reads a weight by itself (a fused loss takes the head's) has it until the end of that forward, and
for all of its backward. A block that reads the weights of its experts by itself has them whenever it has its own.

When a module leaves its backward, its gradients leave the device (:attr:`WeightVisits.takers`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from lightstep.optimizer.host_gradients import HostGradients, by_turns
from lightstep.optimizer.managed_parameters import refuse_shared_memory
from lightstep.sharding.parameter_reads import (
    NO_BACKWARD,
    ModuleHook,
    await_host,
    called_modules,
    differentiable,
    differentiable_results,
    inputs_on,
    weakly,
)
from lightstep.sharding.preparation import experts_of, transformer_blocks
from lightstep.state.host_weights import HostWeights, WeightGroup, require_room

__all__ = ["AHEAD", "VisitOrder", "WeightVisits", "move_to_host", "refuse_other_tensors"]

AHEAD = 2
"""Modules whose weights are brought before they are needed."""


def move_to_host(model: nn.Module, weights: HostWeights) -> None:
    """Move the model's parameters to the host, in groups of those that one module reads, and its buffers to the device.

    Raises:
        HostMemoryError: the host has too little memory.
        ValueError: parameters share memory, or are no plain tensors. Nothing has been moved.
    """
    refuse_shared_memory(model.named_parameters())
    refuse_other_tensors(model.named_parameters())
    listed = list(model.parameters())
    moved = sum(p.nbytes for p in listed if p.device.type != "cpu")  # others give their memory back, one by one
    largest = max((p.nbytes for p in listed), default=0)
    require_room(max(moved, largest), sum(p.nbytes for p in listed if p.requires_grad))
    seen: set[nn.Parameter] = set()
    for name, _, parameters in _visiting_modules(model):
        own = [parameter for parameter in dict.fromkeys(parameters) if parameter not in seen]
        seen.update(own)
        if own:
            WeightGroup(weights, own, name or type(model).__name__)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(weights.device)


def refuse_other_tensors(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ``ValueError`` for a parameter of a tensor class of its own (quantised weights)."""
    for name, tensor in named:
        if type(tensor.data) is not Tensor:
            raise ValueError(
                f"{name} is a {type(tensor.data).__name__}, and weights that rest on the host are plain tensors: "
                "set weights.placement: device"
            )


def _visiting_modules(model: nn.Module) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """The blocks, their experts, and the modules outside of blocks that have parameters, each with what it reads."""
    blocks = set(transformer_blocks(model))
    experts = {expert for block in blocks for expert in experts_of(block)}
    visiting = blocks | experts
    inside = {part for block in blocks for part in block.modules()}
    found = []
    for name, module in model.named_modules():
        if module in visiting:
            found.append((name, module, list(_read_by(module, experts))))
        elif module not in inside and (own := list(module.parameters(recurse=False))):
            found.append((name, module, own))
    return found


def _read_by(module: nn.Module, experts: set[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters of the module and of those below it, without those of experts below it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in experts:
            yield from _read_by(child, experts)


class WeightVisits:
    """Hooks on one model's modules.

    Attributes:
        takers: take the gradients of a group when its module leaves backward, on the stream of that backward.
    """

    def __init__(self, model: nn.Module, weights: HostWeights) -> None:
        self.weights = weights
        self.takers: weakref.WeakSet[HostGradients] = weakref.WeakSet()
        self._in_backward: dict[_Visitor, None] = {}
        self._is_final_queued = False
        group_of = {parameter: group for group in weights.groups for parameter in group.parameters}
        visitors: dict[nn.Module, _Visitor] = {}
        for _, module, parameters in _visiting_modules(model):
            groups = list(dict.fromkeys(group_of[parameter] for parameter in parameters))
            visitors[module] = _Visitor(self, groups)
            visitors[module].watch(module)
        blocks = {
            group: visitors[block]
            for block in transformer_blocks(model)
            for expert in experts_of(block)
            for group in visitors[expert].groups
        }
        self._blocks = weakref.WeakValueDictionary(blocks)  # by the group of an expert
        await_host(model.modules(), weights)
        order = [group for visitor in visitors.values() for group in visitor.groups]
        self._forward, self._backward = VisitOrder(order), VisitOrder(order[::-1])
        self._is_running, self._read = False, list[WeightGroup]()
        self._thread: int | None = None  # the one that runs the model
        own, called = weakref.ref(self), called_modules(model)
        self._called = weakref.WeakSet(called)
        weights.is_foreign = lambda: False if (visits := own()) is None else visits.is_foreign()
        weights.on_read = lambda group: group.is_entered if (visits := own()) is None else visits._enter_for_read(group)
        for module in called:
            begin, end = ModuleHook(weakly(self, WeightVisits._begin)), ModuleHook(weakly(self, WeightVisits._end))
            module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(end, always_call=True)

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A forward of the whole model: its inputs are moved to the device, as FSDP2 moves them."""
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            self._thread = threading.get_ident()
            self._end_interrupted()
            self.weights.forget_idle()
            self._forward.start()
            self._is_running = True
        return inputs_on(self.weights.device, module, arguments, named)

    def is_foreign(self) -> bool:
        """Whether another thread runs the model: it may be in the middle of an iteration."""
        is_own = self._thread in (None, threading.get_ident())
        return not is_own and torch._C._current_graph_task_id() == NO_BACKWARD

    def _enter_for_read(self, group: WeightGroup) -> bool:
        """A weight is read in a forward of the whole model, outside of its module's: it is there until the end, or, if
        an expert's is read by its block, as long as the block's own."""
        self.end_if_interrupted()
        block = self._blocks.get(group)
        if not group.is_entered and block is not None and block.is_visiting:
            block.adopt(group)
        elif self._is_running and not group.is_entered:
            group.enter()
            self._read.append(group)
        return group.is_entered

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        """What a forward has read by itself, its backward has from the beginning on."""
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            return
        if self._read and torch.is_grad_enabled():
            visitor = _Visitor(self, list(dict.fromkeys(self._read)))
            for tensor in differentiable_results(output):
                tensor.register_hook(visitor.before_backward)
        for group in self._read:
            group.leave()
        self._read, self._is_running = [], False  # last, likewise

    def end_if_interrupted(self, between_steps: bool = False) -> None:
        """Leave what a forward of the whole model, or a backward, has entered, if it was interrupted.

        Args:
            between_steps: a forward of a part of the model, too: no module calls who saves or loads.
        """
        if not (self._is_running or self._in_backward or between_steps) or self.is_foreign():
            return
        is_backward = torch._C._current_graph_task_id() != NO_BACKWARD
        if not is_backward and not (self._is_running and _is_called(self._called)):
            self._end_interrupted()

    def entered_forward(self, groups: Sequence[WeightGroup]) -> None:
        """These groups are visited now: bring those that came next last time."""
        for group in groups:
            self._forward.prefetch_after(group, self.weights)
        if self._forward.visited == AHEAD:
            for taker in self.takers:
                taker.release()

    def begin_backward(self, visitor: _Visitor) -> None:
        if visitor in self._in_backward:
            return
        if torch.is_grad_enabled():
            self.weights.refuse_kept_graph()
        if not self._is_final_queued:
            self._is_final_queued = True
            self._backward.start()
            Variable._execution_engine.queue_callback(weakly(self, WeightVisits._end_backward))
        self._in_backward[visitor] = None
        for group in visitor.groups:
            self._take_gradients(group)  # what the user has put there, on the host
            group.enter()
            self._backward.prefetch_after(group, self.weights)

    def is_in_backward(self, visitor: _Visitor) -> bool:
        return visitor in self._in_backward

    def leave_backward(self, visitor: _Visitor) -> None:
        if visitor not in self._in_backward:
            return
        with torch.no_grad():
            for group in visitor.groups:
                self._take_gradients(group)
                group.leave()
        del self._in_backward[visitor]  # last: what an error kept from leaving, the next reader leaves

    @torch.no_grad()
    def _take_gradients(self, group: WeightGroup) -> None:
        for taker in by_turns(self.takers):
            taker.take(group)

    def _end_interrupted(self) -> None:
        """A backward that has raised an error, and a forward that was interrupted, have not left what they entered."""
        self._is_final_queued = self._is_running = False
        self._in_backward.clear()
        self._read = []
        self.weights.leave_all()

    def _end_backward(self) -> None:
        """Modules whose inputs have no gradient leave at the end, and gradients that came late are taken."""
        self._is_final_queued = False
        for visitor in list(self._in_backward):
            self.leave_backward(visitor)
        with torch.no_grad():
            for group in self.weights.groups:
                if any(parameter.grad is not None for parameter in group.parameters):
                    self._take_gradients(group)
        self.weights.forget_idle(but={group for taker in self.takers for group in taker.staying()})


class VisitOrder:
    """The order in which groups are visited: as in the last pass, until this one shows another."""

    def __init__(self, expected: Sequence[WeightGroup]) -> None:
        self._last, self._now, self._place = list(expected), list[WeightGroup](), 0

    def start(self) -> None:
        """A new pass begins."""
        self._last, self._now, self._place = self._now or self._last, [], 0

    @property
    def visited(self) -> int:
        """How many groups this pass has visited."""
        return len(self._now)

    def prefetch_after(self, group: WeightGroup, weights: HostWeights) -> None:
        """``group`` is visited now: bring those that are expected next. Those before it are not expected any more."""
        if not self._now or self._now[-1] is not group:
            self._now.append(group)
        place = next((i for i in range(self._place, len(self._last)) if self._last[i] is group), None)
        if place is None:
            return
        for passed in self._last[self._place : place]:
            weights.expect_no_more(passed)
        self._place = place
        for upcoming in self._last[place + 1 : place + 1 + AHEAD]:
            weights.prefetch(upcoming)


class _Visitor:
    """One module's visits.

    Attributes:
        groups: what its parameters belong to.
    """

    def __init__(self, visits: WeightVisits, groups: Iterable[WeightGroup]) -> None:
        self.groups = list(groups)
        self._visits = visits

    @property
    def is_visiting(self) -> bool:
        """Whether the module is in a forward or backward."""
        return any(group.is_entered for group in self.groups)

    def adopt(self, group: WeightGroup) -> None:
        """The module reads this group by itself: from now on, it comes with the module's own."""
        for _ in range(max(own.visits for own in self.groups)):  # each of which will leave it
            group.enter()
        self.groups.append(group)

    def watch(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(ModuleHook(self._before), prepend=True, with_kwargs=True)
        module.register_forward_hook(ModuleHook(self._after), always_call=True)

    def _before(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._visits.end_if_interrupted()
        for group in self.groups:
            group.enter()
        if self._visits.is_in_backward(self):  # it is recomputed
            return
        if torch._C._current_graph_task_id() == NO_BACKWARD:  # an expert is recomputed with its block
            self._visits.entered_forward(self.groups)
        if torch.is_grad_enabled():
            self._leave_with(differentiable((arguments, named)))

    def _leave_with(self, inputs: Sequence[Tensor]) -> None:
        """Leave backward when the gradients of all inputs are complete."""
        left = [len(inputs)]

        def count(_: Tensor) -> None:
            left[0] -= 1
            if not left[0]:
                self._visits.leave_backward(self)

        for tensor in inputs:
            tensor.register_hook(count)

    def _after(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not self._visits.is_in_backward(self):
            for tensor in differentiable_results(output):
                tensor.register_hook(self.before_backward)
        for group in self.groups:
            group.leave()

    def before_backward(self, _: Tensor) -> None:
        self._visits.begin_backward(self)


def _is_called(models: Collection[nn.Module]) -> bool:
    """Whether a forward of one of them is among the callers: torch tells nobody of a forward that was interrupted."""
    frame, code = sys._getframe(1), nn.Module._call_impl.__code__
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") in models):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None

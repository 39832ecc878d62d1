"""Keeps the fp32 result of a reduction over ranks, which FSDP2 and DDP round to the parameters' dtype in ``p.grad``.

All classes but the last read the result before that. The optimizer's
:class:`~lightstep.precision.gradients.GradientAccumulator` adds the results of several micro-batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lightstep.distributed import like, local_tensor
from lightstep.precision.gradient_sums import SumsAside, set_grad
from lightstep.precision.gradients import GradientAccumulator, ReducedGradients
from lightstep.sharding.fsdp_groups import (
    ParameterGroup,
    drop_unreduced,
    keeps_unreduced,
    parameter_groups,
    sharded_modules,
)
from lightstep.sharding.parameter_reads import NO_BACKWARD, ModuleHook, differentiable_results, weakly

_LOW = (torch.bfloat16, torch.float16)


class Listeners:
    """Maps parameters to the accumulators of their gradients; keeps neither alive.

    torch cannot swap tensors that have weak references (:class:`~lightstep.precision.gradients.LeafHooks`). So the
    keys are ids, which may be used again for other tensors, and the accumulator knows its parameters.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[GradientAccumulator]] = {}

    def add(self, parameters: Iterable[Tensor], accumulator: GradientAccumulator) -> list[Tensor]:
        """Add the parameters whose gradients would be rounded, and return them."""
        wanted = [p for p in parameters if accumulator.float32 and p.requires_grad and p.dtype in _LOW]
        self._by_id = {number: reference for number, reference in self._by_id.items() if reference() is not None}
        self._by_id |= {id(parameter): weakref.ref(accumulator) for parameter in wanted}
        return wanted

    def of(self, parameter: Tensor) -> GradientAccumulator | None:
        """The accumulator, if it is still alive."""
        reference = self._by_id.get(id(parameter))
        accumulator = None if reference is None else reference()
        return accumulator if accumulator is not None and accumulator.watches(parameter) else None


class ShardedGradients(ReducedGradients):
    """FSDP2: puts each group's fp32 result into ``p.grad``, where FSDP2 puts a copy rounded to the shards' dtype.

    ``set_all_reduce_hook`` sees the flat fp32 result of a group. Directly afterwards, on the same stream, FSDP adds a
    view of the rounded copy to each ``p.grad`` and calls its post-accumulate hook. The offset of a gradient in the
    rounded copy is its offset in the fp32 buffer. Gradients that ``p.grad`` holds before that are taken out of it and
    added in fp32 at the end of backward. One object, :data:`sharded_gradients`, serves all models, since an optimizer's
    parameters may be replaced by another model's.
    """

    def __init__(self) -> None:
        self._listeners = Listeners()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._flat: Tensor | None = None  # until the next group is reduced, or backward ends
        self._expected: set[int] = set()  # ids of the group's shards that have not got their part of it yet

    def add_model(self, model: nn.Module) -> ShardedGradients:
        """Add the model, whose modules may be sharded later. Returns this object."""
        self._models.add(model)
        return self

    def connect(self, parameters: Iterable[Tensor], accumulator: GradientAccumulator) -> None:
        listed = self._listeners.add(parameters, accumulator)
        for group in self._groups():
            group.know_dtypes()
        new = [p for p in listed if self._replace_rounded not in (p._post_accumulate_grad_hooks or {}).values()]
        if new:
            self._hook_groups()
        for parameter in new:
            parameter.register_post_accumulate_grad_hook(self._replace_rounded)

    def keeps_unreduced(self, parameters: Iterable[Tensor]) -> bool:
        wanted = frozenset(parameters)
        return any(keeps_unreduced(model, wanted) for model in self._models)

    def drop_unreduced(self, parameters: Iterable[Tensor]) -> None:
        dropped = frozenset(parameters)
        for model in self._models:
            drop_unreduced(model, dropped)

    def _hook_groups(self) -> None:
        """Repeated for new parameters: the model may have been sharded since."""
        for group in self._groups():
            group.set_all_reduce_hook(partial(self._before_group, group.shards_later()))

    def _groups(self) -> Iterator[ParameterGroup]:
        modules = (module for model in self._models for module in sharded_modules(model))
        return (group for module in modules for group in parameter_groups(module))

    @torch.no_grad()
    def _before_group(self, shards: Callable[[], Sequence[Tensor]], flat: Tensor) -> None:
        """FSDP is about to add the gradients of a group to ``p.grad``."""
        self._flat = flat if flat.dtype == torch.float32 else None  # a user's fully_shard may reduce in 16 bits
        if self._flat is not None:
            Variable._execution_engine.queue_callback(self._release)
            _used_on_this_stream(flat)  # allocated on FSDP's reduce-scatter stream
        listed = shards()
        self._expected = {id(parameter) for parameter in listed}
        for parameter in listed:
            if parameter.grad is None:
                continue
            accumulator = self._listeners.of(parameter)
            if accumulator is not None:
                _used_on_this_stream(local_tensor(parameter.grad))
                accumulator.aside.before(parameter)

    def _release(self) -> None:
        self._flat = None

    @torch.no_grad()
    def _replace_rounded(self, parameter: Tensor) -> None:
        """Once for each reduction: what autograd adds to a shard's gradient later (a penalty) stays as it is."""
        flat = self._flat
        if flat is None or id(parameter) not in self._expected:
            return
        self._expected.discard(id(parameter))
        if parameter.grad is None or self._listeners.of(parameter) is None:
            return
        rounded = local_tensor(parameter.grad)
        if rounded.device != flat.device:  # FSDP offloads gradients to the host
            return
        buffer = rounded.untyped_storage().nbytes() // rounded.element_size()
        if buffer != flat.numel():
            raise RuntimeError(
                f"the gradient of a shard of shape {tuple(rounded.shape)} lies in a buffer of {buffer} elements, and "
                f"FSDP2 reduced {flat.numel()}: something else set p.grad during backward (a hook, a second wrapper); "
                "take it away, or set precision.reduce to 'parameters', which reads p.grad"
            )
        part = flat.as_strided(rounded.size(), rounded.stride(), rounded.storage_offset())
        set_grad(parameter, like(parameter, part))


sharded_gradients = ShardedGradients()


class _OfReplicas(ReducedGradients):
    """What DDP reduces: the parameters that were trainable when it was made."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model, self._group = weakref.ref(model), model.process_group
        ignored = model.parameters_to_ignore
        named = list(model.module.named_parameters())
        self._parameters = frozenset(parameter for name, parameter in named if name not in ignored)
        self._ignored = frozenset(parameter for name, parameter in named if name in ignored)
        self._reduced = frozenset(parameter for parameter in self._parameters if parameter.requires_grad)

    def refuse_left_out(self, parameter: Tensor) -> None:
        """See :meth:`ReducedGradients.refuse_left_out`."""
        if parameter in self._reduced or parameter in self._ignored or self._group.size() == 1:
            return
        model = self._model()
        names = {} if model is None else {p: name for name, p in model.module.named_parameters()}
        if parameter not in names or getattr(parameter, "differs_across_ranks", False):
            return
        was = "frozen" if parameter in self._parameters else "not in the model"
        raise RuntimeError(
            f"{names[parameter]} has a gradient that DDP does not reduce, and ranks would drift apart: it was {was} "
            "in prepare_model(). Add and unfreeze parameters before that; or mark one whose values are each rank's own "
            "with parameter.differs_across_ranks = True. optimizer.zero_grad() drops the gradients"
        )


class ReplicatedGradients(_OfReplicas):
    """DDP: a communication hook that averages in fp32 what each rank has added up in fp32.

    ``p.grad`` becomes the rounded average, which the accumulator replaces. All instances share listeners, since an
    optimizer's parameters may be replaced by another model's.

    Args:
        model: gets the communication hook.
        some_unused: a parameter may have no gradient on some ranks, or on all.
    """

    _listeners: ClassVar[Listeners] = Listeners()

    def __init__(self, model: DistributedDataParallel, some_unused: bool) -> None:
        super().__init__(model)
        self._some_unused = some_unused
        self._reducing: weakref.WeakSet[SumsAside] = weakref.WeakSet()  # in this backward
        # DDP compares annotations with types, and in this file they are strings: give it a function without any.
        model.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))

    def connect(self, parameters: Iterable[Tensor], accumulator: GradientAccumulator) -> None:
        self._listeners.add(parameters, accumulator)

    def must_reduce(self, parameter: Tensor) -> bool:
        return parameter in self._parameters

    def forget(self) -> None:
        pass

    def reads_unused(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        model = self._model()
        if not self._some_unused or model is None or not model.require_backward_grad_sync:
            return ()
        return [parameter for parameter in parameters if parameter in self._parameters]

    def keeps_unreduced(self, parameters: Iterable[Tensor]) -> bool:
        return _keeps_unreduced(self._model())

    @torch.no_grad()
    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        rounded, parameters = bucket.buffer(), bucket.parameters()
        size = rounded.numel()
        flags = len(parameters) if self._some_unused else 0
        flat = torch.zeros(size + flags, dtype=torch.float32, device=rounded.device)
        flat[:size].copy_(rounded)
        used = flat[size:].unbind() if flags else [None] * len(parameters)
        for parameter, view, flag in zip(parameters, bucket.gradients(), used, strict=True):
            accumulator = self._listeners.of(parameter)
            if accumulator is not None:
                sums = accumulator.aside
                part = flat.as_strided(view.size(), view.stride(), view.storage_offset() - rounded.storage_offset())
                has_gradient = _add_earlier(part, parameter, sums)
                if flag is not None and has_gradient:
                    flag.fill_(1.0)
                sums.add_reduced(parameter, part, flag)
                self._reducing.add(sums)
        if bucket.is_last():
            for sums in self._reducing:
                sums.end_reduction()
            self._reducing.clear()
        flat.div_(self._group.size())
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: rounded.copy_(future.value()[0][:size]))


class GradientsInPlace(_OfReplicas):
    """DDP without such a hook: it averages ``p.grad`` itself, in the parameters' dtype.

    It does so in one backward after each forward. What another one through that forward adds stays on its rank.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model)
        self._will_reduce = self._has_left_out = False
        self._task = NO_BACKWARD  # the last backward that went through the model
        model.register_forward_hook(ModuleHook(weakly(self, GradientsInPlace._after_forward)))

    def _after_forward(self, model: nn.Module, _: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        is_reduced = bool(model.require_backward_grad_sync)
        self._will_reduce |= is_reduced
        for tensor in differentiable_results(output):
            tensor.register_hook(weakly(self, partial(GradientsInPlace._in_backward, is_reduced=is_reduced)))

    def _in_backward(self, _: Tensor, is_reduced: bool) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._has_left_out |= is_reduced and not self._will_reduce
            self._will_reduce = False

    def refuse_left_out(self, parameter: Tensor) -> None:
        super().refuse_left_out(parameter)
        if self._has_left_out and parameter in self._reduced and self._group.size() > 1:
            raise RuntimeError(
                "two backwards have gone through forwards of the model after the last of these, and DDP reduces one: "
                "the gradients of the other are each rank's own, and ranks would drift apart. Run one backward of the "
                "sum of the losses, or one after each forward. optimizer.zero_grad() drops the gradients"
            )

    def forget(self) -> None:
        self._has_left_out = False

    def keeps_unreduced(self, parameters: Iterable[Tensor]) -> bool:
        return _keeps_unreduced(self._model())


def _keeps_unreduced(model: DistributedDataParallel | None) -> bool:
    """Whether the last forward ran under ``no_sync()``: a backward since has reduced nothing."""
    return model is not None and not model.require_forward_param_sync


def _used_on_this_stream(tensor: Tensor) -> None:
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _add_earlier(part: Tensor, parameter: Tensor, sums: SumsAside) -> bool:
    """Add the sum of earlier micro-batches. Returns whether this rank has any gradient of the parameter."""
    used = sums.has_gradient(parameter)
    earlier = sums.pop_earlier(parameter)
    if earlier is not None:
        part.add_(earlier)
    return used or earlier is not None


class DirectCalls:
    """Makes ``replica`` reduce the gradients of forwards that call ``replica.module``, as torch's ``replicate`` does.

    Loops that ignore the return value of ``prepare_model`` work under strategies that shard in place, and so they do
    here. Forwards in evaluation mode or without gradients communicate nothing: some ranks may run them alone.
    """

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._replica = weakref.ref(replica)
        self._routed = False
        replica.module.register_forward_pre_hook(ModuleHook(self._before), with_kwargs=True)
        replica.module.register_forward_hook(ModuleHook(self._after))

    def belongs_to(self, replica: DistributedDataParallel | None) -> bool:
        """Whether forwards are passed on to this replica."""
        return self._replica() is replica

    def _before(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        replica = self._replica()
        called = replica is not None and DistributedDataParallel._active_ddp_module is not replica
        self._routed = called and module.training and torch.is_grad_enabled()
        return replica._pre_forward(*arguments, **keywords) if replica is not None and self._routed else None

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        replica, routed = self._replica(), self._routed
        self._routed = False
        return replica._post_forward(output) if replica is not None and routed else None

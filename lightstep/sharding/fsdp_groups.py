"""FSDP2's parameter groups: the parameters that it gathers and reduces together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightstep.sharding.parameter_reads import NO_BACKWARD


class ParameterGroup(NamedTuple):
    """Parameters that an FSDP module gathers and reduces together.

    Attributes:
        torchs: torch's record of the group.
        is_only: the module has no other; torch's public methods are for such modules.
    """

    module: FSDPModule
    torchs: Any
    is_only: bool

    @property
    def parts(self) -> Sequence[Any]:
        """torch's record of each parameter."""
        return self.torchs.fsdp_params

    @property
    def shards(self) -> list[nn.Parameter]:
        """The sharded parameters: DTensors."""
        return [part.sharded_param for part in self.parts]

    def shards_later(self) -> Callable[[], list[nn.Parameter]]:
        """A function that returns :attr:`shards`, as they are when it is called; it does not keep them alive.

        torch cannot swap tensors that have weak references: the references are to its records.
        """
        references = [weakref.ref(part) for part in self.parts]
        return lambda: [part.sharded_param for reference in references if (part := reference()) is not None]

    @property
    def hooks(self) -> GroupHooks:
        return GroupHooks.of(self.torchs)

    @property
    def is_offloaded(self) -> bool:
        """Whether FSDP2 keeps the shards on the host itself (``CPUOffloadPolicy``)."""
        return any(part.offload_to_cpu for part in self.parts)

    def know_dtypes(self) -> None:
        """Reduce in the policy's dtype, too, if nothing of the group was trainable in the first forward: FSDP2 would
        take the dtype of the gradients for ever."""
        if getattr(self.torchs, "_reduce_dtype", False) is None and any(shard.requires_grad for shard in self.shards):
            self.torchs._init_mp_dtypes()

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Have ``hook`` called behind the one that the user has set by ``set_all_reduce_hook``, or sets later."""
        self.hooks.reduced = hook
        self.hooks.put_reduced_last()


def parameter_groups(module: nn.Module) -> list[ParameterGroup]:
    """The groups of one FSDP module: one, or one for each mesh that its parameters are on.

    Modules that were given to one call of ``fully_shard`` have their groups in common.
    """
    assert isinstance(module, FSDPModule)
    groups = _torchs_groups(module)
    return [ParameterGroup(module, group, len(groups) == 1) for group in groups]


def _torchs_groups(module: FSDPModule) -> list[Any]:
    return _groups_of_state(module._get_fsdp_state())


def _groups_of_state(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]  # torch 2.11 has at most one


def _nothing() -> None:
    pass


class _Reduced(NamedTuple):
    """A group's hook, for which torch has one place: the user's, and then our own."""

    users: Callable[[Tensor], None] | None
    own: Callable[[Tensor], None]

    def __call__(self, flat: Tensor) -> None:
        if self.users is not None:
            self.users(flat)
        self.own(flat)


class GroupHooks:
    """What runs around FSDP2's reads of one group's shards, and around the reduction of its gradients.

    torch's public hook of all-gathers (``set_custom_all_gather``) comes too late for shards that are cast first.

    Attributes:
        keeping_graph: called where a backward with ``create_graph`` comes to the group.
        before_read: called on the stream that reads next; it makes that stream wait for whoever writes the shards.
        hold, release: called on that stream before and after the reads; ``release`` also if ``hold`` was interrupted.
        reducing: entered around the reduction of a backward.
        after_reduction: called on the stream that has made the gradients of the shards.
        awaiting: called on the stream that computes, with an event that it is about to wait for: the end of an
            all-gather, or of an earlier reduction.
        joins_unused: micro-batches between two reductions may use different parameters of the module, or none.
        reduced: called with the flat result of a reduction, before FSDP2 rounds it.
    """

    def __init__(self, group: Any) -> None:
        self.keeping_graph: Callable[[], None] = _nothing
        self.before_read: Callable[[], None] = _nothing
        self.hold: Callable[[], None] = _nothing
        self.release: Callable[[], None] = _nothing
        self.reducing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.after_reduction: Callable[[], None] = _nothing
        self.awaiting: Callable[[torch.Event], None] | None = None
        self.joins_unused = False
        self.reduced: Callable[[Tensor], None] | None = None
        self._reference = weakref.ref(group)
        group.unshard, group.wait_for_unshard = self._unshard, self._wait_for_unshard
        group.post_backward = self._post_backward

    @classmethod
    def of(cls, group: Any) -> GroupHooks:
        """The hooks of torch's group; made at the first call."""
        found = getattr(group.unshard, "__self__", None)
        return found if isinstance(found, cls) else cls(group)

    @property
    def _group(self) -> Any:
        group = self._reference()
        assert group is not None
        return group

    @torch._disable_dynamo
    def _unshard(self, async_op: bool = False) -> None:
        """An all-gather reads the shards, unless one is under way or has ended."""
        group = self._group
        if torch.is_grad_enabled() and group._training_state.name == "PRE_BACKWARD":
            self.keeping_graph()
        if group._all_gather_result is not None or not group.is_sharded:
            type(group).unshard(group, async_op)
            return
        reader = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]
        with self._reads(lambda: group.device_handle.stream(reader)):
            type(group).unshard(group, async_op)

    @torch._disable_dynamo
    def _wait_for_unshard(self) -> None:
        """A group on one rank reads its shards here."""
        group = self._group
        self._await(None if group._all_gather_result is None else group._all_gather_result.all_gather_event)
        reads_here = group._all_gather_result is not None and group.is_sharded and _is_alone(group)
        with self._reads(contextlib.nullcontext) if reads_here else contextlib.nullcontext():
            type(group).wait_for_unshard(group)

    @contextlib.contextmanager
    def _reads(self, on_stream: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        try:
            with on_stream():
                self.before_read()
                self.hold()
            yield
        finally:
            with on_stream():
                self.release()

    def _await(self, event: torch.Event | None) -> None:
        if self.awaiting is not None and event is not None:
            self.awaiting(event)

    def put_reduced_last(self) -> None:
        """Have :attr:`reduced` called behind a hook that the user may have set since."""
        group = self._group
        present = group._all_reduce_hook
        if self.reduced is None or (isinstance(present, _Reduced) and present.own is self.reduced):
            return
        group._all_reduce_hook = _Reduced(present.users if isinstance(present, _Reduced) else present, self.reduced)

    def _post_backward(self, *unused: Any) -> None:
        group = self._group
        self.put_reduced_last()
        self._await(_awaited_reduction(group))
        with self.reducing():
            if self.joins_unused:
                _reduce_what_is_used(group, *unused)
            else:
                type(group).post_backward(group, *unused)
        if self.after_reduction is not _nothing:
            with self.on_reducing_stream():
                self.after_reduction()

    def on_reducing_stream(self) -> AbstractContextManager[object]:
        """The stream on which FSDP2 has made the shards' gradients."""
        group = self._group
        streams, hook_stream = group.comm_ctx, group._all_reduce_hook_stream
        if group._all_reduce_hook is None and not hasattr(group.mesh_info, "replicate_mesh_size"):
            return group.device_handle.stream(streams.reduce_scatter_stream)
        return group.device_handle.stream(hook_stream or streams.all_reduce_stream)

    @property
    def is_gathered(self) -> bool:
        """Whether the module's parameters are whole now."""
        return not self._group.is_sharded


def _awaited_reduction(group: Any) -> torch.Event | None:
    """The end of the reduction that ``post_backward`` of this group is about to wait for."""
    context: Any = group.comm_ctx
    if hasattr(context, "reduce_scatter_state"):  # torch 2.11
        earlier = context.reduce_scatter_state
    else:
        is_last = group._param_group_index == group._num_param_groups - 1
        is_due = is_last and len(context.reduce_scatter_states) >= context.reduce_scatter_max_input_buffers
        earlier = context.reduce_scatter_states[0] if is_due else None
    return None if earlier is None else earlier.event


def _is_alone(group: Any) -> bool:
    """Whether the group's parameters are sharded over one rank."""
    return getattr(group.mesh_info, "shard_mesh_size", 1) == 1


def accumulate_whatever_is_used(module: FSDPModule) -> None:
    """Let micro-batches between two reductions use different parameters of the module, or none.

    torch's FSDP2 fails without a reduction if the module has never been called, and with one if the parameters of a
    group have gradients of different dtypes: the sums of earlier micro-batches are in the dtype of the reduction, and a
    first gradient is not. It then joins them.
    """
    for group in _torchs_groups(module):
        GroupHooks.of(group).joins_unused = True


def _reduce_what_is_used(group: Any, *unused: Any) -> None:
    parts = [part for part in group.fsdp_params if _is_gathered(part)]
    if group.reduce_grads and any(part.unsharded_accumulated_grad is not None for part in parts):
        _sum_alike(parts, zeros=getattr(group, "reduce_scatter_unused_params", False))
    if parts or group.reduce_grads:
        type(group).post_backward(group, *unused)


def _sum_alike(parts: Iterable[Any], zeros: bool) -> None:
    """Make first gradients sums, in the dtype of the reduction; with ``zeros`` those of unused parameters, too."""
    for part in parts:
        if part.unsharded_accumulated_grad is not None:
            continue
        if part._unsharded_param.grad is None and zeros and part._unsharded_param.requires_grad:
            part._unsharded_param.grad = torch.zeros_like(part._unsharded_param)
        part.to_accumulated_grad_if_needed()


def forget_interrupted(root: nn.Module, accumulates: bool) -> None:
    """A forward of the outermost FSDP module begins: FSDP2 forgets one, or a backward, that has ended with an error.

    It would take that one for still running, reduce no gradients of the outermost module any more, and compute with
    weights that were gathered then. What such a backward has left unreduced is dropped.

    Args:
        accumulates: gradients of micro-batches under ``accumulate(last=False)`` are left, and would be dropped with it.

    Raises:
        RuntimeError: a backward has ended with an error, and this torch cannot forget it, or it ``accumulates``.
    """
    assert isinstance(root, FSDPModule)
    context: Any = root._get_fsdp_state()._state_ctx
    in_backward = context.post_backward_final_callback_queued
    if torch._C._current_graph_task_id() != NO_BACKWARD or not (in_backward or context.iter_forward_root is not None):
        return
    if hasattr(root, "reset_iter_state"):
        if in_backward and accumulates:
            raise RuntimeError(
                "a backward ended with an error, and its gradients are mixed with those of this step's other "
                "micro-batches, which FSDP2 has not reduced: call optimizer.zero_grad(), and run all micro-batches of "
                "the step again"
            )
        root.reset_iter_state()
        if in_backward:
            drop_unreduced(root, root.parameters())
    elif in_backward:
        raise RuntimeError(
            "the last backward ended with an error, and FSDP2 of this torch cannot go on after that: start again from "
            "the last checkpoint, or use torch 2.13"
        )
    else:
        _end_forward(context)


def _end_forward(context: Any) -> None:
    """What ``reset_iter_state()`` does, for a forward alone and before torch 2.13."""
    context.iter_forward_root = None
    for state in context.all_states:
        state._training_state = type(state._training_state).IDLE
        state._modules_to_run_forward.clear()
        for group in _groups_of_state(state):
            group._training_state = type(group._training_state).IDLE
            group.wait_for_unshard()  # of a module that was not called any more
            group._to_sharded()


def keeps_unreduced(model: nn.Module, parameters: Collection[Tensor]) -> bool:
    """Whether FSDP2 keeps gradients of these sharded parameters until it reduces them."""
    return any(
        part.unsharded_accumulated_grad is not None or (_is_gathered(part) and part._unsharded_param.grad is not None)
        for part in _parts(model, parameters)
    )


def drop_unreduced(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Drop the gradients of these sharded parameters that FSDP2 keeps until it reduces them."""
    for part in _parts(model, frozenset(parameters)):
        part.unsharded_accumulated_grad = None
        if _is_gathered(part):
            part._unsharded_param.grad = None


def _parts(model: nn.Module, parameters: Collection[Tensor]) -> Iterator[Any]:
    """torch's records of these sharded parameters."""
    groups = (group for module in sharded_modules(model) for group in parameter_groups(module))
    return (part for group in groups for part in group.parts if part.sharded_param in parameters)


def _is_gathered(part: Any) -> bool:
    """Whether the parameter has been gathered at some time."""
    return hasattr(part, "_unsharded_param")


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that ``fully_shard`` was called on, outer ones first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def showing_shards(model: nn.Module) -> Iterator[None]:
    """In the body the parameters are the shards, also of what a forward has gathered, which stays gathered for its
    backward: one that begins in the middle of the model gathers nothing of the root again."""
    groups = (group for module in sharded_modules(model) for group in parameter_groups(module))
    hidden = [part for group in groups for part in group.parts if part.sharded_state.name != "SHARDED"]
    for part in hidden:
        part._setattr_on_modules(part.sharded_param)
    try:
        yield
    finally:
        for part in hidden:
            is_whole = part.sharded_state.name == "UNSHARDED"
            part._setattr_on_modules(part._unsharded_param if is_whole else part._sharded_post_forward_param)


def gathered_with(module: nn.Module, sharded: Iterable[nn.Module] = ()) -> list[nn.Parameter]:
    """The parameters that FSDP2 gathers for this FSDP module: those in no FSDP module below it.

    Args:
        sharded: all FSDP modules. Those given to one call of ``fully_shard`` are gathered together (accelerate does
            that with the last norm and the head).
    """
    state_of: Any = fully_shard.state  # type: ignore[attr-defined]
    together = [other for other in sharded if state_of(other) is state_of(module)] or [module]
    parts = [part for member in together for part in own_parts(member)]
    return list(dict.fromkeys(parameter for part in parts for parameter in part.parameters(recurse=False)))


def own_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those below it, without FSDP modules and what is below them."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from own_parts(child)

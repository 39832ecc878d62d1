"""FSDP2's parameter groups: the parameters that it gathers and reduces together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class ParameterGroup(NamedTuple):
    """Parameters that an FSDP module gathers and reduces together.

    Attributes:
        parts: torch's record of each parameter.
        one_of_several: torch's group if the module has others; torch's public methods are for modules with one group.
    """

    module: FSDPModule
    parts: Sequence[Any]
    one_of_several: Any = None

    @property
    def shards(self) -> list[Tensor]:
        """The sharded parameters."""
        return [part.sharded_param for part in self.parts]

    def shards_later(self) -> Callable[[], list[Tensor]]:
        """A function that returns :attr:`shards`, as they are when it is called; it does not keep them alive.

        torch cannot swap tensors that have weak references: the references are to its records.
        """
        references = [weakref.ref(part) for part in self.parts]
        return lambda: [part.sharded_param for reference in references if (part := reference()) is not None]

    def set_all_gather(self, all_gather: Any) -> None:
        if self.one_of_several is None:
            self.module.set_custom_all_gather(all_gather)
        else:
            self.one_of_several._all_gather_comm = all_gather

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None]) -> None:
        if self.one_of_several is None:
            self.module.set_all_reduce_hook(hook)
        else:
            self.one_of_several._all_reduce_hook = hook


def parameter_groups(module: nn.Module) -> list[ParameterGroup]:
    """The groups of one FSDP module: one, or one for each mesh that its parameters are on.

    Modules that were given to one call of ``fully_shard`` have their groups in common.
    """
    assert isinstance(module, FSDPModule)
    groups = _torchs_groups(module)
    if len(groups) < 2:
        return [ParameterGroup(module, groups[0].fsdp_params if groups else ())]
    return [ParameterGroup(module, group.fsdp_params, group) for group in groups]


def _torchs_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]  # torch 2.11 has at most one


def accumulate_whatever_is_used(module: FSDPModule) -> None:
    """Let micro-batches between two reductions use different parameters of the module, or none.

    torch's FSDP2 fails without a reduction if the module has never been called, and with one if the parameters of a
    group have gradients of different dtypes: the sums of earlier micro-batches are in the dtype of the reduction, and a
    first gradient is not. It then joins them.
    """
    for group in _torchs_groups(module):
        if not hasattr(group.post_backward, "original"):
            group.post_backward = _accumulating(weakref.ref(group), type(group).post_backward)


def _accumulating(reference: weakref.ref[Any], original: Callable[..., None]) -> Callable[..., None]:
    def post_backward(*unused: Any) -> None:
        group = reference()
        assert group is not None
        parts = [part for part in group.fsdp_params if _is_gathered(part)]
        if group.reduce_grads and any(part.unsharded_accumulated_grad is not None for part in parts):
            _sum_alike(parts, zeros=getattr(group, "reduce_scatter_unused_params", False))
        if parts or group.reduce_grads:
            original(group, *unused)

    post_backward.original = original  # type: ignore[attr-defined]
    return post_backward


def _sum_alike(parts: Iterable[Any], zeros: bool) -> None:
    """Make first gradients sums, in the dtype of the reduction; with ``zeros`` those of unused parameters, too."""
    for part in parts:
        if part.unsharded_accumulated_grad is not None:
            continue
        if part._unsharded_param.grad is None and zeros and part._unsharded_param.requires_grad:
            part._unsharded_param.grad = torch.zeros_like(part._unsharded_param)
        part.to_accumulated_grad_if_needed()


def keeps_unreduced(model: nn.Module, parameters: Collection[Tensor]) -> bool:
    """Whether FSDP2 keeps gradients of these sharded parameters until it reduces them."""
    return any(
        part.unsharded_accumulated_grad is not None or (_is_gathered(part) and part._unsharded_param.grad is not None)
        for part in _parts(model, parameters)
    )


def drop_unreduced(model: nn.Module, parameters: Collection[Tensor]) -> None:
    """Drop the gradients of these sharded parameters that FSDP2 keeps until it reduces them."""
    for part in _parts(model, parameters):
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

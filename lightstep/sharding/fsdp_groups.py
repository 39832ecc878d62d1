"""FSDP2's parameter groups: the parameters that it gathers and reduces together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class ParameterGroup(NamedTuple):
    """Parameters that an FSDP module gathers and reduces together.

    Attributes:
        shards: the sharded parameters.
        one_of_several: torch's group if the module has others; torch's public methods are for modules with one group.
    """

    module: FSDPModule
    shards: Sequence[Tensor]
    one_of_several: Any = None

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
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # torch 2.11 has at most one
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    shards = [[part.sharded_param for part in group.fsdp_params] for group in groups]
    if len(groups) < 2:
        return [ParameterGroup(module, shards[0] if shards else [])]
    return [ParameterGroup(module, own, group) for own, group in zip(shards, groups, strict=True)]


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

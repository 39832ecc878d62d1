"""The names of a model's tensors in checkpoints: the same however the model is wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightstep.distributed import differs_across_ranks, mesh_ranks
from lightstep.optimizer.param_groups import clean_name
from lightstep.sharding.engine_model import EngineModel

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """One distinct tensor of the model: a parameter or a persistent buffer.

    Attributes:
        names: its names in the model, several if weights are tied. The first one is used for saving.
        tensor: the live (D)Tensor itself.
        number: what :func:`numbered` has added to the names.
    """

    names: tuple[str, ...]
    tensor: Tensor
    number: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def model_name(self) -> str:
        """The first name in the model of this rank."""
        return self.name.removesuffix(self.number)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's module inside a strategy's wrapper, ``torch.compile`` and Lightning Fabric, in any order."""
    while isinstance(inner := _inside(model), nn.Module):
        model = inner
    return model


def _inside(model: nn.Module) -> Any:
    if isinstance(model, DistributedDataParallel | EngineModel):
        return model.module
    if isinstance(model, torch.jit.ScriptModule):  # the tables of its children and parameters are not Python's
        return None
    own = vars(model).get("_modules", {})
    return own.get("_orig_mod", own.get("_forward_module") if "_original_module" in own else None)


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Parameters and persistent buffers in the model's order, tied ones once.

    Names are those of the unwrapped model, without the prefixes of DDP, ``torch.compile`` and activation checkpointing.
    FSDP modules are resharded, because ``state_dict`` does so.
    """
    found: dict[int, tuple[list[str], Tensor]] = {}
    for key, value in unwrap_model(model).state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not _is_extra(key):
            names, _ = found.setdefault(id(value), ([], value))
            names.append(clean_name(key))
    return [NamedTensor(tuple(names), tensor) for names, tensor in found.values()]


def holders(tensors: Iterable[NamedTensor]) -> dict[str, tuple[int, ...]]:
    """The ranks that hold a tensor together, by name, for tensors that differ across ranks."""
    return {named.name: mesh_ranks(named.tensor) for named in tensors if differs_across_ranks(named.tensor)}


def several_holders(everywhere: Iterable[Mapping[str, tuple[int, ...]]]) -> dict[str, list[tuple[int, ...]]]:
    """From all ranks' :func:`holders`: the names with more than one tensor, and the ranks that hold each of these."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for names in everywhere:
        for name, ranks in names.items():
            found.setdefault(name, set()).add(ranks)
    return {name: sorted(parts) for name, parts in found.items() if len(parts) > 1}


def numbered(tensors: Iterable[NamedTensor], several: Mapping[str, list[tuple[int, ...]]]) -> list[NamedTensor]:
    """The same tensors; those that share a name get a name each: ``expert[0 of 2]``."""
    return [_numbered(named, several[named.name]) if named.name in several else named for named in tensors]


def _numbered(named: NamedTensor, parts: list[tuple[int, ...]]) -> NamedTensor:
    number = f"[{parts.index(mesh_ranks(named.tensor))} of {len(parts)}]"
    return NamedTensor(tuple(f"{name}{number}" for name in named.names), named.tensor, number)


def extra_states(model: nn.Module) -> dict[str, Any]:
    """The extra state of modules with ``get_extra_state``, by module name."""
    return {name: module.get_extra_state() for name, module in _stateful_modules(model)}


def set_extra_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Restore :func:`extra_states`."""
    for name, module in _stateful_modules(model):
        if name in states:
            module.set_extra_state(states[name])


def _stateful_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    own = nn.Module.get_extra_state
    modules = unwrap_model(model).named_modules()
    return [(clean_name(name), module) for name, module in modules if type(module).get_extra_state is not own]


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE

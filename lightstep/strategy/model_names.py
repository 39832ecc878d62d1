"""The names that a checkpoint gives to a model's tensors: the same however the model is wrapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightstep.optimizer.param_groups import clean_name

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """One distinct tensor of the model: a parameter or a persistent buffer.

    Attributes:
        names: under which the model knows it; several when weights are tied. The first one is used for saving.
        tensor: the live (D)Tensor itself.
    """

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's module inside ``DistributedDataParallel`` and ``torch.compile``, whichever came first."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Parameters and persistent buffers in the model's order, tied ones once.

    Names are those of the unwrapped model: DDP, ``torch.compile`` and activation checkpointing leave no trace in them.
    FSDP modules are resharded on the way, because ``state_dict`` does so.
    """
    found: dict[int, tuple[list[str], Tensor]] = {}
    for key, value in unwrap_model(model).state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not _is_extra(key):
            names, _ = found.setdefault(id(value), ([], value))
            names.append(clean_name(key))
    return [NamedTensor(tuple(names), tensor) for names, tensor in found.values()]


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules with ``get_extra_state`` want kept, by module name."""
    return {name: module.get_extra_state() for name, module in _stateful_modules(model)}


def set_extra_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Hand each module what :func:`extra_states` got from it."""
    for name, module in _stateful_modules(model):
        if name in states:
            module.set_extra_state(states[name])


def _stateful_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    own = nn.Module.get_extra_state
    modules = unwrap_model(model).named_modules()
    return [(clean_name(name), module) for name, module in modules if type(module).get_extra_state is not own]


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE

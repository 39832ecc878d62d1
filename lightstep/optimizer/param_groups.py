"""Names and layers of a model's parameters, and checks of the groups that a user gives."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightstep.error_text import value_text

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Place(NamedTuple):
    """A parameter's name, the layer that it belongs to, and its number in ``parameters()``."""

    name: str
    layer: str
    number: int = 0


def clean_name(name: str) -> str:
    """``name`` without the parts that ``torch.compile``, activation checkpointing and FSDP1 insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def places(model: nn.Module) -> dict[Tensor, Place]:
    """Name and layer of every parameter; for a tied parameter, those of its first appearance.

    A layer is an element of an ``nn.ModuleList``, ``nn.Sequential`` or the like (the outermost one on the path). A
    parameter outside such a list belongs to its parent module.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {
        parameter: Place(clean_name(name), layer_of(clean_name(name)), number)
        for number, (name, parameter) in enumerate(inner.named_parameters())
    }


def layer_of(name: str) -> str:
    """The layer that a name (:func:`clean_name`) belongs to."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1])


def check_param_groups(groups: Any, model: nn.Module) -> list[dict[str, Any]]:
    """``groups`` as a list of dictionaries whose ``params`` are lists of this model's parameters.

    Raises:
        TypeError: not parameters, or not dictionaries with ``params``.
        ValueError: a parameter is given twice or is not the model's, or none is trainable.
    """
    names = {parameter: place.name for parameter, place in places(model).items()}
    listed = [_as_group(group) for group in _as_groups(groups, model)]
    every = [parameter for group in listed for parameter in group["params"]]
    _refuse_repeated(every, names)
    foreign = [tuple(parameter.shape) for parameter in every if parameter not in names]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the parameters in param_groups (shapes {foreign[:3]}) are not the model's; build the "
            "groups from the model that strategy.prepare_model returned (under FSDP2 before a forward, or after "
            "model.reshard(): a forward leaves gathered weights in the root)"
        )
    if not any(parameter.requires_grad for parameter in every):
        raise ValueError(f"none of the {len(every)} parameters is trainable: requires_grad is False on all of them")
    return listed


def _as_groups(groups: Any, model: nn.Module) -> Sequence[Any]:
    if groups is None:
        return [{"params": list(model.parameters())}]
    if isinstance(groups, Tensor):
        return [{"params": [groups]}]
    if isinstance(groups, Mapping):
        raise TypeError("param_groups is a mapping; a list of groups is needed: [{'params': [...], 'lr': ...}, ...]")
    listed = list(groups)
    return [{"params": listed}] if listed and not isinstance(listed[0], Mapping) else listed


def _as_group(group: Any) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(f"a parameter group is {value_text(group, 80)}; a dictionary with 'params' is needed")
    params = group["params"]
    listed = [params] if isinstance(params, Tensor) else list(params)
    names = {"param_names": [item[0] for item in listed]} if listed and isinstance(listed[0], tuple) else {}
    return {**group, "params": _tensors(listed), **names}


def _tensors(params: Iterable[Any]) -> list[Tensor]:
    listed = [item[1] if isinstance(item, tuple) else item for item in params]
    for item in listed:
        if not isinstance(item, Tensor):
            raise TypeError(f"'params' of a group holds an object of type {type(item).__name__}; tensors are needed")
    return listed


def _refuse_repeated(parameters: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    repeated = [parameter for parameter, count in Counter(parameters).items() if count > 1]
    if repeated:
        given = ", ".join(names.get(parameter, str(tuple(parameter.shape))) for parameter in repeated[:5])
        raise ValueError(f"given more than once in param_groups: {given}; each parameter belongs to one group")


def plain_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters with numpy's numbers replaced by Python's: a weights-only load would refuse numpy's.

    A list without any stays the same object, as in torch: its owner may write to it later.
    """
    return {key: value if key == "params" else _plain(value) for key, value in settings.items()}


def _plain(value: Any) -> Any:
    if type(value) in (tuple, list):
        plain = type(value)(map(_plain, value))
        return value if all(map(operator.is_, plain, value)) else plain
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value

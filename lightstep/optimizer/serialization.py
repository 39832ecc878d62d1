"""torch's state-dict layout, in and out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from lightstep.optimizer.mixed_precision import MixedPrecisionOptimizer


def snapshot(packed: dict[str, Any]) -> dict[str, Any]:
    """The same dictionary with every tensor copied, so that later steps do not reach into it."""
    return tree_map(_copied, packed)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def load_torch_state_dict(optimizer: MixedPrecisionOptimizer, state_dict: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict``: hooks, checks, groups, state, loss scale; nothing is changed when it does not fit.

    torch's own would cast state to the parameter's dtype, which ruins fp32 masters of 16-bit parameters.
    """
    incoming = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        incoming = pre_hook(optimizer, incoming) or incoming
    groups = copy.deepcopy(incoming["param_groups"])
    _check_groups(optimizer, groups)
    saved_ids = [index for group in groups for index in group["params"]]
    parameters = dict(zip(saved_ids, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    _check_shapes(parameters, incoming["state"])
    for live, saved in zip(optimizer.param_groups, groups, strict=True):
        live.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
    _load_states(optimizer, parameters, incoming["state"])
    if "loss_scale" in incoming:
        optimizer.loss_scale.load_state_dict(incoming["loss_scale"])
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _load_states(
    optimizer: MixedPrecisionOptimizer, parameters: Mapping[Any, Tensor], states: Mapping[Any, Any]
) -> None:
    loaded = {parameters[index]: entries for index, entries in states.items() if index in parameters}
    for item in optimizer.managed():
        if item.param in loaded or item.updated:
            optimizer.load_parameter_state(item.param, loaded.get(item.param, {}))


def _check_groups(optimizer: MixedPrecisionOptimizer, saved: list[dict[str, Any]]) -> None:
    live = optimizer.param_groups
    if len(saved) != len(live):
        raise ValueError(f"the state dict has {len(saved)} parameter groups; this optimizer has {len(live)}")
    for index, (mine, theirs) in enumerate(zip(live, saved, strict=True)):
        if len(mine["params"]) != len(theirs["params"]):
            raise ValueError(
                f"parameter group {index} of the state dict has {len(theirs['params'])} parameters; "
                f"this optimizer's has {len(mine['params'])}"
            )


def _check_shapes(parameters: Mapping[Any, Tensor], states: Mapping[Any, Any]) -> None:
    for index, entries in states.items():
        parameter = parameters.get(index)
        for key, value in entries.items():
            if parameter is None or not isinstance(value, Tensor) or value.dim() == 0 or value.shape == parameter.shape:
                continue
            raise ValueError(
                f"state {key!r} of parameter {index} has shape {tuple(value.shape)}; "
                f"the parameter has {tuple(parameter.shape)}"
            )

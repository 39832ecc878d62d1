"""Copying and loading state dicts in torch's layout."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightstep.distributed import is_sharded, local_tensor
from lightstep.error_text import error_text
from lightstep.optimizer.classes import class_name
from lightstep.optimizer.engine import Engine
from lightstep.optimizer.foreign_moments import OTHER_SETTINGS, has_codes, is_foreign, with_torchs_moments
from lightstep.optimizer.update import KEPT
from lightstep.state.schema import Managed


def snapshot(packed: dict[str, Any]) -> dict[str, Any]:
    """The same dictionary with every tensor copied, so that later steps do not change it.

    A tensor that is there twice, as torch puts one learning rate into all groups, is one tensor in the copy, too.
    """
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]

    return tree_map(copied, packed)


def load_torch_state_dict(optimizer: Optimizer, engine: Engine, state_dict: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict``: hooks, checks, groups, state, loss scale.

    Nothing is changed if a check fails. If anything fails after that, the optimizer refuses steps and saves until state
    has been loaded.

    torch's own method would cast state to the parameter's dtype, which ruins fp32 masters of 16-bit parameters.
    """
    incoming = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        incoming = pre_hook(optimizer, incoming) or incoming
    groups = copy.deepcopy(incoming["param_groups"])
    listed = {index for group in groups for index in group["params"]}  # numbers, or names
    shared = {k: v for k, v in incoming["state"].items() if isinstance(k, str) and k not in listed}
    incoming["state"] = {key: value for key, value in incoming["state"].items() if key not in shared}
    parameters = matched_parameters(optimizer, groups)
    incoming["state"] = _with_torchs_moments(engine, parameters, groups, incoming["state"])
    states = {parameters[index]: entries for index, entries in incoming["state"].items() if index in parameters}
    _check_shapes(engine, parameters, incoming["state"])
    for index, entries in incoming["state"].items():
        refuse_nan(f"parameter {index}", entries)
    if "loss_scale" in incoming:
        copy.deepcopy(engine.loss_scale).load_state_dict(incoming["loss_scale"])
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    engine.edits.release(states)
    _check_states(engine, states, settings)
    try:
        for live, saved in zip(engine.param_groups, settings, strict=True):
            live.pop(KEPT, None)
            live.update(saved)
        _load_states(engine, states)
        if shared:  # of the plain optimizer: MADGRAD's state["k"]
            kept = {engine.classes.own.kept_name: {"attributes": {}, "state": snapshot(shared)}}
            engine.param_groups[0].setdefault(KEPT, kept)
        if "loss_scale" in incoming:
            engine.loss_scale.load_state_dict(incoming["loss_scale"])
    except BaseException as error:
        engine.broken.mark(f"load_state_dict failed ({error_text(error)})")
        raise
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _with_torchs_moments(
    engine: Engine, parameters: Mapping[Any, Tensor], groups: Sequence[dict[str, Any]], states: Mapping[Any, Any]
) -> dict[Any, Any]:
    """State that bitsandbytes or torchao keeps in 8 bits, as torch's Adam has it, if that is the parameter's class."""
    found = dict(states)
    for live, saved in zip(engine.param_groups, groups, strict=True):
        if not issubclass(engine.classes.arithmetic_for(live).optimizer_class, (torch.optim.Adam, torch.optim.AdamW)):
            continue
        coded = [i for i in saved["params"] if i in found and (is_foreign(found[i]) or "state1" in found[i])]
        if any(has_codes(found[index]) for index in coded):
            engine.moments.log_decoded()
        for index in coded:
            found[index] = with_torchs_moments(f"parameter {index}", found[index])
        if coded:
            for key in OTHER_SETTINGS:
                saved.pop(key, None)
    return found


def refuse_nan(name: str, entries: Mapping[str, Any]) -> None:
    """Refuse state with NaN (masters aside), which would turn the weights into NaN at the next step.

    Raises:
        ValueError: with the entry and its number of NaN.
    """
    for key, value in entries.items():
        if key == "master" or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        local = local_tensor(value)
        if _has_nan(local):
            raise ValueError(
                f"state {key!r} of {name} holds {int(local.isnan().sum())} NaN (of {value.numel()}): the run that "
                "wrote it had diverged; load an earlier checkpoint, or only the weights"
            )


def _has_nan(tensor: Tensor) -> bool:
    if tensor.itemsize > 1 and tensor.numel():  # torch has no maximum of float8
        return bool(tensor.amax().isnan())  # one pass, without a temporary
    return bool(tensor.isnan().any())


def _check_states(
    engine: Engine,
    states: Mapping[Tensor, Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ``ValueError`` for state that parameters cannot have once their groups have these settings."""
    if engine.only_keeps_masters(states):
        return
    loaded = {id(live): own for live, own in zip(engine.param_groups, settings, strict=True)}
    with nullcontext() if engine.is_set_up else _previewing(engine, settings):
        items = _items(engine, states)
    for item in items:
        engine.managed.check_state(item, states.get(item.param, {}), loaded[id(item.group)])


def prepare_to_load(
    engine: Engine, entries: Mapping[Tensor, Collection[str]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """See :meth:`MixedPrecisionOptimizer.prepare_to_load`."""
    loaded = {id(live): own for live, own in zip(engine.param_groups, settings, strict=True)}
    with nullcontext() if engine.is_set_up else _previewing(engine, settings):
        items = _items(engine, entries)
    for item in items:
        if item.param in entries:
            engine.managed.check_names(item, entries[item.param], loaded[id(item.group)])


def check_complete(
    engine: Engine, entries: Mapping[Tensor, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """See :meth:`MixedPrecisionOptimizer.check_complete`."""
    loaded = {id(live): own for live, own in zip(engine.param_groups, settings, strict=True)}
    for item in engine.managed.lookup(entries):
        engine.managed.check_complete(item, entries[item.param].keys(), entries[item.param], loaded[id(item.group)])


@contextmanager
def _previewing(engine: Engine, settings: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """In the body the groups have these settings: which entries a parameter has, depends on them (amsgrad)."""
    before = [dict(live) for live in engine.param_groups]
    try:
        for live, saved in zip(engine.param_groups, settings, strict=True):
            live.update({key: value for key, value in saved.items() if key != KEPT})
        yield
    finally:
        for live, own in zip(engine.param_groups, before, strict=True):
            live.clear()
            live.update(own)


def _load_states(engine: Engine, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    if engine.only_keeps_masters(states):
        for parameter, entries in states.items():
            engine.replace_state(parameter, entries)
        return
    for item in _items(engine, states):
        engine.replace_state(item.param, states.get(item.param, {}))


def _items(engine: Engine, states: Mapping[Tensor, Collection[str]]) -> Sequence[Managed]:
    """All managed parameters, and frozen ones that get state."""
    frozen = [parameter for parameter, entries in states.items() if entries and not parameter.requires_grad]
    engine.guard.work("setting up the optimizer", engine.set_up, frozen)
    return list(engine.managed)


def matched_parameters(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> dict[Any, Tensor]:
    """The parameter for each index of a state dict with these groups.

    Raises:
        ValueError: the groups do not match the optimizer's.
    """
    live = optimizer.param_groups
    if len(saved) != len(live):
        raise ValueError(f"the state dict has {len(saved)} parameter groups; this optimizer has {len(live)}")
    matched: dict[Any, Tensor] = {}
    for index, (mine, theirs) in enumerate(zip(live, saved, strict=True)):
        own: list[Tensor] = mine["params"]
        if len(own) != len(theirs["params"]):  # groups of earlier versions had no frozen parameters
            own = [parameter for parameter in own if parameter.requires_grad]
        if len(own) != len(theirs["params"]):
            raise ValueError(
                f"parameter group {index} of the state dict has {len(theirs['params'])} parameters; "
                f"this optimizer's has {len(mine['params'])}, of which {len(own)} are trainable"
            )
        _refuse_other_class(optimizer, index, mine, theirs)
        matched.update(zip(theirs["params"], own, strict=True))
    return matched


def _refuse_other_class(optimizer: Optimizer, index: int, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse a group of another class; a group that names none has the optimizer's own."""
    own = class_name(getattr(optimizer, "optimizer_class", type(optimizer)))
    live, saved = (group.get("optimizer_class", own) for group in (mine, theirs))
    if live != saved:
        raise ValueError(
            f"parameter group {index} is updated by {live}, and the state dict has the state of {saved}: make the "
            "optimizer with the classes that it was saved with, or load the weights only"
        )


def _check_shapes(engine: Engine, parameters: Mapping[Any, Tensor], states: Mapping[Any, Any]) -> None:
    groups = {parameter: group for group in engine.param_groups for parameter in group["params"]}
    for index, entries in states.items():
        parameter = parameters.get(index)
        for key, value in entries.items():
            if parameter is None or not isinstance(value, Tensor):
                continue
            own = local_tensor(parameter).shape
            fits = engine.managed.accepts(groups[parameter], key, local_tensor(value), own)
            if fits and (not is_sharded(value) or is_sharded(parameter)):
                continue
            hint = ""
            if value.shape == parameter.shape and is_sharded(parameter):
                hint = (
                    f", of which {tuple(own)} is on this rank. Load an unsharded state dict with "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and full_state_dict=True"
                )
            raise ValueError(
                f"state {key!r} of parameter {index} has shape {tuple(value.shape)}; "
                f"the parameter has {tuple(parameter.shape)}{hint}"
            )

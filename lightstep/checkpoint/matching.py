"""Matching a checkpoint to a model and optimizer: which stored tensor is read into which tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.optimizer_content import OptimizerContent, entry_key, same_settings, stored_entries
from lightstep.checkpoint.read import ChunkCache
from lightstep.checkpoint.saved import SavedCheckpoint
from lightstep.checkpoint.tensors import Shard, Target, shard_of
from lightstep.distributed import local_tensor
from lightstep.sharding.model_names import NamedTensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
"""torch promotes these to no other dtype."""
_NAMES_SHOWN = 8


@dataclass
class Match:
    """A checkpoint that fits a model and optimizer."""

    saved: SavedCheckpoint
    tensors: list[Target]
    """The model's tensors to fill."""
    optimizer: OptimizerContent | None
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameter of the optimizer → state entry → key of the stored tensor."""
    groups: list[int] = field(default_factory=list)
    """For each of the optimizer's groups, the saved group whose hyper-parameters it takes; -1: none."""
    saved_names: dict[str, str] = field(default_factory=dict)
    """Parameter of the optimizer → its name in the checkpoint."""
    tied: list[tuple[NamedTensor, list[str]]] = field(default_factory=list)
    """Tensors that were several in the run that was saved, and the names there. They must be equal."""
    cache: ChunkCache = field(default_factory=ChunkCache)
    """Chunks that have been read."""


def match(
    saved: SavedCheckpoint,
    tensors: Sequence[NamedTensor],
    optimizer: OptimizerContent | None,
    all_names: Sequence[Mapping[str, set[str]]],
    skip: Collection[str] = (),
) -> Match:
    """Find each of this rank's tensors in the checkpoint.

    Args:
        all_names: each rank's names of the ``"model"``'s tensors, of those that are ``"frozen"``, and of the
            ``"optimizer"``'s parameters. A rank need not have all tensors.
        skip: names of the model's tensors that are not loaded.

    Raises:
        CheckpointError: tensors are missing or unexpected, or have another shape; the message names them.
    """
    found, missing, different = _find_tensors(saved, tensors)
    live = set().union(*(names["model"] for names in all_names))
    known = live | {saved.aliases[name] for name in live if name in saved.aliases}
    unexpected = sorted((saved.model_names() | saved.base_shapes.keys()) - known)
    _raise_differences("model", missing, unexpected, different)
    matched = Match(saved, [], optimizer)
    if optimizer is not None and saved.optimizer is not None:
        optimized, frozen = (set().union(*(names[kind] for names in all_names)) for kind in ("optimizer", "frozen"))
        _match_optimizer(matched, saved, optimizer, optimized, frozen)
    read = [(named, name) for named, name in found if named.name not in skip]
    matched.tensors = [_model_target(saved, named, name, matched) for named, name in read]
    stored = [(named, [name for name in named.names if f"model.{name}" in saved.index]) for named, _ in read]
    matched.tied = [(named, names) for named, names in stored if len(names) > 1]
    return matched


# -- the model ---------------------------------------------------------------------------------------------------------


def _find_tensors(
    saved: SavedCheckpoint, tensors: Iterable[NamedTensor]
) -> tuple[list[tuple[NamedTensor, str]], list[str], list[str]]:
    """``(tensor, saved name)`` pairs, names that were not saved, and descriptions of other shapes and dtypes."""
    found, missing, different, base = [], [], [], saved.base_shapes
    for named in tensors:
        names, tensor = [saved.aliases.get(name, name) for name in named.names], named.tensor
        name = next((name for name in names if f"model.{name}" in saved.index), None)
        stored = saved.index.get(f"model.{name}")
        shape = next((base[name] for name in names if name in base), None) if stored is None else list(stored.shape)
        if shape is None:
            missing.append(named.name)
        elif shape != list(tensor.shape):
            different.append(f"{named.name} is {shape} in the checkpoint and {list(tensor.shape)} in the model")
        if name is None or stored is None:
            continue
        if not _can_hold(tensor.dtype, stored.dtype):
            different.append(f"{named.name} is {stored.dtype} in the checkpoint and {tensor.dtype} in the model")
        found.append((named, name))
    return found, missing, different


def _can_hold(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether values are loaded into ``dtype``: floating-point numbers are rounded, all others must fit."""
    if dtype.is_floating_point and stored.is_floating_point:
        return True
    if dtype.is_floating_point or stored.is_floating_point or {dtype, stored} & _UNSIGNED:
        return dtype == stored
    return torch.promote_types(dtype, stored) == dtype


def _raise_differences(what: str, missing: Sequence[str], unexpected: Sequence[str], different: Sequence[str]) -> None:
    parts = {"not in the checkpoint": missing, f"not in the {what}": unexpected, "different": different}
    texts = [f"{text}: {list_names(names, limit=_NAMES_SHOWN)}" for text, names in parts.items() if names]
    if texts:
        raise CheckpointError(f"it belongs to another {what} ({'; '.join(texts)})")


def _model_target(saved: SavedCheckpoint, named: NamedTensor, name: str, matched: Match) -> Target:
    """Weights whose dtype changes are read from their masters, if the optimizer is loaded too."""
    key, tensor = f"model.{name}", named.tensor
    master = entry_key(name, "master")
    if named.name in matched.entries and saved.index[key].dtype != tensor.dtype and master in saved.index:
        key = master
    return Target(key, shard_or_empty(tensor), lambda: local_tensor(tensor).detach())


def shard_or_empty(tensor: Tensor) -> Shard:
    """This rank's shard of the tensor; an empty one if the rank is not in the DTensor's mesh."""
    empty = local_tensor(tensor).shape
    return shard_of(tensor) or Shard(tensor.shape, torch.Size([0] * len(empty)), empty)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _match_optimizer(
    matched: Match, saved: SavedCheckpoint, optimizer: OptimizerContent, optimized: set[str], frozen: set[str]
) -> None:
    """Find each parameter's state and each group's hyper-parameters.

    Frozen parameters without state may be in the groups on one side only.

    Args:
        optimized: the names of all ranks' parameters of the optimizer.
        frozen: the names of all ranks' frozen tensors.
    """
    assert saved.optimizer is not None
    expected, known = saved.manifest.get("optimizer"), optimizer.class_name
    if expected and known and expected != known:
        raise CheckpointError(f"it holds the state of {expected}, the optimizer is {known}")
    group_of = {name: number for number, names in enumerate(saved.groups) for name in names}
    saved_names = matched.saved_names = {name: saved.aliases.get(name, name) for name in optimized}
    entries = stored_entries(saved.index)
    optional = {saved.aliases.get(name, name) for name in frozen} - entries.keys() - saved.optimizer["values"].keys()
    missing = sorted(name for name, saved_name in saved_names.items() if saved_name not in {*group_of, *optional})
    unexpected = sorted(group_of.keys() - set(saved_names.values()) - optional)
    different = [
        text
        for name in optimizer.parameters
        for text in _other_shapes(saved, optimizer, name, saved_names[name], entries)
    ]
    _raise_differences("optimizer", missing, unexpected, different)
    for number, names in enumerate(optimizer.groups):
        origins = {group_of[saved_names[name]] for name in names if saved_names[name] in group_of}
        matched.groups.append(_saved_group(saved, number, sorted(origins)))
        _refuse_other_class(saved, optimizer, number, matched.groups[-1])
    for name in optimizer.parameters:
        matched.entries[name] = _entries_to_load(saved, optimizer, name, saved_names[name], entries)


def _other_shapes(
    saved: SavedCheckpoint, optimizer: OptimizerContent, name: str, saved_name: str, entries: Mapping[str, list[str]]
) -> list[str]:
    """Descriptions of saved state that is neither of the parameter's shape nor 0-dim, if the parameter is sharded."""
    parameter = optimizer.parameters[name]
    shard = shard_of(parameter)
    if shard is None or not shard.sharded or optimizer.has_whole_tensors:
        return []
    return [
        f"state {entry!r} of {name} is {list(stored.shape)} in the checkpoint, the parameter {list(shard.shape)}"
        for entry in entries.get(saved_name, [])
        if (stored := saved.index[entry_key(saved_name, entry)]).shape not in (shard.shape, torch.Size(()))
    ]


def _saved_group(saved: SavedCheckpoint, number: int, origins: list[int]) -> int:
    """The saved group whose hyper-parameters group ``number`` takes; -1 without ``origins``.

    Args:
        origins: the saved groups that the group's parameters come from.
    """
    assert saved.optimizer is not None
    settings = saved.optimizer["groups"]
    for origin in origins[1:]:
        if not same_settings(settings[origin], settings[origins[0]]):
            raise CheckpointError(
                f"parameter group {number} of the optimizer joins groups {origins} of the checkpoint, whose settings "
                "differ; build the groups as they were"
            )
    return origins[0] if origins else -1


def _refuse_other_class(saved: SavedCheckpoint, optimizer: OptimizerContent, number: int, origin: int) -> None:
    if origin < 0:
        return
    assert saved.optimizer is not None
    expected = _class_of(saved.optimizer["groups"], origin, saved.manifest.get("optimizer"))
    known = _class_of(optimizer.optimizer.param_groups, number, optimizer.class_name)
    same_form = (expected, known) if "." in expected and "." in known else map(_without_module, (expected, known))
    if expected and known and len({*same_form}) > 1:
        raise CheckpointError(f"parameter group {number} is updated by {known}, and it holds the state of {expected}")


def _class_of(groups: Sequence[Mapping[str, Any]], number: int, every: str | None) -> str:
    """The class of a group; of one that names none, the one of ``every`` that no group names. ``""``: not known."""
    named = groups[number].get("optimizer_class")
    if named is not None or every is None:
        return named or ""
    others = {_without_module(name) for group in groups if (name := group.get("optimizer_class")) is not None}
    left = set(every.split(" + ")) - others
    return left.pop() if len(left) == 1 else ""


def _without_module(name: str) -> str:
    return name.rpartition(".")[2]


def _entries_to_load(
    saved: SavedCheckpoint, optimizer: OptimizerContent, name: str, saved_name: str, entries: Mapping[str, list[str]]
) -> dict[str, str]:
    """State entry → key of the stored tensor, with a master if and only if the parameter's dtype needs one."""
    parameter = optimizer.parameters[name]
    wanted = {entry: entry_key(saved_name, entry) for entry in entries.get(saved_name, [])}
    if parameter.dtype not in _LOW_PRECISION or not optimizer.keeps_masters:
        wanted.pop("master", None)
    elif "master" not in wanted and (wanted or parameter.requires_grad):
        stored = saved.index.get(f"model.{saved_name}")
        if stored is not None and stored.dtype == torch.float32:
            wanted["master"] = f"model.{saved_name}"
    return wanted

"""Comparing a checkpoint with a live model and optimizer: what is read into what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.optimizer_content import OptimizerContent, entry_key, same_settings, stored_entries
from lightstep.checkpoint.read import Held
from lightstep.checkpoint.saved import Saved
from lightstep.checkpoint.tensors import Shard, Target, shard_of
from lightstep.distributed import local_tensor
from lightstep.sharding.model_names import NamedTensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_NAMES_SHOWN = 8


@dataclass
class Matched:
    """A checkpoint that fits: what to read into what."""

    saved: Saved
    tensors: list[Target]
    optimizer: OptimizerContent | None
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    """Per parameter of the optimizer: state entry → key of the stored tensor."""
    groups: list[int] = field(default_factory=list)
    """Per live group: the saved group whose settings it takes."""
    called: dict[str, str] = field(default_factory=dict)
    """Per parameter of the optimizer: its name in the checkpoint."""
    held: Held = field(default_factory=Held)
    """What has been read of it."""


def match(
    saved: Saved,
    tensors: Sequence[NamedTensor],
    optimizer: OptimizerContent | None,
    everywhere: Sequence[Mapping[str, set[str]]],
    left_alone: Collection[str] = (),
) -> Matched:
    """Find every live tensor in the checkpoint.

    Args:
        everywhere: the names of all ranks' live tensors (a rank need not have all of them).
        left_alone: names of live tensors that stay as they are.

    Raises:
        CheckpointError: naming what is missing, unexpected, or of another shape.
    """
    found, missing, other = _find_tensors(saved, tensors)
    live = set().union(*(names["model"] for names in everywhere))
    known = live | {saved.aliases[name] for name in live if name in saved.aliases}
    unexpected = sorted((saved.model_names() | saved.base_shapes.keys()) - known)
    _raise_differences("model", missing, unexpected, other)
    matched = Matched(saved, [], optimizer)
    if optimizer is not None and saved.optimizer is not None:
        theirs, frozen = (set().union(*(names[kind] for names in everywhere)) for kind in ("optimizer", "frozen"))
        _match_optimizer(matched, saved, optimizer, theirs, frozen)
    matched.tensors = [
        _model_target(saved, named, name, matched) for named, name in found if named.name not in left_alone
    ]
    return matched


# -- the model ---------------------------------------------------------------------------------------------------------


def _find_tensors(
    saved: Saved, tensors: Iterable[NamedTensor]
) -> tuple[list[tuple[NamedTensor, str]], list[str], list[str]]:
    """``(live tensor, saved name)`` pairs, names that are not saved, and descriptions of what has another shape."""
    found, missing, other, base = [], [], [], saved.base_shapes
    for named in tensors:
        names, tensor = [saved.aliases.get(name, name) for name in named.names], named.tensor
        name = next((name for name in names if f"model.{name}" in saved.index), None)
        stored = saved.index.get(f"model.{name}")
        shape = next((base[name] for name in names if name in base), None) if stored is None else list(stored.shape)
        if shape is None:
            missing.append(named.name)
        elif shape != list(tensor.shape):
            other.append(f"{named.name} is {shape} in the checkpoint and {list(tensor.shape)} in the model")
        if name is None or stored is None:
            continue
        if stored.dtype.is_floating_point != tensor.dtype.is_floating_point:
            other.append(f"{named.name} is {stored.dtype} in the checkpoint and {tensor.dtype} in the model")
        found.append((named, name))
    return found, missing, other


def _raise_differences(what: str, missing: Sequence[str], unexpected: Sequence[str], other: Sequence[str]) -> None:
    parts = []
    if missing:
        parts.append(f"not in the checkpoint: {_listed(missing)}")
    if unexpected:
        parts.append(f"not in the {what}: {_listed(unexpected)}")
    if other:
        parts.append(f"different: {_listed(other)}")
    if parts:
        raise CheckpointError(f"it belongs to another {what} ({'; '.join(parts)})")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _model_target(saved: Saved, named: NamedTensor, name: str, matched: Matched) -> Target:
    """Weights come from their masters when they change dtype and the optimizer is loaded too."""
    key, tensor = f"model.{name}", named.tensor
    master = entry_key(name, "master")
    if named.name in matched.entries and saved.index[key].dtype != tensor.dtype and master in saved.index:
        key = master
    return Target(key, local_shard(tensor), lambda: local_tensor(tensor).detach())


def local_shard(tensor: Tensor) -> Shard:
    """This rank's part; nothing at all when it is not in the DTensor's mesh."""
    nothing = local_tensor(tensor).shape
    return shard_of(tensor) or Shard(tensor.shape, torch.Size([0] * len(nothing)), nothing)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _match_optimizer(
    matched: Matched, saved: Saved, optimizer: OptimizerContent, everywhere: set[str], frozen: set[str]
) -> None:
    """Groups may hold frozen parameters or not: those without state may be missing on either side."""
    assert saved.optimizer is not None
    expected, known = saved.manifest.get("optimizer"), optimizer.class_name
    if expected and known and expected != known:
        raise CheckpointError(f"it holds the state of {expected}, the optimizer is {known}")
    before = {name: number for number, names in enumerate(saved.groups) for name in names}
    called = matched.called = {name: saved.aliases.get(name, name) for name in everywhere}
    entries = stored_entries(saved.index)
    untouched = {saved.aliases.get(name, name) for name in frozen} - entries.keys() - saved.optimizer["values"].keys()
    missing = sorted(name for name, theirs in called.items() if theirs not in {*before, *untouched})
    unexpected = sorted(before.keys() - set(called.values()) - untouched)
    other = [text for name in optimizer.parameters for text in _unusable(saved, optimizer, name, called[name], entries)]
    _raise_differences("optimizer", missing, unexpected, other)
    for number, names in enumerate(optimizer.groups):
        origins = {before[called[name]] for name in names if called[name] in before}
        matched.groups.append(_one_group(saved, number, sorted(origins)))
        _refuse_other_class(saved, optimizer, number, matched.groups[-1])
    for name in optimizer.parameters:
        matched.entries[name] = _wanted(saved, optimizer, name, called[name], entries)


def _unusable(
    saved: Saved, optimizer: OptimizerContent, name: str, theirs: str, entries: Mapping[str, list[str]]
) -> list[str]:
    parameter = optimizer.parameters[name]
    shard = shard_of(parameter)
    if shard is None or not shard.sharded or optimizer.has_whole_tensors:
        return []
    return [
        f"state {entry!r} of {name} is {list(stored.shape)} in the checkpoint, the parameter {list(shard.shape)}"
        for entry in entries.get(theirs, [])
        if (stored := saved.index[entry_key(theirs, entry)]).shape not in (shard.shape, torch.Size(()))
    ]


def _one_group(saved: Saved, number: int, origins: list[int]) -> int:
    """The saved group whose settings a live group takes."""
    assert saved.optimizer is not None
    settings = saved.optimizer["groups"]
    for origin in origins[1:]:
        if not same_settings(settings[origin], settings[origins[0]]):
            raise CheckpointError(
                f"parameter group {number} of the optimizer joins groups {origins} of the checkpoint, whose settings "
                "differ; build the groups as they were"
            )
    return origins[0] if origins else -1


def _refuse_other_class(saved: Saved, optimizer: OptimizerContent, number: int, origin: int) -> None:
    assert saved.optimizer is not None
    mine = optimizer.optimizer.param_groups[number].get("optimizer_class")
    theirs = saved.optimizer["groups"][origin].get("optimizer_class") if origin >= 0 else None
    if mine and theirs and mine != theirs:
        raise CheckpointError(f"parameter group {number} is updated by {mine}, and it holds the state of {theirs}")


def _wanted(
    saved: Saved, optimizer: OptimizerContent, name: str, theirs: str, entries: Mapping[str, list[str]]
) -> dict[str, str]:
    """State entry → stored tensor, with the master that the parameter's dtype asks for."""
    parameter = optimizer.parameters[name]
    wanted = {entry: entry_key(theirs, entry) for entry in entries.get(theirs, [])}
    if parameter.dtype not in _LOW_PRECISION or not optimizer.keeps_masters:
        wanted.pop("master", None)
    elif "master" not in wanted and (wanted or parameter.requires_grad):
        stored = saved.index.get(f"model.{theirs}")
        if stored is not None and stored.dtype == torch.float32:
            wanted["master"] = f"model.{theirs}"
    return wanted

"""Comparing a checkpoint with a live model and optimizer, and then loading it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.checkpoint.format import CheckpointError, read_manifest, refuse_engine_files
from lightstep.checkpoint.state import (
    OptimizerContent,
    entry_key,
    read_state,
    same_settings,
    set_random_states,
    stored_entries,
)
from lightstep.checkpoint.tensors import Shard, Stored, Target, read_index, read_tensors, shard_of, whole
from lightstep.distributed import local_tensor
from lightstep.optimizer.serialization import refuse_nan
from lightstep.sharding.model_names import NamedTensor, set_extra_states

logger = logging.getLogger(__name__)

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_NAMES_SHOWN = 8


@dataclass
class Saved:
    """A complete checkpoint on disk: its manifest, index and small state."""

    folder: Path
    manifest: dict[str, Any]
    index: dict[str, Stored]
    state: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """Raises :class:`CheckpointError` when it is not complete."""
        manifest = read_manifest(folder)
        refuse_engine_files(folder, manifest)
        return cls(folder, manifest, read_index(folder), read_state(folder))

    @property
    def aliases(self) -> dict[str, str]:
        """Names of tied tensors, and the name under which each is saved."""
        return dict(self.manifest.get("aliases") or {})

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """Hyper-parameters, loss scale and plain state values, when an optimizer was saved."""
        return self.state.get("optimizer")

    @property
    def groups(self) -> list[list[str]]:
        """Parameter names of each group."""
        return list(self.manifest.get("groups") or [])

    def model_names(self) -> set[str]:
        return {key.removeprefix("model.") for key in self.index if key.startswith("model.")}


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


def match(
    saved: Saved,
    tensors: Sequence[NamedTensor],
    optimizer: OptimizerContent | None,
    everywhere: Sequence[Mapping[str, set[str]]],
) -> Matched:
    """Find every live tensor in the checkpoint.

    Args:
        everywhere: the names of all ranks' live tensors (a rank need not have all of them).

    Raises:
        CheckpointError: naming what is missing, unexpected, or of another shape.
    """
    found, missing, other = _find_tensors(saved, tensors)
    live = set().union(*(names["model"] for names in everywhere))
    known = live | {saved.aliases[name] for name in live if name in saved.aliases}
    unexpected = sorted(saved.model_names() - known)
    _raise_differences("model", missing, unexpected, other)
    matched = Matched(saved, [], optimizer)
    if optimizer is not None and saved.optimizer is not None:
        _match_optimizer(matched, saved, optimizer, set().union(*(names["optimizer"] for names in everywhere)))
    matched.tensors = [_model_target(saved, named, name, matched) for named, name in found]
    return matched


def apply(matched: Matched, model: nn.Module, scheduler: Any, rank: int) -> None:
    """Read weights, then optimizer state, then everything small."""
    saved, optimizer = matched.saved, matched.optimizer
    try:
        with torch.no_grad():
            read_tensors(saved.folder, saved.index, matched.tensors)
            if optimizer is not None:
                _apply_optimizer(matched, optimizer)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the model may be partly loaded") from error
    set_extra_states(model, saved.state.get("modules") or {})
    if scheduler is not None:
        _apply_scheduler(saved, scheduler)
    states = saved.state.get("random") or []
    if optimizer is not None and saved.optimizer is not None and rank < len(states):
        set_random_states(states[rank])


# -- the model ---------------------------------------------------------------------------------------------------------


def _find_tensors(
    saved: Saved, tensors: Iterable[NamedTensor]
) -> tuple[list[tuple[NamedTensor, str]], list[str], list[str]]:
    """``(live tensor, saved name)`` pairs, names that are not saved, and descriptions of what has another shape."""
    found, missing, other = [], [], []
    for named in tensors:
        names = [saved.aliases.get(name, name) for name in named.names]
        name = next((name for name in names if f"model.{name}" in saved.index), None)
        if name is None:
            missing.append(named.name)
            continue
        stored, tensor = saved.index[f"model.{name}"], named.tensor
        if stored.shape != tensor.shape:
            shapes = f"{list(stored.shape)} in the checkpoint and {list(tensor.shape)} in the model"
            other.append(f"{named.name} is {shapes}")
        elif stored.dtype.is_floating_point != tensor.dtype.is_floating_point:
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
    return Target(key, _shard(tensor), lambda: local_tensor(tensor).detach())


def _shard(tensor: Tensor) -> Shard:
    """This rank's part; nothing at all when it is not in the DTensor's mesh."""
    nothing = local_tensor(tensor).shape
    return shard_of(tensor) or Shard(tensor.shape, torch.Size([0] * len(nothing)), nothing)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _match_optimizer(matched: Matched, saved: Saved, optimizer: OptimizerContent, everywhere: set[str]) -> None:
    expected, known = saved.manifest.get("optimizer"), optimizer.class_name
    if expected and known and expected != known:
        raise CheckpointError(f"it holds the state of {expected}, the optimizer is {known}")
    before = {name: number for number, names in enumerate(saved.groups) for name in names}
    called = matched.called = {name: saved.aliases.get(name, name) for name in everywhere}
    missing = sorted(name for name, theirs in called.items() if theirs not in before)
    unexpected = sorted(before.keys() - set(called.values()))
    entries = stored_entries(saved.index)
    other = [text for name in optimizer.parameters for text in _unusable(saved, optimizer, name, called[name], entries)]
    _raise_differences("optimizer", missing, unexpected, other)
    for number, names in enumerate(optimizer.groups):
        matched.groups.append(_one_group(saved, number, sorted({before[called[name]] for name in names})))
    for name in optimizer.parameters:
        matched.entries[name] = _wanted(saved, optimizer, name, called[name], entries)


def _unusable(
    saved: Saved, optimizer: OptimizerContent, name: str, theirs: str, entries: Mapping[str, list[str]]
) -> list[str]:
    parameter = optimizer.parameters[name]
    shard = shard_of(parameter)
    if shard is None or not shard.sharded:
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


def _wanted(
    saved: Saved, optimizer: OptimizerContent, name: str, theirs: str, entries: Mapping[str, list[str]]
) -> dict[str, str]:
    """State entry → stored tensor, with the master that the parameter's dtype asks for."""
    parameter = optimizer.parameters[name]
    wanted = {entry: entry_key(theirs, entry) for entry in entries.get(theirs, [])}
    if parameter.dtype not in _LOW_PRECISION or not optimizer.keeps_masters:
        wanted.pop("master", None)
    elif "master" not in wanted and saved.index[f"model.{theirs}"].dtype == torch.float32:
        wanted["master"] = f"model.{theirs}"
    return wanted


def _apply_optimizer(matched: Matched, optimizer: OptimizerContent) -> None:
    saved = matched.saved.optimizer
    if saved is None:
        if hasattr(optimizer.optimizer, "refresh_master_weights"):
            optimizer.optimizer.refresh_master_weights()
        logger.info("%s holds no optimizer; the masters were rebuilt from the weights", matched.saved.folder)
        return
    values_of = {name: dict(saved["values"].get(matched.called[name], {})) for name in matched.entries}
    optimizer.expect(name for name, wanted in matched.entries.items() if wanted or values_of[name])
    targets = []
    for name, wanted in matched.entries.items():
        values = values_of.pop(name)  # the loader fills it, and must be the only one that keeps it
        if not optimizer.keeps(name):
            optimizer.load(name, dict.fromkeys([*values, *wanted]))
            continue
        loader = _ParameterLoader(optimizer, name, values, len(wanted))
        targets += [loader.target(entry, key, matched.saved.index[key]) for entry, key in wanted.items()]
        loader.finish_if_whole()
    read_tensors(matched.saved.folder, matched.saved.index, targets)
    for number, origin in enumerate(matched.groups):
        if origin >= 0:
            optimizer.set_hyperparameters(number, saved["groups"][origin])
    loss_scale = getattr(optimizer.optimizer, "loss_scale", None)
    if loss_scale is not None and saved.get("loss_scale") is not None:
        loss_scale.load_state_dict(saved["loss_scale"])


class _ParameterLoader:
    """Collects one parameter's entries and hands them over together, so that few of them are in memory at a time."""

    def __init__(self, optimizer: OptimizerContent, name: str, entries: dict[str, Any], missing: int) -> None:
        self._optimizer = optimizer
        self._name = name
        self._entries = entries
        self._missing = missing

    def target(self, entry: str, key: str, stored: Stored) -> Target:
        parameter = self._optimizer.parameters[self._name]
        shard = _shard(parameter) if stored.shape == parameter.shape else whole(stored.shape)

        def arrived(tensor: Tensor) -> None:
            self._entries[entry] = tensor
            self._missing -= 1
            self.finish_if_whole()

        return Target(key, shard, lambda: torch.empty(shard.lengths, dtype=stored.dtype), arrived)

    def finish_if_whole(self) -> None:
        if self._missing == 0:
            try:
                refuse_nan(self._name, self._entries)
            except ValueError as error:
                raise CheckpointError(str(error)) from error
            self._optimizer.load(self._name, self._entries)
            self._entries = {}


def _apply_scheduler(saved: Saved, scheduler: Any) -> None:
    state = saved.state.get("scheduler")
    if state is None:
        logger.warning("%s holds no scheduler state; the scheduler starts where it is", saved.folder)
        return
    scheduler.load_state_dict(state)

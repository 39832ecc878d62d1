"""Reading lightstep's own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.formats.state import Group, LazyTensor, TrainingState, max_step
from lightstep.checkpoint.layout import refuse_replaced
from lightstep.checkpoint.optimizer_content import entry_key, stored_entries
from lightstep.checkpoint.read import read_tensors
from lightstep.checkpoint.save import average_key
from lightstep.checkpoint.saved import SavedCheckpoint
from lightstep.checkpoint.tensors import Index, Target, full_shard


def read_lightstep(folder: Path) -> TrainingState:
    """The run in a checkpoint that ``strategy.save_checkpoint`` wrote on any number of ranks.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    saved = SavedCheckpoint.read(folder)
    weights = {name: _lazy(saved, f"model.{name}") for name in _in_model_order(saved)}
    aliases = {alias: name for alias, name in saved.aliases.items() if name in weights}
    state = TrainingState("lightstep", weights, aliases=aliases, base=saved.base)
    if state.base is not None:
        state.notes.append(
            f"it holds only what was trained; the frozen base ({state.base['name'] or 'without a name'}) is not in it"
        )
    if any(key.startswith(average_key("")) for key in saved.index):
        state.notes.append("it also holds averages of the weights, which are not converted; export_model writes them")
    if saved.optimizer is not None:
        _read_optimizer(state, saved)
    state.scheduler = saved.state.get("scheduler")
    state.extra = dict(saved.state.get("extra") or {})
    state.random = list(saved.state.get("random") or [])
    state.modules = dict(saved.state.get("modules") or {})
    state.world_size = saved.manifest.get("world_size")
    state.optimizer_class = saved.manifest.get("optimizer")
    state.step = max_step(state.entries.values())
    return state


def lazy(folder: Path, key: str, index: Index) -> LazyTensor:
    """A whole tensor in a folder of ``torch.distributed.checkpoint``."""
    stored = index[key]

    def read() -> Tensor:
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        read_tensors(folder, {key: stored}, [Target(key, full_shard(stored.shape), lambda: tensor)])
        return tensor

    return LazyTensor(stored.dtype, stored.shape, read)


def _lazy(saved: SavedCheckpoint, key: str) -> LazyTensor:
    """A tensor of ``saved``. Reading it raises if another process has replaced the checkpoint in the meantime."""
    tensor = lazy(saved.data, key, saved.index)

    def read() -> Tensor:
        try:
            return tensor.load()
        finally:
            refuse_replaced(saved.folder, saved.manifest)

    return LazyTensor(tensor.dtype, tensor.shape, read)


def _in_model_order(saved: SavedCheckpoint) -> list[str]:
    """The names of the model's tensors, in the order in which the manifest lists them."""
    listed = [name for name in saved.manifest.get("tensors") or () if f"model.{name}" in saved.index]
    return list(dict.fromkeys([*listed, *sorted(saved.model_names())]))


def _read_optimizer(state: TrainingState, saved: SavedCheckpoint) -> None:
    assert saved.optimizer is not None
    settings = saved.optimizer["groups"]
    base = saved.base_shapes
    state.groups = [
        Group([name for name in names if name not in base], dict(own))
        for names, own in zip(saved.groups, settings, strict=True)
    ]
    values: dict[str, dict[str, Any]] = saved.optimizer["values"]
    stored = stored_entries(saved.index)
    for name in state.optimized():
        entries = {key: _lazy(saved, entry_key(name, key)) for key in sorted(stored.get(name, []))}
        if found := {**values.get(name, {}), **entries}:
            state.entries[name] = found
    state.loss_scale = saved.optimizer.get("loss_scale")

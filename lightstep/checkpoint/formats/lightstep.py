"""Reading and writing lightstep's own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.formats.state import Group, LazyTensor, TrainingState, max_step
from lightstep.checkpoint.layout import CHECKPOINT, unreplaced
from lightstep.checkpoint.model_state import average_key
from lightstep.checkpoint.optimizer_state import entry_key, stored_entries
from lightstep.checkpoint.save import finish_checkpoint
from lightstep.checkpoint.saved import SavedCheckpoint
from lightstep.checkpoint.storage import storage_for
from lightstep.checkpoint.tensors import Index, Source, Target, full_shard, read_tensors, write_tensors


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
        with unreplaced(saved.folder, saved.manifest):
            return tensor.load()

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


def write_lightstep(state: TrainingState, path: Path) -> None:
    """Write the run as a lightstep checkpoint.

    Host memory grows by what reading one tensor takes, and by 128 MiB of tensors, or two tensors if these are larger.

    Raises:
        CheckpointError: the disk is full, something else than a checkpoint is at ``path``, ...
    """
    with storage_for(path).new_folder(path, CHECKPOINT) as temporary:
        index = write_tensors(temporary, _sources(state))
        finish_checkpoint(temporary, path, index, _small_state(state), _manifest(state), state.world_size or 1)
        storage_for(path).commit(temporary, path, CHECKPOINT)


def _sources(state: TrainingState) -> list[Source]:
    sources = [_source(f"model.{name}", weight) for name, weight in state.weights.items()]
    for name in state.optimized():
        for key, value in state.entries.get(name, {}).items():
            if isinstance(value, LazyTensor):
                sources.append(_source(entry_key(name, key), value))
    return sources


def _source(key: str, tensor: LazyTensor) -> Source:
    return Source(key, full_shard(tensor.shape), tensor.dtype, tensor.read)


def _small_state(state: TrainingState) -> dict[str, Any]:
    small = {"extra": state.extra, "scheduler": state.scheduler, "modules": state.modules, "random": state.random}
    if state.groups is not None:
        plain = {
            name: {key: value for key, value in entries.items() if not isinstance(value, LazyTensor)}
            for name, entries in state.entries.items()
        }
        small["optimizer"] = {
            "groups": [group.settings for group in state.groups],
            "loss_scale": state.loss_scale,
            "values": {name: values for name, values in plain.items() if values},
        }
    return small


def _manifest(state: TrainingState) -> dict[str, Any]:
    return {
        "scheduler": None,
        "optimizer": state.optimizer_class,
        "groups": None if state.groups is None else [group.names for group in state.groups],
        "aliases": state.aliases,
        "converted_from": state.format,
        **({} if state.base is None else {"base": state.base}),
    }

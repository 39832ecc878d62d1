"""Writing a checkpoint for ``strategy.load_checkpoint`` on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lightstep.checkpoint.formats.state import LazyTensor, TrainingState
from lightstep.checkpoint.layout import CHECKPOINT
from lightstep.checkpoint.optimizer_content import entry_key
from lightstep.checkpoint.save import finish_checkpoint
from lightstep.checkpoint.storage import storage_for
from lightstep.checkpoint.tensors import Source, full_shard
from lightstep.checkpoint.write import write_tensors


def write_lightstep(state: TrainingState, path: Path) -> None:
    """Write the run as a lightstep checkpoint.

    Host memory grows by what reading one tensor takes, and by 128 MiB of tensors, or two tensors if these are larger.

    Raises:
        CheckpointError: the disk is full, something else than a checkpoint is at ``path``, ...
    """
    with storage_for(path).new_folder(path, CHECKPOINT) as temporary:
        index = write_tensors(temporary, _sources(state))
        finish_checkpoint(temporary, path, index, _small_state(state), _manifest(state), state.world_size or 1)


def _sources(state: TrainingState) -> list[Source]:
    sources = [_source(f"model.{name}", weight) for name, weight in state.weights.items()]
    for name in state.optimized():
        for key, value in state.entries.get(name, {}).items():
            if isinstance(value, LazyTensor):
                sources.append(_source(entry_key(name, key), value))
    return sources


def _source(key: str, tensor: LazyTensor) -> Source:
    return Source(key, full_shard(tensor.shape), tensor.dtype, compact(tensor.read))


def compact(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``read`` with a result whose storage has no other elements: ``torch.save`` writes the whole storage."""

    def fetch() -> Tensor:
        tensor = read().contiguous()
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    return fetch


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

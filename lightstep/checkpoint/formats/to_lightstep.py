"""Writing a checkpoint that ``strategy.load_checkpoint`` resumes, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from lightstep.checkpoint.checkpoint import manifest_header, tensor_shapes
from lightstep.checkpoint.format import begin, commit, discard, write_manifest
from lightstep.checkpoint.formats.state import LazyTensor, TrainingState
from lightstep.checkpoint.state import entry_key, write_state
from lightstep.checkpoint.tensors import Source, whole, write_tensors


def write_lightstep(state: TrainingState, path: Path) -> None:
    """Host memory grows by what reading one tensor takes, and by small tensors of 32 MiB together.

    Raises:
        CheckpointError: the disk is full, ``path`` is something else than a checkpoint, ...
    """
    temporary = begin(path)
    try:
        write_tensors(temporary, _sources(state), None)
        _write_small(state, temporary)
        commit(temporary, path)
    except BaseException:
        discard(temporary)
        raise


def _sources(state: TrainingState) -> list[Source]:
    sources = [_source(f"model.{name}", weight) for name, weight in state.weights.items()]
    for name in state.optimized():
        for key, value in state.entries.get(name, {}).items():
            if isinstance(value, LazyTensor):
                sources.append(_source(entry_key(name, key), value))
    return sources


def _source(key: str, tensor: LazyTensor) -> Source:
    return Source(key, whole(tensor.shape), tensor.dtype, compact(tensor.read))


def compact(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``torch.save`` writes a tensor's whole storage: a view of a larger one is copied first."""

    def fetch() -> Tensor:
        tensor = read().contiguous()
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    return fetch


def _write_small(state: TrainingState, folder: Path) -> None:
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
    write_state(folder, small)
    manifest = {
        **manifest_header(state.world_size or 1),
        "scheduler": None,
        "optimizer": state.optimizer_class,
        "groups": None if state.groups is None else [group.names for group in state.groups],
        "aliases": state.aliases,
        "converted_from": state.format,
        "tensors": tensor_shapes(folder),
    }
    write_manifest(folder, manifest)

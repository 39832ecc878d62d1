"""Reading checkpoints of LightRFT's ``FSDPadaptOptimizer``: a file ``optim_states/_rankN`` per rank, and the weights.

A file has ``grad_scaler``, ``base_optim_states`` (the state dict of the wrapped optimizer over fp32 masters) and
``flat_fp32_weights`` (the masters of each group). Tensors are FSDP2's DTensors or plain tensors, without names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.formats.dcp import METADATA, read_dcp
from lightstep.checkpoint.formats.files import load_file
from lightstep.checkpoint.formats.names import Naming, name_groups
from lightstep.checkpoint.formats.state import (
    MASTER,
    Group,
    LazyTensor,
    TrainingState,
    max_step,
    scale_from_lightrft,
    step_tensor,
)
from lightstep.distributed import is_sharded, local_tensor, mesh_ranks

KEYS = {"grad_scaler", "base_optim_states", "flat_fp32_weights"}
_RANK_FILE = re.compile(r"_rank(\d+)")
_UNDECAYED = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")


def rank_files(path: Path) -> dict[int, Path]:
    """Rank -> its file in ``path`` or in ``path/optim_states``."""
    for folder in (path, path / "optim_states"):
        if folder.is_dir():
            found = {int(m[1]): file for file in folder.iterdir() if (m := _RANK_FILE.fullmatch(file.name))}
            if found:
                return found
    return {}


def read_lightrft(path: Path, naming: Naming) -> TrainingState:
    """The run in a checkpoint of LightRFT's FSDP strategy. ``path`` may be the file of a single process.

    Raises:
        CheckpointError: the file of a rank is missing, or the parameters' names cannot be found.
    """
    files = {0: path} if path.is_file() else rank_files(path)
    contents = [_read_rank_file(files[rank]) for rank in sorted(files)]
    base = contents[0]["base_optim_states"]
    masters = [_rank_masters(content) for content in contents]
    _check_ranks(path, files, masters)
    indices = [index for group in base["param_groups"] for index in group["params"]]
    entries_by_index = {
        index: {**_entries(index, contents), MASTER: _concatenated([own[position] for own in masters])}
        for position, index in enumerate(indices)
    }
    found = next((read_dcp(f) for f in (path, path.parent) if (f / METADATA).is_file()), None)
    weights, ordered = ({}, True) if found is None else (found.weights, found.ordered)  # without: the masters are used
    shapes = {name: weight.shape for name, weight in weights.items()}
    names = name_groups(base["param_groups"], entries_by_index, naming, shapes, [_lightrft_groups], ordered)
    groups = [
        Group(own, {key: value for key, value in group.items() if key not in ("params", "param_names")})
        for own, group in zip(names, base["param_groups"], strict=True)
    ]
    notes = [] if found is None else found.notes
    state = TrainingState("LightRFT FSDPadaptOptimizer", weights, groups=groups, world_size=len(files), notes=notes)
    for index, name in zip(indices, state.optimized(), strict=True):
        entries = entries_by_index[index]
        if state.weights.setdefault(name, entries[MASTER]).dtype == torch.float32:
            del entries[MASTER]
        state.entries[name] = entries
    state.loss_scale = scale_from_lightrft(contents[0]["grad_scaler"])
    for file, key in (("scheduler_state.pt", "scheduler"), ("client_state.pt", "extra")):
        if path.is_dir() and (path / file).is_file():
            setattr(state, key, load_file(path / file))
    state.step = max_step(state.entries.values())
    return state


def is_lightrft(content: Any) -> bool:
    """Whether ``content`` is what ``FSDPadaptOptimizer`` writes to a file."""
    return isinstance(content, dict) and content.keys() >= KEYS


def _read_rank_file(path: Path) -> dict[str, Any]:
    content = load_file(path)
    if not is_lightrft(content):
        raise CheckpointError(f"{path} is not a file of FSDPadaptOptimizer: it lacks {list_names(sorted(KEYS))}")
    return dict(content)


def _rank_masters(content: Mapping[str, Any]) -> list[Tensor]:
    """One rank's masters of all groups, in the optimizer's order."""
    groups = content["flat_fp32_weights"]
    return [master for number in sorted(groups) for master in groups[number]]


def _check_ranks(path: Path, files: Mapping[int, Path], masters: Sequence[list[Tensor]]) -> None:
    """Raise if the file of a rank is missing, or has another number of masters.

    DTensors say how many ranks there were. With plain tensors a missing last file is not noticed.
    """
    meshes = [mesh_ranks(master) for master in masters[0] if is_sharded(master)]
    size = max((rank for mesh in meshes for rank in mesh), default=max(files)) + 1
    missing = [f"_rank{rank}" for rank in range(size) if rank not in files]
    if missing:
        raise CheckpointError(
            f"{path} is incomplete; missing: {list_names(missing)} (number of ranks: {size}); copy these files from "
            "the machines that wrote them, or use another checkpoint"
        )
    for rank, own in zip(sorted(files), masters, strict=True):
        if len(own) != len(masters[0]):
            raise CheckpointError(f"{files[rank]} has {len(own)} masters, {files[min(files)]} {len(masters[0])}")


def _entries(index: Any, contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One parameter's state entries from all ranks' files."""
    states = [content["base_optim_states"]["state"].get(index, {}) for content in contents]
    found: dict[str, Any] = {}
    for key, value in states[0].items():
        if isinstance(value, Tensor) and value.dim() > 0:
            found[key] = _concatenated([state[key] for state in states])
        else:
            found[key] = step_tensor(value) if isinstance(value, Tensor) or key == "step" else value
    return found


def _concatenated(shards: Sequence[Tensor]) -> LazyTensor:
    """The whole tensor: sharded along at most one dimension of the mesh, replicated along the others."""
    first = shards[0]
    if not is_sharded(first):
        shape = torch.Size([sum(len(shard) for shard in shards), *first.shape[1:]]) if first.dim() else first.shape
        return LazyTensor(first.dtype, shape, lambda: torch.cat(list(shards)) if first.dim() else first)
    mesh = first.device_mesh.mesh  # type: ignore[attr-defined]
    sharded = [(dim, placement) for dim, placement in enumerate(first.placements) if not placement.is_replicate()]  # type: ignore[attr-defined]
    if len(sharded) > 1 or any(not placement.is_shard() for _, placement in sharded):
        raise CheckpointError(f"tensors are sharded over {len(sharded)} dimensions of the mesh; one is supported")
    if not sharded:
        return LazyTensor(first.dtype, first.shape, lambda: local_tensor(first))
    (dim, placement), coordinates = sharded[0], [0] * mesh.dim()
    order = [int(mesh[(*coordinates[:dim], i, *coordinates[dim + 1 :])]) for i in range(mesh.shape[dim])]
    pieces = [local_tensor(shards[rank]) for rank in order]
    pieces = [piece for piece in pieces if piece.numel()] or pieces[:1]
    return LazyTensor(first.dtype, first.shape, lambda: torch.cat(pieces, dim=placement.dim).view(first.shape))


def _lightrft_groups(order: list[str]) -> list[list[str]]:
    """Two groups, with and without weight decay, in the order in which they first appear."""
    groups: dict[bool, list[str]] = {}
    for name in order:
        groups.setdefault(any(part in name for part in _UNDECAYED), []).append(name)
    return list(groups.values())

"""Reading DeepSpeed's own checkpoints of ZeRO stages 1, 2 and 3: flat partitions, one file per rank.

Stages 1 and 2 flatten each parameter group and split the flat tensor into equal partitions, one per rank. A partition
may begin and end within a parameter. Stage 3 splits each parameter into equal pieces, the last one padded. A rank's
pieces are consecutive in its flat partition, in the order of ``param_shapes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.formats.scales import from_deepspeed
from lightstep.checkpoint.formats.state import MASTER, Group, LazyTensor, TrainingState, max_step, step_tensor
from lightstep.checkpoint.formats.zero_files import Piece, ZeroFiles, client_state, scheduler_state


@dataclass(frozen=True)
class _Flat:
    """A flat group: a parameter group at stages 1 and 2, a sub-group at stage 3."""

    group: int
    """Its parameter group."""
    masters: list[Tensor]
    """Each rank's flat fp32 partition."""
    states: list[dict[str, Any]]
    """Each rank's optimizer state."""
    pieces: dict[str, list[Piece]]
    """Where each parameter is in the partitions."""


def read_zero(files: ZeroFiles) -> TrainingState:
    """The run in a ``global_stepN`` folder of any stage and world size.

    Raises:
        CheckpointError: files are missing or damaged, or come from runs with different numbers of ranks.
    """
    flats = list(_flats_of_stage_3(files) if files.stage == 3 else _flats_of_stages_1_and_2(files))
    shapes = {name: shape for group in files.param_shapes for name, shape in group.items()}
    masters = {name: _concatenated(flat.masters, pieces, shapes[name]) for flat, name, pieces in _parameters(flats)}
    weights = _weights(files, masters)
    model = files.model_states[0]
    state = TrainingState(
        f"DeepSpeed ZeRO stage {files.stage}", weights, aliases=dict(model.get("shared_params") or {})
    )
    settings = [dict(group) for group in files.base_states[0]["param_groups"]]
    counts = [group.pop("step", None) for group in settings]
    for flat, name, pieces in _parameters(flats):
        entries = _entries(flat, name, pieces, shapes[name])
        if "step" not in entries and counts[flat.group] is not None:
            entries["step"] = step_tensor(counts[flat.group])
        if weights[name].dtype != torch.float32:
            entries[MASTER] = masters[name]
        if entries:
            state.entries[name] = entries
    state.groups = _groups(flats, settings, list(weights))
    state.loss_scale = from_deepspeed(files.optimizer_states[0].get("loss_scaler"))
    state.scheduler = scheduler_state(model, state.notes)
    state.extra = client_state(model)
    state.step = max_step(state.entries.values())
    state.world_size = files.world_size
    state.notes += files.notes
    return state


def _parameters(flats: Sequence[_Flat]) -> Iterator[tuple[_Flat, str, list[Piece]]]:
    for flat in flats:
        for name, pieces in flat.pieces.items():
            yield flat, name, pieces


def _flats_of_stages_1_and_2(files: ZeroFiles) -> Iterator[_Flat]:
    """The flat groups of stages 1 and 2: parameters in the order of ``param_shapes``, perhaps with padding after each.

    ``param_slice_mappings`` in the files is not used: with ``round_robin_gradients`` its order is another one.
    """
    for number, shapes in enumerate(files.param_shapes):
        masters = [files.fp32_partition(rank, "single_partition_of_fp32_groups", number) for rank in files.ranks]
        size = max(files.partition_size(rank, number, masters[rank].numel()) for rank in files.ranks)
        gaps = files.optimizer_states[0].get("param_alignment_paddings") or {}
        paddings = gaps[number] if gaps else [0] * len(shapes)
        pieces: dict[str, list[Piece]] = {}
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            end = start + shape.numel()
            cuts = [(max(start, rank * size), min(end, (rank + 1) * size)) for rank in files.ranks]
            pieces[name] = [Piece(r, a - r * size, b - a) for r, (a, b) in zip(files.ranks, cuts, strict=True) if b > a]
            start = end + padding
        yield _checked(files, _Flat(number, masters, _states(files, number, number), pieces), shapes)


def _flats_of_stage_3(files: ZeroFiles) -> Iterator[_Flat]:
    size = files.world_size
    for number, shapes in enumerate(files.param_shapes):
        masters = [files.fp32_partition(rank, "fp32_flat_groups", number) for rank in files.ranks]
        pieces: dict[str, list[Piece]] = {}
        start = 0
        for name, shape in shapes.items():
            length = math.ceil(shape.numel() / size)
            kept = [max(0, min(length, shape.numel() - rank * length)) for rank in files.ranks]
            pieces[name] = [Piece(rank, start, kept[rank]) for rank in files.ranks]
            start += length
        yield _checked(files, _Flat(_group_of(files, number), masters, _states(files, None, number), pieces), shapes)


def _group_of(files: ZeroFiles, flat: int) -> int:
    """The parameter group of a flat group: stage 3 splits large parameter groups into several flat groups."""
    for number, group in enumerate(files.base_states[0]["param_groups"]):
        if flat in group["params"]:
            return number
    raise CheckpointError(f"{files.optimizer_files[0]} has no parameter group for its flat partition {flat}")


def _states(files: ZeroFiles, group: int | None, flat: int) -> list[dict[str, Any]]:
    """Each rank's optimizer state of one flat group.

    Args:
        group: at stages 1 and 2 the parameter group, whose state is looked up; ``None`` at stage 3.
        flat: at stage 3 the flat group, whose state is looked up.
    """
    found = []
    for base in files.base_states:
        index = flat if group is None else base["param_groups"][group]["params"][0]
        found.append(dict(base["state"].get(index, {})))
    return found


def _checked(files: ZeroFiles, flat: _Flat, shapes: Mapping[str, torch.Size]) -> _Flat:
    """``flat``, if its partitions have every element of every parameter.

    Raises:
        CheckpointError: elements are missing.
    """
    for name, pieces in flat.pieces.items():
        if (found := sum(piece.length for piece in pieces)) != shapes[name].numel():
            raise CheckpointError(
                f"{files.folder} has {found} of the {shapes[name].numel()} elements of {name}: its files come from "
                "different runs, or from another number of ranks"
            )
    for rank, master in enumerate(flat.masters):
        needed = max(
            (p.start + p.length for pieces in flat.pieces.values() for p in pieces if p.rank == rank), default=0
        )
        if master.numel() < needed:
            raise CheckpointError(
                f"{files.optimizer_files[rank]} has a partition of {master.numel()} elements where {needed} are needed"
            )
    return flat


def _concatenated(flat: Sequence[Tensor], pieces: Sequence[Piece], shape: torch.Size) -> LazyTensor:
    def read() -> Tensor:
        return torch.cat([flat[piece.rank].narrow(0, piece.start, piece.length) for piece in pieces]).view(shape)

    return LazyTensor(flat[0].dtype, shape, read)


def _entries(flat: _Flat, name: str, pieces: list[Piece], shape: torch.Size) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in flat.states[0].items():
        values: list[Any] = [state.get(key) for state in flat.states]
        if isinstance(value, Tensor) and value.dim() > 0:
            if any(
                not isinstance(v, Tensor) or v.numel() < m.numel() for v, m in zip(values, flat.masters, strict=True)
            ):
                raise CheckpointError(
                    f"state {key!r} of {name} is not an element-wise state; only such state can be converted"
                )
            entries[key] = _concatenated(values, pieces, shape)
        elif any(other != value for other in values):
            raise CheckpointError(f"state {key!r} of {name} is not the same on all ranks: {values}")
        else:
            entries[key] = step_tensor(value) if isinstance(value, Tensor) or key == "step" else value
    return entries


def _weights(files: ZeroFiles, masters: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The model's tensors in the model's order. At stage 3 the parameters are their masters, rounded."""
    model = files.model_states[0]
    module: Mapping[str, Tensor] = model["module"] or {}
    aliases = set(model.get("shared_params") or {})
    frozen = frozen_parameters(files.model_states) if files.stage == 3 else {}
    weights: dict[str, LazyTensor] = {}
    for name, tensor in module.items():
        if not isinstance(tensor, Tensor) or name in aliases:
            continue
        if name in masters and (files.stage == 3 or tensor.dtype == torch.float32):
            weights[name] = masters[name].to(tensor.dtype)
        elif name in frozen:
            weights[name] = frozen[name]
        else:
            weights[name] = LazyTensor.of(tensor)
    for name, master in masters.items():
        weights.setdefault(name, master.to(files.dtype))
    return weights


def frozen_parameters(models: Sequence[Mapping[str, Any]]) -> dict[str, LazyTensor]:
    """The parameters that are not in the optimizer: at stage 3 every rank's model states have a piece of each."""
    found = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].view(-1) for model in models]
        length = math.ceil(shape.numel() / len(models))
        kept = [max(0, min(length, shape.numel() - rank * length)) for rank in range(len(models))]
        found[name] = _concatenated(parts, [Piece(rank, 0, kept[rank]) for rank in range(len(models))], shape)
    return found


def _groups(flats: Sequence[_Flat], settings: list[dict[str, Any]], order: list[str]) -> list[Group]:
    """The parameter groups, with names in the model's order: DeepSpeed may reorder parameters to balance the ranks."""
    position = {name: number for number, name in enumerate(order)}
    names: list[list[str]] = [[] for _ in settings]
    for flat in flats:
        names[flat.group] += flat.pieces
    return [
        Group(sorted(members, key=position.__getitem__), {k: v for k, v in own.items() if k != "params"})
        for members, own in zip(names, settings, strict=True)
    ]

"""Reading DeepSpeed's own checkpoints of ZeRO stages 1, 2 and 3: flat partitions, one file per rank.

Stages 1 and 2 flatten each parameter group and split the flat tensor into equal partitions, one per rank. A partition
may begin and end within a parameter. Stage 3 splits each parameter into equal pieces, the last one padded. A rank's
pieces are consecutive in its flat partition, in the order of ``param_shapes``.

Checkpoints of ``sharding.kind: deepspeed`` are such files, with lightstep's manifest and small state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.formats.files import load_file
from lightstep.checkpoint.formats.state import (
    MASTER,
    Group,
    LazyTensor,
    TrainingState,
    max_step,
    scale_from_deepspeed,
    step_tensor,
)
from lightstep.checkpoint.layout import Manifest
from lightstep.checkpoint.saved import read_state

OPTIMIZER_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
RESERVED = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "lightstep"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts"),
    *("ds_autoep_layers", "universal_checkpoint_info", *COUNTERS),
}
"""Keys of a model-states file that DeepSpeed uses (``lightstep`` is lightstep's). All others are the client state."""


@dataclass(frozen=True)
class Piece:
    """``length`` elements of a rank's flat partition, from ``start`` on."""

    rank: int
    start: int
    length: int


@dataclass
class ZeroFiles:
    """All files of one checkpoint, checked and memory-mapped."""

    folder: Path
    stage: int
    world_size: int
    optimizer_files: list[Path]
    model_states: list[dict[str, Any]]
    optimizer_states: list[dict[str, Any]]
    base_states: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    @property
    def param_shapes(self) -> list[dict[str, torch.Size]]:
        """Names and shapes of each flat partition, in its order."""
        shapes = self.model_states[0]["param_shapes"]
        return list(shapes) if isinstance(shapes, list) else [shapes]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model is trained, from DeepSpeed's configuration."""
        config = self.model_states[0].get("ds_config")
        config = config if isinstance(config, Mapping) else {}
        for section, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
            if isinstance(config.get(section), Mapping) and config[section].get("enabled"):
                return dtype
        return torch.float32

    def partition_size(self, rank: int, number: int, saved: int) -> int:
        """The number of elements of a partition at stages 1 and 2, with the padding at its end.

        Args:
            saved: how many the file has. Only ``BF16_Optimizer`` saves the padding.
        """
        state = self.optimizer_states[rank]
        return saved + (int(state["group_paddings"][number]) if "zero_stage" in state else 0)

    def fp32_partition(self, rank: int, key: str, number: int) -> Tensor:
        """One rank's flat fp32 weights."""
        partition = self.optimizer_states[rank][key][number]
        if not isinstance(partition, Tensor):
            raise CheckpointError(
                f"{self.optimizer_files[rank]} holds no fp32 weights (they were offloaded to a disk); save with "
                "offload_optimizer to the CPU"
            )
        return partition.detach().view(-1)


def open_zero(folder: Path) -> ZeroFiles:
    """Open and check all files in ``folder``.

    Raises:
        CheckpointError: files are missing, damaged or not convertible; the message names them.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    _refuse_other_parallelism(folder, names)
    optimizer_files = {int(m[2]): folder / name for name in names if (m := OPTIMIZER_FILE.fullmatch(name))}
    model_files = {int(m[1] or 0): folder / name for name in names if (m := MODEL_FILE.fullmatch(name))}
    by_rank = any(name.startswith("zero_pp_rank_") and MODEL_FILE.fullmatch(name) for name in names)
    if not model_files:
        raise CheckpointError(f"{folder} is incomplete: mp_rank_00_model_states.pt is missing; {_REMEDY}")
    first = load_file(model_files[min(model_files)])
    _refuse_other_content(folder, first, optimizer_files)
    world_size = int(first["dp_world_size"])
    _check_complete(folder, names, optimizer_files, model_files if by_rank else None, world_size)
    models = [load_file(model_files[rank]) for rank in range(world_size)] if by_rank else [first]
    files = [optimizer_files[rank] for rank in range(world_size)]
    states = [load_file(file)["optimizer_state_dict"] for file in files]
    stage = 3 if by_rank else int(states[0].get("zero_stage", 1))
    opened = ZeroFiles(folder, stage, world_size, files, models, states, _base_states(files, states))
    _check_partition_counts(opened)
    if len(optimizer_files) > world_size:
        opened.notes.append(f"{len(optimizer_files) - world_size} files of ranks beyond {world_size} were left out")
    return opened


_REMEDY = "copy the missing files from the machines that wrote them, or use another checkpoint"


def _refuse_other_parallelism(folder: Path, names: list[str]) -> None:
    foreign = [
        n for n in names if (m := OPTIMIZER_FILE.fullmatch(n) or MODEL_FILE.fullmatch(n)) and int(m[m.lastindex or 0])
    ]
    foreign += [n for n in names if n.startswith(("layer_", "expp_rank_"))]
    if foreign:
        raise CheckpointError(
            f"{folder} was written with tensor, pipeline or expert parallelism ({list_names(foreign)}); only "
            "data-parallel checkpoints are converted"
        )


def _refuse_other_content(folder: Path, model: Mapping[str, Any], optimizer_files: Mapping[int, Path]) -> None:
    if not isinstance(model, dict) or "dp_world_size" not in model or "module" not in model:
        raise CheckpointError(f"{folder} holds no DeepSpeed checkpoint: its model states have no dp_world_size")
    if not optimizer_files and model.get("optimizer") is not None:
        raise CheckpointError(f"{folder} was written without ZeRO (stage 0); stages 1, 2 and 3 are converted")


def _check_complete(
    folder: Path,
    names: list[str],
    optimizer_files: Mapping[int, Path],
    model_files: Mapping[int, Path] | None,
    world_size: int,
) -> None:
    prefix = "bf16_" if any(name.startswith("bf16_zero_pp_rank_") for name in names) else ""
    both = [name for name in names if not name.startswith("bf16_") and f"bf16_{name}" in names]
    if both:
        raise CheckpointError(
            f"{folder} holds two runs: {list_names(both)} is there with and without bf16_; remove one"
        )
    missing = [
        f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        for rank in range(world_size)
        if rank not in optimizer_files
    ]
    if model_files is not None:
        missing += [
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world_size) if rank not in model_files
        ]
    if missing:
        raise CheckpointError(
            f"{folder} is incomplete; missing: {list_names(missing)} (number of ranks: {world_size}); {_REMEDY}"
        )


def _base_states(files: list[Path], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The state dicts of the optimizers that DeepSpeed wraps."""
    bases = []
    for file, state in zip(files, states, strict=True):
        base = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
        if not isinstance(base, dict):
            raise CheckpointError(
                f"{file} has no parameter groups: it was saved with elastic_checkpoint, which leaves out the "
                "hyper-parameters; save once more without it"
            )
        bases.append(base)
    return bases


def _check_partition_counts(files: ZeroFiles) -> None:
    for file, state in zip(files.optimizer_files, files.optimizer_states, strict=True):
        if state.get("ds_zero_partition_groups"):
            raise CheckpointError(f"{file} has experts partitioned over groups of ranks, which are not converted")
        counts = state.get("partition_count", files.world_size)
        if {int(count) for count in (counts if isinstance(counts, list) else [counts])} - {files.world_size}:
            raise CheckpointError(
                f"the number of ranks is {counts} in {file} and {files.world_size} in {files.folder}: files of two "
                "runs are mixed"
            )


def _client_state(model: Mapping[str, Any]) -> dict[str, Any]:
    """What the user passed as ``client_state``, and DeepSpeed's counters under the key ``deepspeed``."""
    counters = {key: model[key] for key in COUNTERS if key in model}
    return {**{key: value for key, value in model.items() if key not in RESERVED}, "deepspeed": counters}


def _scheduler_state(model: Mapping[str, Any], notes: list[str]) -> Any:
    """The scheduler's state, unchanged. A note says if it is the state of one of DeepSpeed's own schedulers."""
    state = model.get("lr_scheduler")
    if isinstance(state, dict) and "last_epoch" not in state:
        notes.append(
            f"the scheduler is DeepSpeed's own ({list_names(state)}); its state was kept, but a scheduler of torch "
            "cannot load it: load_checkpoint leaves such a scheduler as it is"
        )
    return state


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
    state.loss_scale = scale_from_deepspeed(files.optimizer_states[0].get("loss_scaler"))
    state.scheduler = _scheduler_state(model, state.notes)
    state.extra = _client_state(model)
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
    frozen = _frozen_parameters(files.model_states) if files.stage == 3 else {}
    weights: dict[str, LazyTensor] = {}
    for name, tensor in module.items():
        if not isinstance(tensor, Tensor):
            files.notes.append(f"{name} of the model is not a tensor and was left out")
        elif name in aliases:
            continue
        elif name in masters and (files.stage == 3 or tensor.dtype == torch.float32):
            weights[name] = masters[name].to(tensor.dtype)
        elif name in frozen:
            weights[name] = frozen[name]
        else:
            weights[name] = LazyTensor.of(tensor)
    for name, master in masters.items():
        weights.setdefault(name, master.to(files.dtype))
    return weights


def _frozen_parameters(models: Sequence[Mapping[str, Any]]) -> dict[str, LazyTensor]:
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


SECTION = "deepspeed"
"""Of a manifest: DeepSpeed wrote the tensors of this lightstep checkpoint."""


def read_engine_checkpoint(folder: Path, manifest: Manifest) -> TrainingState:
    """The run in such a checkpoint: tensors and loss scale from DeepSpeed's files, all else from lightstep's.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    small = read_state(folder, manifest)
    state = read_zero(open_zero(folder / manifest[SECTION]["tag"]))
    trained = set(state.optimized())
    state.groups = [
        Group([name for name in names if name in trained], dict(settings))
        for names, settings in zip(manifest["groups"], small["optimizer"]["groups"], strict=True)
    ]
    state.scheduler, state.scheduler_class = small.get("scheduler"), manifest.get("scheduler")
    state.extra = {**(small.get("extra") or {}), SECTION: state.extra[SECTION]}
    state.random = list(small.get("random") or [])
    state.optimizer_class = manifest.get("optimizer")
    return state

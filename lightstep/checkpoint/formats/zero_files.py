"""The files of a DeepSpeed ``global_stepN`` folder: opening them, and checking that they belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.formats.safe_load import load_file

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
        return trained_dtype(self.model_states[0].get("ds_config"))

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


def trained_dtype(config: Any) -> torch.dtype:
    """The dtype in which the model is trained, from DeepSpeed's configuration."""
    config = config if isinstance(config, Mapping) else {}
    for section, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if isinstance(config.get(section), Mapping) and config[section].get("enabled"):
            return dtype
    return torch.float32


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
    opened = ZeroFiles(
        folder, 3 if by_rank else _stage(states[0]), world_size, files, models, states, _base_states(files, states)
    )
    _check_partition_counts(opened)
    if len(optimizer_files) > world_size:
        opened.notes.append(f"{len(optimizer_files) - world_size} files of ranks beyond {world_size} were left out")
    return opened


_REMEDY = "copy the missing files from the machines that wrote them, or use another checkpoint"


def _stage(state: Mapping[str, Any]) -> int:
    return int(state.get("zero_stage", 1))


def _refuse_other_parallelism(folder: Path, names: list[str]) -> None:
    foreign = [
        n for n in names if (m := OPTIMIZER_FILE.fullmatch(n) or MODEL_FILE.fullmatch(n)) and int(m[m.lastindex or 0])
    ]
    foreign += [n for n in names if n.startswith(("layer_", "expp_rank_"))]
    if foreign:
        raise CheckpointError(
            f"{folder} was written with tensor, pipeline or expert parallelism ({list_names(foreign)}); only "
            "data-parallel checkpoints are converted. DeepSpeed's ds_to_universal merges tensor parallelism first"
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


def client_state(model: Mapping[str, Any]) -> dict[str, Any]:
    """What the user passed as ``client_state``, and DeepSpeed's counters under the key ``deepspeed``."""
    counters = {key: model[key] for key in COUNTERS if key in model}
    return {**{key: value for key, value in model.items() if key not in RESERVED}, "deepspeed": counters}


def scheduler_state(model: Mapping[str, Any], notes: list[str]) -> Any:
    """The scheduler's state, unchanged. A note says if it is the state of one of DeepSpeed's own schedulers."""
    state = model.get("lr_scheduler")
    if isinstance(state, dict) and "last_epoch" not in state:
        notes.append(
            f"the scheduler is DeepSpeed's own ({list_names(state)}); its state was kept, but a scheduler of torch "
            "cannot load it: load_checkpoint leaves such a scheduler as it is"
        )
    return state

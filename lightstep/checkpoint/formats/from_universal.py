"""Reading DeepSpeed's universal checkpoints: a folder per parameter with a file per state entry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.formats.from_zero import frozen_parameters
from lightstep.checkpoint.formats.safe_load import load_file
from lightstep.checkpoint.formats.scales import from_deepspeed
from lightstep.checkpoint.formats.state import MASTER, Group, LazyTensor, TrainingState, max_step, step_tensor
from lightstep.checkpoint.formats.zero_files import MODEL_FILE, client_state, scheduler_state, trained_dtype

PARAMETERS = "zero"
GLOBAL_STATE = "optimizer_state.pt"
MASTERS = "fp32"


def read_universal(folder: Path) -> TrainingState:
    """The run in ``folder`` (the one with ``zero/`` in it), which DeepSpeed's ``ds_to_universal`` or lightstep wrote.

    Raises:
        CheckpointError: a parameter's folder or one of its files is missing or damaged.
    """
    models = _model_states(folder)
    model = models[0]
    common = load_file(folder / PARAMETERS / GLOBAL_STATE)
    inner = common.get("optimizer_state_dict") or {}
    param_shapes = model["param_shapes"] if isinstance(model["param_shapes"], list) else [model["param_shapes"]]
    shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in param_shapes]
    _check_complete(folder, [name for group in shapes for name in group])
    settings = [dict(group) for group in common.get("param_groups") or inner["param_groups"]]
    groups = _groups(shapes, settings)
    state = TrainingState("DeepSpeed universal", _weights(folder, models, shapes), groups=groups)
    state.aliases = dict(model.get("shared_params") or {})
    section = model.get("lightstep") or {}
    # lightstep writes the common step for DeepSpeed, and each group's own, if it counts steps, beside the group.
    common_step = None if section else (inner.get("state") or {}).get(0, {}).get("step")
    for group, own in zip(groups, settings, strict=True):
        count = own.get("step", common_step)
        for name in group.names:
            state.entries[name] = _entries(folder, name, count, state.weights[name])
    state.loss_scale = section.get("loss_scale") or from_deepspeed(common.get("loss_scaler"))
    state.random, state.modules = list(section.get("random") or []), dict(section.get("modules") or {})
    state.optimizer_class = section.get("optimizer_class")
    state.scheduler = scheduler_state(model, state.notes)
    state.extra = client_state(model)
    state.step = max_step(state.entries.values())
    state.world_size = model.get("dp_world_size")
    return state


def _model_states(folder: Path) -> list[dict[str, Any]]:
    """One rank's model states, which suffice; all ranks' if stage 3 has partitioned frozen parameters."""
    files = sorted(entry for entry in folder.iterdir() if MODEL_FILE.fullmatch(entry.name))
    plain = [file for file in files if file.name.startswith("mp_rank_")]
    if not files:
        raise CheckpointError(
            f"{folder} is incomplete: mp_rank_00_model_states.pt (stages 1 and 2) or "
            "zero_pp_rank_0_mp_rank_00_model_states.pt (stage 3) is missing; it names the parameters"
        )
    if len(plain) > 1:
        raise CheckpointError(
            f"{folder} is of a run with tensor parallelism ({len(plain)} mp_rank files); not converted"
        )
    if plain:
        return [load_file(plain[0])]
    first = load_file(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    if not first.get("frozen_param_shapes"):
        return [first]
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(int(first["dp_world_size"]))]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder} is incomplete: a part of what is frozen is missing, {list_names(missing)}")
    return [load_file(folder / name) for name in names]


def _has_partitioned_frozen_parameters(model: Mapping[str, Any]) -> bool:
    """Whether frozen parameters are partitioned (stage 3): the module then has empty tensors for them."""
    module, shapes = model.get("module") or {}, model.get("frozen_param_shapes") or {}
    return any(name not in module or module[name].shape != shape for name, shape in shapes.items())


def _check_complete(folder: Path, names: list[str]) -> None:
    missing = [name for name in names if not (folder / PARAMETERS / name / f"{MASTERS}.pt").is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} is incomplete: zero/<name>/fp32.pt is missing for {list_names(missing)}; "
            "convert the original again"
        )


def _groups(shapes: list[Any], settings: list[dict[str, Any]]) -> list[Group]:
    """The parameter groups. A group has one flat partition at stages 1 and 2, and may have several at stage 3."""
    owners = {index: number for number, group in enumerate(settings) for index in group.get("params", ())}
    names: list[list[str]] = [[] for _ in settings]
    for flat, members in enumerate(shapes):
        names[owners.get(flat, flat)] += members
    left_out = ("params", "step")
    return [
        Group(own, {k: v for k, v in s.items() if k not in left_out}) for own, s in zip(names, settings, strict=True)
    ]


def _weights(folder: Path, models: list[dict[str, Any]], shapes: list[Any]) -> dict[str, LazyTensor]:
    model = models[0]
    frozen = frozen_parameters(models) if _has_partitioned_frozen_parameters(model) else {}
    aliases = set(model.get("shared_params") or {})
    optimized = {name: shape for group in shapes for name, shape in group.items()}
    weights: dict[str, LazyTensor] = {}
    for name, tensor in (model.get("module") or {}).items():
        if not isinstance(tensor, Tensor) or name in aliases:
            continue
        if name in optimized and (tensor.shape != optimized[name] or tensor.dtype == torch.float32):
            weights[name] = _file(folder, name, MASTERS, optimized[name]).to(tensor.dtype)
        elif name in frozen:
            weights[name] = frozen[name]
        elif name in optimized or tensor.numel() or name in (model.get("buffer_names") or ()):
            weights[name] = LazyTensor.of(tensor)
    for name, shape in optimized.items():
        if name not in weights:
            weights[name] = _file(folder, name, MASTERS, shape).to(trained_dtype(model.get("ds_config")))
    return weights


def _entries(folder: Path, name: str, count: Any, weight: LazyTensor) -> dict[str, Any]:
    entries: dict[str, Any] = {} if count is None else {"step": step_tensor(count)}
    for file in sorted((folder / PARAMETERS / name).glob("*.pt")):
        if file.stem == "step":
            entries["step"] = step_tensor(load_file(file))
        elif file.stem != MASTERS:
            entries[file.stem] = _file(folder, name, file.stem, weight.shape)
        elif weight.dtype != torch.float32:
            entries[MASTER] = _file(folder, name, MASTERS, weight.shape)
    return entries


def _file(folder: Path, name: str, entry: str, shape: torch.Size) -> LazyTensor:
    """One state entry in the parameter's shape. (Entries that DeepSpeed merged from stage 3 are flat in the file.)"""
    path = folder / PARAMETERS / name / f"{entry}.pt"

    def read() -> Tensor:
        content = load_file(path)
        found = content.get("param") if isinstance(content, dict) else content
        if not isinstance(found, Tensor) or found.numel() != shape.numel():
            raise CheckpointError(f"{path} does not hold the {shape.numel()} elements of {name}")
        return found.view(shape)

    return LazyTensor(read().dtype, shape, read)

"""DeepSpeed's universal checkpoints: a folder per parameter, a file per entry, whatever wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.conversion.safe_load import load_file
from lightstep.conversion.scales import from_deepspeed
from lightstep.conversion.state import MASTER, Group, LazyTensor, TrainingState, listed, tensor_step, updates
from lightstep.conversion.zero_files import MODEL_FILE, client_state, trained_dtype
from lightstep.strategy.checkpoint_format import CheckpointError

PARAMETERS = "zero"
GLOBAL_STATE = "optimizer_state.pt"
MASTERS = "fp32"


def read_universal(folder: Path) -> TrainingState:
    """What DeepSpeed's ``ds_to_universal`` or our own writer left in ``folder`` (the one with ``zero/`` in it).

    Raises:
        CheckpointError: a parameter's folder or one of its files is missing or damaged.
    """
    model = _model_states(folder)
    common = load_file(folder / PARAMETERS / GLOBAL_STATE)
    inner = common.get("optimizer_state_dict") or {}
    shapes = model["param_shapes"] if isinstance(model["param_shapes"], list) else [model["param_shapes"]]
    _refuse_missing(folder, [name for group in shapes for name in group])
    settings = [dict(group) for group in common.get("param_groups") or inner["param_groups"]]
    groups = _groups(shapes, settings)
    state = TrainingState("DeepSpeed universal", _weights(folder, model, shapes), groups=groups)
    state.aliases = dict(model.get("shared_params") or {})
    common_step = (inner.get("state") or {}).get(0, {}).get("step")
    for group, own in zip(groups, settings, strict=True):
        count = own.get("step", common_step)
        for name in group.names:
            state.entries[name] = _entries(folder, name, count, state.weights[name])
    ours = model.get("lightstep") or {}
    state.loss_scale = ours.get("loss_scale") or from_deepspeed(common.get("loss_scaler"))
    state.random, state.modules = list(ours.get("random") or []), dict(ours.get("modules") or {})
    state.optimizer_class = ours.get("optimizer_class")
    state.scheduler = model.get("lr_scheduler")
    state.extra = client_state(model)
    state.step = updates(state.entries.values())
    state.world_size = model.get("dp_world_size")
    return state


def _model_states(folder: Path) -> dict[str, Any]:
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
    return dict(load_file(plain[0] if plain else files[0]))


def _refuse_missing(folder: Path, names: list[str]) -> None:
    missing = [name for name in names if not (folder / PARAMETERS / name / f"{MASTERS}.pt").is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} is incomplete: zero/<name>/fp32.pt is missing for {listed(missing)}; convert the original again"
        )


def _groups(shapes: list[Any], settings: list[dict[str, Any]]) -> list[Group]:
    """Flat partitions to parameter groups: one each at stages 1 and 2, perhaps several at stage 3."""
    owners = {index: number for number, group in enumerate(settings) for index in group.get("params", ())}
    names: list[list[str]] = [[] for _ in settings]
    for flat, members in enumerate(shapes):
        names[owners.get(flat, flat)] += members
    left_out = ("params", "step")
    return [
        Group(own, {k: v for k, v in s.items() if k not in left_out}) for own, s in zip(names, settings, strict=True)
    ]


def _weights(folder: Path, model: Mapping[str, Any], shapes: list[Any]) -> dict[str, LazyTensor]:
    aliases, optimized = (
        set(model.get("shared_params") or {}),
        {n: shape for group in shapes for n, shape in group.items()},
    )
    weights: dict[str, LazyTensor] = {}
    for name, tensor in (model.get("module") or {}).items():
        if not isinstance(tensor, Tensor) or name in aliases:
            continue
        if name in optimized and (tensor.shape != optimized[name] or tensor.dtype == torch.float32):
            weights[name] = _file(folder, name, MASTERS).to(tensor.dtype)
        elif name in optimized or tensor.numel() or name in (model.get("buffer_names") or ()):
            weights[name] = LazyTensor.of(tensor)
    for name in optimized:
        if name not in weights:
            weights[name] = _file(folder, name, MASTERS).to(trained_dtype(model.get("ds_config")))
    return weights


def _entries(folder: Path, name: str, count: Any, weight: LazyTensor) -> dict[str, Any]:
    entries: dict[str, Any] = {} if count is None else {"step": tensor_step(count)}
    for file in sorted((folder / PARAMETERS / name).glob("*.pt")):
        if file.stem == "step":
            entries["step"] = tensor_step(load_file(file))
        elif file.stem != MASTERS:
            entries[file.stem] = _file(folder, name, file.stem)
        elif weight.dtype != torch.float32:
            entries[MASTER] = _file(folder, name, MASTERS)
    shape = weight.shape
    for key, value in entries.items():  # merged from stage 3 they are flat
        if key != "step" and value.shape != shape and value.shape.numel() == shape.numel():
            entries[key] = LazyTensor(value.dtype, shape, partial(_viewed, value, shape))
    return entries


def _file(folder: Path, name: str, entry: str) -> LazyTensor:
    path = folder / PARAMETERS / name / f"{entry}.pt"

    def tensor() -> Tensor:
        content = load_file(path)
        found = content.get("param") if isinstance(content, dict) else content
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{path} holds no tensor")
        return found

    opened = tensor()
    return LazyTensor(opened.dtype, opened.shape, tensor)


def _viewed(tensor: LazyTensor, shape: torch.Size) -> Tensor:
    return tensor.read().view(shape)

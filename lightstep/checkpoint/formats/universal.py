"""DeepSpeed's universal checkpoints, read and written, for ``engine.load_checkpoint(DST)`` at any stage and world size.

::

    DST/
        latest_universal                               the name of the folder below
        lightstep-conversion.json                      marks the folder as one that a conversion may replace
        global_step100/
            zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
            zero/optimizer_state.pt                    parameter groups, loss scale
            mp_rank_00_model_states.pt                 for stages 1 and 2: weights, scheduler, counters, extra
            zero_pp_rank_0_mp_rank_00_model_states.pt  for stage 3: the same without the trained weights
"""

from __future__ import annotations

import json
import pickle
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.formats.files import load_file, save_lazily
from lightstep.checkpoint.formats.lightstep import compact
from lightstep.checkpoint.formats.state import (
    MASTER,
    SCALERS,
    DynamicLossScaler,
    Group,
    LazyTensor,
    TrainingState,
    is_dynamic,
    max_step,
    read_step,
    scale_from_deepspeed,
    scale_to_deepspeed,
    step_tensor,
)
from lightstep.checkpoint.formats.zero import (
    COUNTERS,
    MODEL_FILE,
    RESERVED,
    client_state,
    frozen_parameters,
    scheduler_state,
    trained_dtype,
)
from lightstep.checkpoint.storage import FolderKind, LocalStorage, sync_files, was_replaced, write_file
from lightstep.version import __version__

PARAMETERS = "zero"
GLOBAL_STATE = "optimizer_state.pt"
MASTERS = "fp32"


def read_universal(folder: Path) -> TrainingState:
    """The run in ``folder`` (the one with ``zero/`` in it), which DeepSpeed's ``ds_to_universal`` or lightstep wrote.

    Raises:
        CheckpointError: a parameter's folder or one of its files is missing or damaged.
    """
    models = _read_model_states(folder)
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
    state.loss_scale = section.get("loss_scale") or scale_from_deepspeed(common.get("loss_scaler"))
    state.random, state.modules = list(section.get("random") or []), dict(section.get("modules") or {})
    state.optimizer_class = section.get("optimizer_class")
    state.scheduler = scheduler_state(model, state.notes)
    state.extra = client_state(model)
    state.step = max_step(state.entries.values())
    state.world_size = model.get("dp_world_size")
    return state


def _read_model_states(folder: Path) -> list[dict[str, Any]]:
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


MARK = "lightstep-conversion.json"
DEEPSPEED = "0.19.8"
"""The DeepSpeed version whose layout is written. Older ones refuse a checkpoint without a version."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def write_universal(state: TrainingState, path: Path) -> None:
    """Write the run in DeepSpeed's universal format. Host memory grows by what reading one tensor takes.

    Raises:
        CheckpointError: the format cannot hold the state, something that no conversion wrote is at ``path``, ...
    """
    steps = _check(state)
    if len(steps) > 1:
        state.notes.append(
            f"at stage 3 DeepSpeed gives {len(steps)} parameter groups the settings and steps of the first; "
            "the page on converting checkpoints shows how to put them back"
        )
    count = _counters(state)["global_steps"]
    tag = f"global_step{count}"
    with LocalStorage().new_folder(path, CONVERSION) as temporary:
        folder = temporary / tag
        for group, step in zip(state.groups or (), steps, strict=True):
            _write_group(state, group, step, folder / PARAMETERS)
        _save(_global_state(state, steps, count), folder / PARAMETERS / GLOBAL_STATE)
        _write_model_states(state, folder)
        write_file(temporary / "latest_universal", tag.encode())
        written = list(temporary.rglob("*"))
        files = sorted(entry.relative_to(temporary).as_posix() for entry in written if entry.is_file())
        mark = {"lightstep": __version__, "to": "deepspeed-universal", "from": state.format, "files": files}
        write_file(temporary / MARK, json.dumps(mark, indent=1).encode())
        sync_files(temporary)
        LocalStorage().commit(temporary, path, CONVERSION)


def is_conversion(path: Path) -> bool:
    """Whether :func:`write_universal` wrote the folder."""
    return (path / MARK).is_file()


def _own_files(path: Path) -> set[str]:
    """The mark, and the files that it lists."""
    return {MARK, *json.loads((path / MARK).read_text())["files"]}


CONVERSION = FolderKind(
    "a folder that a conversion wrote", is_ours=is_conversion, is_complete=was_replaced, own_files=_own_files
)


def _check(state: TrainingState) -> list[int | None]:
    """The step count of each group.

    Raises:
        CheckpointError: the format cannot hold the state.
    """
    if state.groups is None:
        raise CheckpointError("it holds no optimizer, and DeepSpeed's universal format is one of optimizer state")
    unusable = [name for name in state.weights if "/" in name or "\\" in name or name in ("", ".", "..")]
    if unusable:
        raise CheckpointError(
            f"{list_names(unusable)} cannot be the name of a folder, which the universal format needs"
        )
    if any(not group.names for group in state.groups):
        raise CheckpointError("a parameter group is empty, which DeepSpeed refuses; remove it from the optimizer")
    for name, entries in state.entries.items():
        for key, value in entries.items():
            if key != "step" and (not isinstance(value, LazyTensor) or value.shape != state.weights[name].shape):
                raise CheckpointError(
                    f"state {key!r} of {name} is not an element-wise tensor; the universal format holds only such "
                    "tensors, and step"
                )
    return [_step(state, group) for group in state.groups]


def _step(state: TrainingState, group: Group) -> int | None:
    steps = {name: step for name in group.names if (step := read_step(state.entries.get(name, {}))) is not None}
    if len(set(steps.values())) > 1:
        least, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        raise CheckpointError(
            f"{least} has had {steps[least]} updates and {most} {steps[most]}, and DeepSpeed counts the steps of a "
            "whole parameter group; put parameters that are updated at other times into a group of their own"
        )
    never = [name for name in group.names if not state.entries.get(name, {}).keys() - {MASTER}]
    if steps and never:
        state.notes.append(
            f"{list_names(never)} was never updated; DeepSpeed counts its steps with its group's, "
            "and its moments are zeros"
        )
    return next(iter(steps.values()), None)


def _write_group(state: TrainingState, group: Group, step: int | None, folder: Path) -> None:
    """Write a group's entries. All parameters get the same ones, as DeepSpeed expects; missing ones are zeros."""
    dtypes: dict[str, torch.dtype] = {}
    for name in group.names:
        dtypes |= {k: _widened(v.dtype) for k, v in state.entries.get(name, {}).items() if k not in (MASTER, "step")}
    if not dtypes and "betas" in group.settings:
        dtypes, step = dict.fromkeys(_MOMENTS, torch.float32), step or 0
    for name in group.names:
        own, weight = state.entries.get(name, {}), state.weights[name]
        _save_entry(compact(state.master(name).to(torch.float32).read), folder / name / f"{MASTERS}.pt")
        for key, dtype in dtypes.items():
            read = compact(own[key].to(dtype).read) if key in own else partial(torch.zeros, weight.shape, dtype=dtype)
            _save_entry(read, folder / name / f"{key}.pt")
        if step is not None:
            _save(torch.tensor(float(step)), folder / name / "step.pt")


def _widened(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16: DeepSpeed's moments are fp32."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _save_entry(read: Callable[[], Tensor], path: Path) -> None:
    """Read and save an entry. No reference to the tensor remains, so it is freed before the next one is read."""
    _save({"param": read()}, path)


def _global_state(state: TrainingState, steps: list[int | None], count: int) -> dict[str, Any]:
    """The content of ``optimizer_state.pt``, which every rank reads. DeepSpeed's FusedAdam counts steps per group."""
    assert state.groups is not None
    groups: list[dict[str, Any]] = [{**group.settings, "params": [i]} for i, group in enumerate(state.groups)]
    for group, step in zip(groups, steps, strict=True):
        if step is not None:
            group["step"] = step
    step = max((step for step in steps if step is not None), default=0)
    common: dict[str, Any] = {"ds_version": DEEPSPEED, "overflow": False, "param_groups": groups}
    common["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": groups}
    if is_dynamic(state.loss_scale):
        assert state.loss_scale is not None
        common |= {"dynamic_loss_scale": True, "loss_scaler": scale_to_deepspeed(state.loss_scale, count)}
    return common


def _counters(state: TrainingState) -> dict[str, int]:
    """Steps and samples: DeepSpeed's own counters if it wrote the source, else the optimizer's updates.

    A run that has continued since, with the ``extra`` that it had loaded, has made more updates than they say.
    """
    known = state.extra.get("deepspeed")
    counters = {"global_steps": state.step or 0, "global_samples": 0, "skipped_steps": 0}
    if isinstance(known, dict):
        counters |= {key: int(known[key]) for key in COUNTERS if key in known}
    steps = max(counters["global_steps"], (state.step or 0) + counters["skipped_steps"])
    samples = counters["global_samples"] * steps // max(counters["global_steps"], 1)
    return {**counters, "global_steps": steps, "global_samples": samples}


def _write_model_states(state: TrainingState, folder: Path) -> None:
    optimized = set(state.optimized())
    common = _model_states(state)
    untrained = {name: weight for name, weight in state.weights.items() if name not in optimized}
    for file, weights in (
        ("mp_rank_00_model_states.pt", state.weights),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", untrained),
    ):
        module = dict(weights)
        module |= {alias: module[name] for alias, name in state.aliases.items() if name in module}
        save_lazily({**common, "module": module}, folder / file)


def _model_states(state: TrainingState) -> dict[str, Any]:
    assert state.groups is not None
    optimized = set(state.optimized())
    clash = sorted(state.extra.keys() & RESERVED)
    if clash:
        raise CheckpointError(f"extra has {list_names(clash)}, which DeepSpeed uses itself; rename it before saving")
    return {
        **{key: value for key, value in state.extra.items() if key != "deepspeed"},
        "buffer_names": [name for name in state.weights if name not in optimized],
        "param_shapes": [{name: state.weights[name].shape for name in group.names} for group in state.groups],
        "shared_params": dict(state.aliases),
        "lr_scheduler": state.scheduler,
        "optimizer": None,
        "dp_world_size": state.world_size or 1,
        "mp_world_size": 1,
        "ds_config": _config(state),
        "ds_version": DEEPSPEED,
        **_counters(state),
        "lightstep": {
            "param_groups": [group.settings for group in state.groups],
            "loss_scale": state.loss_scale,
            "random": state.random,
            "modules": state.modules,
            "optimizer_class": state.optimizer_class,
        },
    }


def _config(state: TrainingState) -> dict[str, Any]:
    """The part of DeepSpeed's configuration that says in which dtype the parameters are trained."""
    dtypes = {state.weights[name].dtype for name in state.optimized()}
    return {"bf16": {"enabled": torch.bfloat16 in dtypes}, "fp16": {"enabled": torch.float16 in dtypes}}


class _Pickler(pickle._Pickler):
    """Writes the name of DeepSpeed's class to the file without importing DeepSpeed."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is not DynamicLossScaler:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(f"c{SCALERS}\n{obj.__name__}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


_PICKLE_MODULE = types.SimpleNamespace(Pickler=_Pickler, __name__="pickle")


def _save(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path, pickle_module=_PICKLE_MODULE)

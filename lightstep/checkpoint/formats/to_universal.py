"""Writing DeepSpeed's universal format, for ``engine.load_checkpoint(DST)`` at any stage and world size.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.formats import scales
from lightstep.checkpoint.formats.from_universal import GLOBAL_STATE, MASTERS, PARAMETERS
from lightstep.checkpoint.formats.lazy_save import save_lazily
from lightstep.checkpoint.formats.state import MASTER, Group, LazyTensor, TrainingState, read_step
from lightstep.checkpoint.formats.to_lightstep import compact
from lightstep.checkpoint.formats.zero_files import COUNTERS, RESERVED
from lightstep.checkpoint.storage import FolderKind, LocalStorage, sync_files, was_replaced, write_file
from lightstep.version import __version__

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
    """The files that the mark lists. Old versions listed none, and wrote only to the ``global_step`` folder."""
    files = json.loads((path / MARK).read_text()).get("files")
    if files is None:
        files = [e.relative_to(path).as_posix() for e in path.glob("global_step*/**/*") if e.is_file()]
    return {MARK, "latest_universal", *files}


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
    if scales.is_dynamic(state.loss_scale):
        assert state.loss_scale is not None
        common |= {"dynamic_loss_scale": True, "loss_scaler": scales.to_deepspeed(state.loss_scale, count)}
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
        if obj is not scales.DynamicLossScaler:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(f"c{scales.SCALERS}\n{obj.__name__}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


_PICKLE_MODULE = types.SimpleNamespace(Pickler=_Pickler, __name__="pickle")


def _save(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path, pickle_module=_PICKLE_MODULE)

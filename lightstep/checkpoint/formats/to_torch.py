"""Writing one file for a plain torch training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.formats.lazy_save import save_lazily
from lightstep.checkpoint.formats.safe_load import load_file
from lightstep.checkpoint.formats.scales import is_dynamic, to_torch
from lightstep.checkpoint.formats.state import MASTER, TrainingState
from lightstep.checkpoint.storage import new_file
from lightstep.version import __version__

MARK = "lightstep"


def write_torch(state: TrainingState, path: Path) -> None:
    """Write the run as a file of ``torch.save``. Host memory grows by what reading one tensor takes.

    Raises:
        CheckpointError: something that no conversion wrote is at ``path``, ...
    """
    content = _content(state)
    with new_file(path, is_conversion, "a file that a conversion wrote") as temporary:
        save_lazily(content, temporary)


def is_conversion(path: Path) -> bool:
    """Whether :func:`write_torch` wrote the file."""
    try:
        content = load_file(path) if path.is_file() else None
    except CheckpointError:
        return False
    return isinstance(content, dict) and isinstance(content.get(MARK), dict)


def _content(state: TrainingState) -> dict[str, Any]:
    """The file's content. The model's weights are the masters, for a loop with fp32 weights."""
    weights = {name: state.master(name) for name in state.weights}
    content: dict[str, Any] = {
        MARK: {"version": __version__, "converted_from": state.format, "trained_in": _dtypes(state)},
        "model": {**weights, **{alias: weights[name] for alias, name in state.aliases.items() if name in weights}},
    }
    if state.groups is not None:
        content["optimizer"] = _optimizer(state)
        content["optimizer_class"] = state.optimizer_class
    content["scheduler"] = state.scheduler
    content["scaler"] = to_torch(state.loss_scale) if state.loss_scale and is_dynamic(state.loss_scale) else None
    content["loss_scale"] = state.loss_scale
    content |= {"extra": state.extra, "random": state.random, "modules": state.modules, "step": state.step}
    content["world_size"] = state.world_size
    return content


def _dtypes(state: TrainingState) -> dict[str, str]:
    """The dtypes in which parameters are trained, if the file has their masters."""
    return {
        name: str(weight.dtype).removeprefix("torch.")
        for name, weight in state.weights.items()
        if state.master(name).dtype != weight.dtype
    }


def _optimizer(state: TrainingState) -> dict[str, Any]:
    """The optimizer's state dict in torch's layout, with names in addition to the indices."""
    assert state.groups is not None
    index = {name: number for number, name in enumerate(state.optimized())}
    entries = {
        index[name]: {key: value for key, value in state.entries[name].items() if key != MASTER}
        for name in index
        if name in state.entries
    }
    groups = [
        {**group.settings, "params": [index[name] for name in group.names], "param_names": list(group.names)}
        for group in state.groups
    ]
    return {"state": {number: own for number, own in entries.items() if own}, "param_groups": groups}

"""Describing a checkpoint's content in rows of text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lightstep.checkpoint.errors import checkpoint_errors, list_names
from lightstep.checkpoint.formats.names import read_naming
from lightstep.checkpoint.formats.read import read_checkpoint
from lightstep.checkpoint.formats.state import LazyTensor, TrainingState
from lightstep.checkpoint.storage import location

_HYPERPARAMETERS = ("lr", "betas", "momentum", "eps", "weight_decay")


def describe_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    names: str | os.PathLike[str] | None = None,
) -> list[tuple[str, str]]:
    """``(what, text)`` rows. Every file is opened and checked, but only step counts are read.

    Args:
        model: as for :func:`~lightstep.checkpoint.formats.convert.convert_checkpoint`.
        names: likewise.

    Raises:
        CheckpointError: there is no checkpoint in a known format, or it is incomplete; the message says why.
    """
    with checkpoint_errors(f"{path} was not read"):
        return list(_rows(read_checkpoint(location(path).resolve(), read_naming(model, names))))


def _rows(state: TrainingState) -> Iterable[tuple[str, str]]:
    yield "format", state.format
    yield "complete", "yes: every file is there (verify reads their bytes)"
    yield "step", "unknown" if state.step is None else str(state.step)
    yield "written by", "unknown" if state.world_size is None else f"{state.world_size} rank{_s(state.world_size)}"
    optimized = set(state.optimized())
    yield "trained parameters", _tensors(w for n, w in state.weights.items() if n in optimized)
    yield "frozen parameters, buffers", _tensors(w for n, w in state.weights.items() if n not in optimized)
    if state.base is not None:
        yield "frozen base", f"{state.base['name'] or 'without a name'}, not in the checkpoint"
    if state.aliases:
        yield "tied", list_names(f"{alias} = {name}" for alias, name in state.aliases.items())
    entries: dict[str, list[Any]] = {}
    for own in state.entries.values():
        for key, value in own.items():
            entries.setdefault(key, []).append(value)
    for key, values in entries.items():
        yield f"state: {key}", _entry(values)
    if state.groups is None:
        yield "optimizer", "none"
    for number, group in enumerate(state.groups or ()):
        known = {key: group.settings[key] for key in _HYPERPARAMETERS if key in group.settings}
        settings = ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in known.items()
        )
        yield f"group {number}", f"{len(group.names)} parameter{_s(len(group.names))}: {settings}"
    yield "loss scale", _loss_scale(state.loss_scale)
    yield "scheduler", "none" if state.scheduler is None else list_names(state.scheduler)
    yield "extra", list_names(map(str, state.extra)) or "none"
    for note in state.notes:
        yield "note", note


def _tensors(tensors: Iterable[LazyTensor]) -> str:
    tensors = list(tensors)
    if not tensors:
        return "none"
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    numbers = sum(tensor.shape.numel() for tensor in tensors)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
    return f"{len(tensors)} ({kinds}), {numbers:,} numbers, {_size(sum(t.nbytes for t in tensors))}"


def _entry(values: list[Any]) -> str:
    tensors = [value for value in values if isinstance(value, LazyTensor)]
    if not tensors or all(not tensor.shape for tensor in tensors):
        found = sorted({int(v.read()) if isinstance(v, LazyTensor) else v for v in values}, key=str)
        return f"{len(values)} ({list_names(map(str, found))})"
    return _tensors(tensors)


def _loss_scale(scale: dict[str, Any] | None) -> str:
    if scale is None:
        return "none"
    if "good_steps" not in scale:
        return f"{scale['scale']:g}, constant"
    return (
        f"{scale['scale']:g}, dynamic: {scale['good_steps']} good steps, "
        f"{scale['hysteresis_left']} overflow{_s(scale['hysteresis_left'])} left"
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _s(count: int) -> str:
    return "" if count == 1 else "s"

"""Converting a checkpoint from one format to another."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.formats.names import read_naming
from lightstep.checkpoint.formats.read import read_checkpoint
from lightstep.checkpoint.formats.scales import is_dynamic
from lightstep.checkpoint.formats.state import TrainingState
from lightstep.checkpoint.formats.to_lightstep import write_lightstep
from lightstep.checkpoint.formats.to_torch import write_torch
from lightstep.checkpoint.formats.to_universal import write_universal
from lightstep.checkpoint.small_state import check_loadable
from lightstep.checkpoint.storage import location
from lightstep.config import DynamicScale, LossScaleConfig
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.paths import local_path

WRITERS: dict[str, Callable[[TrainingState, Path], None]] = {
    "lightstep": write_lightstep,
    "torch": write_torch,
    "deepspeed-universal": write_universal,
}


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    model: str | os.PathLike[str] | None = None,
    names: str | os.PathLike[str] | None = None,
    loss_scale: LossScaleConfig | None = None,
) -> TrainingState:
    """Convert a checkpoint. The destination appears when it is complete.

    Runs in one process, without a process group. Everything is checked before anything is written. Host memory grows by
    a few tensors.

    Args:
        source: a checkpoint in any format of :data:`~lightstep.checkpoint.formats.read.READABLE`, or the URL of one of
            lightstep's.
        destination: a folder, or a file for ``"torch"``; for ``"lightstep"`` it may be a URL. An existing one is
            replaced if it is a checkpoint of lightstep (for ``"lightstep"``) or a conversion wrote it; otherwise it is
            refused.
        to: ``"lightstep"``, ``"torch"`` or ``"deepspeed-universal"``.
        model: a Hugging Face folder or ``config.json``, for sources that number their parameters but do not name them.
        names: a JSON file with the parameters' names in the optimizer's order, for the same sources.
        loss_scale: ``precision.loss_scale`` of the run's strategy. If it is dynamic, its settings are written to
            formats that keep them with the scale's state.

    Returns:
        What was converted. Its ``notes`` say what the destination cannot hold.

    Raises:
        CheckpointError: the source cannot be used, the destination format cannot hold it, or something else is at
            ``destination``.
        ValueError: ``to`` is not a known format, or its destination is a URL.
    """
    if to not in WRITERS:
        raise ValueError(f"{to!r} is not a format to convert to; allowed: {', '.join(WRITERS)}")
    if to != "lightstep":
        local_path(destination, f"{to} is written to local paths; write to one, and copy it")
    with checkpoint_errors(f"{source} was not converted"):
        source_path, destination_path = location(source).resolve(), location(destination).resolve()
        _refuse_overlap(source_path, destination_path)
        state = read_checkpoint(source_path, read_naming(model, names))
        _drop_unloadable(state)
    if loss_scale is not None:
        _set_scale_settings(state, loss_scale)
    if to != "lightstep" and is_dynamic(state.loss_scale) and "settings" not in (state.loss_scale or {}):
        state.notes.append(
            "the settings of the dynamic loss scale are not in the checkpoint; lightstep's defaults were written: pass "
            "--strategy with the run's strategy if its own differ"
        )
    with checkpoint_errors(f"{destination} was not written"):
        WRITERS[to](state, destination_path)
    return state


def _refuse_overlap(source: Path, destination: Path) -> None:
    """Raise if one contains the other: replacing the destination must not change the source."""
    if any(f"{one}/".startswith(f"{other}/") for one, other in ((source, destination), (destination, source))):
        raise CheckpointError(f"{destination} and {source} lie in each other; choose a destination outside the source")


def _drop_unloadable(state: TrainingState) -> None:
    """Drop what a weights-only load would refuse.

    Raises:
        CheckpointError: it is a hyper-parameter, which cannot be dropped.
    """
    for number, group in enumerate(state.groups or ()):
        group.settings = plain_numbers(group.settings)
        try:
            check_loadable(f"param_groups[{number}]", group.settings)
        except TypeError as error:
            raise CheckpointError(str(error)) from error
    for key in list(state.extra):
        if not _is_loadable(state, f"extra[{key!r}]", state.extra[key]):
            del state.extra[key]
    if state.scheduler is not None and not _is_loadable(state, "the scheduler's state", state.scheduler):
        state.scheduler = None


def _is_loadable(state: TrainingState, what: str, value: object) -> bool:
    """Whether a weights-only load accepts ``value``. If not, a note says that it was left out."""
    try:
        check_loadable(what, value)
    except TypeError as error:
        state.notes.append(f"{what} was left out: {error}")
        return False
    return True


def _set_scale_settings(state: TrainingState, scale: LossScaleConfig) -> None:
    if not is_dynamic(state.loss_scale):
        state.notes.append("the checkpoint has no dynamic loss scale: the strategy's settings were not used")
        return
    if not isinstance(scale, DynamicScale):
        raise CheckpointError("the loss scale of the checkpoint is dynamic, that of the strategy is not")
    assert state.loss_scale is not None
    state.loss_scale = {**state.loss_scale, "settings": scale.model_dump(exclude={"kind", "init_scale"})}

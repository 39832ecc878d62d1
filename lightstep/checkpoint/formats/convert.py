"""Converting a checkpoint: recognising its format, reading it, and writing lightstep's own; describing it in rows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, NotFoundError, checkpoint_errors, list_names
from lightstep.checkpoint.formats.dcp import METADATA, read_dcp
from lightstep.checkpoint.formats.files import load_file
from lightstep.checkpoint.formats.lightrft import is_lightrft, rank_files, read_lightrft
from lightstep.checkpoint.formats.names import Naming, read_naming
from lightstep.checkpoint.formats.plain_torch import (
    TRAINER_STATE,
    add_trainer_files,
    is_trainer_checkpoint,
    read_torch_file,
    read_trainer_checkpoint,
    write_torch,
)
from lightstep.checkpoint.formats.state import Group, LazyTensor, TrainingState, is_dynamic, max_step
from lightstep.checkpoint.formats.zero import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    SECTION,
    open_zero,
    read_engine_checkpoint,
    read_zero,
)
from lightstep.checkpoint.layout import CHECKPOINT, MANIFEST, find_checkpoint, latest_checkpoint, unreplaced
from lightstep.checkpoint.run_state import average_key, entry_key, stored_entries
from lightstep.checkpoint.save import finish_checkpoint
from lightstep.checkpoint.saved import SavedCheckpoint, check_loadable
from lightstep.checkpoint.storage import UrlPath, location, storage_for
from lightstep.checkpoint.tensors import Source, full_shard, write_tensors
from lightstep.config import DynamicScale, LossScaleConfig
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.paths import local_path


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
        source: a checkpoint in any format of :data:`READABLE`, or the URL of one of lightstep's.
        destination: a folder, or a file for ``"torch"``; for ``"lightstep"`` it may be a URL. An existing one is
            replaced if it is a checkpoint of lightstep (for ``"lightstep"``) or a conversion wrote it; otherwise it is
            refused.
        to: ``"lightstep"`` or ``"torch"``.
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


READABLE = (
    "lightstep checkpoints, DeepSpeed's ZeRO checkpoints, files of torch.save with a model and an optimizer, "
    "transformers Trainer's checkpoint-N folders, folders of torch.distributed.checkpoint, and LightRFT's optim_states"
)


def read_checkpoint(path: Path, naming: Naming | None = None) -> TrainingState:
    """The run in a checkpoint of any known format. Every file is opened; tensors are read later.

    Raises:
        CheckpointError: there is no checkpoint in a known format, or files are missing, damaged, or of different runs.
    """
    state = _read(path, naming or Naming())
    state.check()
    return state


def _read(path: Path, naming: Naming) -> TrainingState:
    if path.is_file():
        content = load_file(path)
        return read_lightrft(path, naming) if is_lightrft(content) else read_torch_file(path, naming)
    if not path.is_dir() or (path / MANIFEST).is_file():
        whole, manifest = find_checkpoint(path)
        return read_engine_checkpoint(whole, manifest) if manifest.get(SECTION) else read_lightstep(whole)
    if isinstance(path, UrlPath):
        raise NotFoundError(f"{path} holds no checkpoint of lightstep; copy one of another format to a local folder")
    folder = _tagged(path)
    if any(OPTIMIZER_FILE.fullmatch(entry.name) or MODEL_FILE.fullmatch(entry.name) for entry in folder.iterdir()):
        state = read_zero(open_zero(folder))
        if (folder.parent / TRAINER_STATE).is_file():
            add_trainer_files(state, folder.parent)
        return state
    if rank_files(path):
        return read_lightrft(path, naming)
    if (path / METADATA).is_file():
        return read_dcp(path)
    if is_trainer_checkpoint(path):
        return read_trainer_checkpoint(path, naming)
    if (newest := latest_checkpoint(path)) is not None:
        raise NotFoundError(f"{path} is a folder of checkpoints; the newest is {newest}")
    raise NotFoundError(f"{path} holds no checkpoint in a known format. Known are {READABLE}")


def _tagged(path: Path) -> Path:
    """The folder that DeepSpeed's ``latest`` names."""
    pointer = path / "latest"
    if not pointer.is_file():
        return path
    folder = path / pointer.read_text(encoding="utf-8").strip()
    if not folder.is_dir() or folder.parent != path:
        raise CheckpointError(f"{pointer} names {folder.name!r}, which is not there; pass another folder")
    return folder


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


# -- lightstep's own checkpoints ---------------------------------------------------------------------------------------


def read_lightstep(folder: Path) -> TrainingState:
    """The run in a checkpoint that ``strategy.save_checkpoint`` wrote on any number of ranks.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    saved = SavedCheckpoint.read(folder)
    weights = {name: _lazy(saved, f"model.{name}") for name in _in_model_order(saved)}
    aliases = {alias: name for alias, name in saved.aliases.items() if name in weights}
    state = TrainingState("lightstep", weights, aliases=aliases, base=saved.base)
    if state.base is not None:
        state.notes.append(
            f"it holds only what was trained; the frozen base ({state.base['name'] or 'without a name'}) is not in it"
        )
    if any(key.startswith(average_key("")) for key in saved.index):
        state.notes.append("it also holds averages of the weights, which are not converted; export_model writes them")
    if saved.optimizer is not None:
        _read_optimizer(state, saved)
    state.scheduler, state.scheduler_class = saved.state.get("scheduler"), saved.manifest.get("scheduler")
    state.extra = dict(saved.state.get("extra") or {})
    state.random = list(saved.state.get("random") or [])
    state.modules = dict(saved.state.get("modules") or {})
    state.world_size = saved.manifest.get("world_size")
    state.optimizer_class = saved.manifest.get("optimizer")
    state.step = max_step(state.entries.values())
    return state


def _lazy(saved: SavedCheckpoint, key: str) -> LazyTensor:
    """A tensor of ``saved``. Reading it raises if another process has replaced the checkpoint in the meantime."""
    tensor = LazyTensor.stored(saved.data, key, saved.index[key])

    def read() -> Tensor:
        with unreplaced(saved.folder, saved.manifest):
            return tensor.load()

    return LazyTensor(tensor.dtype, tensor.shape, read)


def _in_model_order(saved: SavedCheckpoint) -> list[str]:
    """The names of the model's tensors, in the order in which the manifest lists them."""
    listed = [name for name in saved.manifest.get("tensors") or () if f"model.{name}" in saved.index]
    return list(dict.fromkeys([*listed, *sorted(saved.model_names())]))


def _read_optimizer(state: TrainingState, saved: SavedCheckpoint) -> None:
    assert saved.optimizer is not None
    settings = saved.optimizer["groups"]
    base = saved.base_shapes
    state.groups = [
        Group([name for name in names if name not in base], dict(own))
        for names, own in zip(saved.groups, settings, strict=True)
    ]
    values: dict[str, dict[str, Any]] = saved.optimizer["values"]
    stored = stored_entries(saved.index)
    for name in state.optimized():
        entries = {key: _lazy(saved, entry_key(name, key)) for key in sorted(stored.get(name, []))}
        if found := {**values.get(name, {}), **entries}:
            state.entries[name] = found
    state.loss_scale = saved.optimizer.get("loss_scale")


def write_lightstep(state: TrainingState, path: Path) -> None:
    """Write the run as a lightstep checkpoint.

    Host memory grows by what reading one tensor takes, and by 128 MiB of tensors, or two tensors if these are larger.

    Raises:
        CheckpointError: the disk is full, something else than a checkpoint is at ``path``, ...
    """
    with storage_for(path).new_folder(path, CHECKPOINT) as temporary:
        index = write_tensors(temporary, _sources(state))
        finish_checkpoint(temporary, path, index, _small_state(state), _manifest(state), state.world_size or 1)
        storage_for(path).commit(temporary, path, CHECKPOINT)


def _sources(state: TrainingState) -> list[Source]:
    sources = [_source(f"model.{name}", weight) for name, weight in state.weights.items()]
    for name in state.optimized():
        for key, value in state.entries.get(name, {}).items():
            if isinstance(value, LazyTensor):
                sources.append(_source(entry_key(name, key), value))
    return sources


def _source(key: str, tensor: LazyTensor) -> Source:
    return Source(key, full_shard(tensor.shape), tensor.dtype, tensor.read)


def _small_state(state: TrainingState) -> dict[str, Any]:
    small = {"extra": state.extra, "scheduler": state.scheduler, "modules": state.modules, "random": state.random}
    if state.groups is not None:
        plain = {
            name: {key: value for key, value in entries.items() if not isinstance(value, LazyTensor)}
            for name, entries in state.entries.items()
        }
        small["optimizer"] = {
            "groups": [group.settings for group in state.groups],
            "loss_scale": state.loss_scale,
            "values": {name: values for name, values in plain.items() if values},
        }
    return small


def _manifest(state: TrainingState) -> dict[str, Any]:
    return {
        "scheduler": state.scheduler_class,
        "optimizer": state.optimizer_class,
        "groups": None if state.groups is None else [group.names for group in state.groups],
        "aliases": state.aliases,
        "converted_from": state.format,
        **({} if state.base is None else {"base": state.base}),
    }


WRITERS: dict[str, Callable[[TrainingState, Path], None]] = {
    "lightstep": write_lightstep,
    "torch": write_torch,
}

"""Folders of ``torch.distributed.checkpoint``, as ``dcp.save`` of ``get_state_dict`` leaves them.

``.metadata`` is a pickle. It is read by an unpickler that knows nothing but the classes of such an index.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightstep.checkpoint.errors import CheckpointError, error_text, list_names
from lightstep.checkpoint.formats.from_lightstep import lazy
from lightstep.checkpoint.formats.state import Group, LazyTensor, TrainingState, step_tensor, updates
from lightstep.checkpoint.tensors import Chunk, StoredTensor
from lightstep.optimizer.param_groups import clean_name

METADATA = ".metadata"
_MODEL_KEYS, _OPTIMIZER_KEYS = ("model", "app.model"), ("optimizer", "optim", "app.optimizer", "app.optim")


def read_dcp(folder: Path) -> TrainingState:
    """Model and optimizer saved with ``get_state_dict``: ``{"model": ..., "optimizer": ...}``, or the model's alone.

    An optimizer in a folder of its own below (``optim_states``, ``optimizer``, ``optim``) is found too.

    Raises:
        CheckpointError: a file is missing or shorter than the index says.
    """
    values = _values(folder)
    model, optimizer = _part(values, _MODEL_KEYS), _part(values, _OPTIMIZER_KEYS)
    if not model:
        model = {key: value for key, value in values.items() if not _part({key: value}, _OPTIMIZER_KEYS)}
    for below in ("optim_states", "optimizer", "optim"):
        if not optimizer and (folder / below / METADATA).is_file():
            optimizer = _values(folder / below)
    weights = {clean_name(key): value for key, value in model.items() if isinstance(value, LazyTensor)}
    state = TrainingState("torch.distributed.checkpoint", weights)
    if optimizer:
        _add_optimizer(state, optimizer)
    return state


def _part(values: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """What lies under the first of ``prefixes`` that is there, without it."""
    for prefix in prefixes:
        found = {key.removeprefix(f"{prefix}."): v for key, v in values.items() if key.startswith(f"{prefix}.")}
        if found:
            return found
    return {}


def _values(folder: Path) -> dict[str, Any]:
    """Tensors, lazily, and plain values by their dotted keys."""
    metadata = _read_metadata(folder / METADATA)
    _check_files(folder, metadata)
    values: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            values[key] = lazy(folder, key, {key: _stored(key, stored, metadata.storage_data)})
        else:
            place = metadata.storage_data[MetadataIndex(key)]
            with (folder / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                values[key] = torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)
    return values


def _stored(key: str, stored: TensorStorageMetadata, places: Any) -> StoredTensor:
    found = [places[MetadataIndex(key, chunk.offsets)] for chunk in stored.chunks]
    chunks = tuple(
        Chunk(chunk.offsets, chunk.sizes, place.relative_path, place.offset, place.length)
        for chunk, place in zip(stored.chunks, found, strict=True)
    )
    return StoredTensor(stored.properties.dtype, torch.Size(stored.size), chunks)


def _check_files(folder: Path, metadata: Any) -> None:
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        if PurePosixPath(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{folder / METADATA} names {place.relative_path!r}, a file outside the folder")
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    missing = [name for name in ends if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} is incomplete: a rank's part is missing, {list_names(sorted(missing))}")
    for name, end in ends.items():
        if (size := (folder / name).stat().st_size) < end:
            raise CheckpointError(f"{folder / name} is truncated: it has {size} bytes of {end}")


class _IndexUnpickler(pickle.Unpickler):
    """Makes nothing but what an index consists of."""

    def find_class(self, module: str, name: str) -> Any:
        own = getattr(index_classes, name, None) if module == index_classes.__name__ else None
        if isinstance(own, type) and own.__module__ == module:
            return own
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        known = _ALLOWED.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")
        return known


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "Path"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        if not metadata.state_dict_metadata:
            raise ValueError("it lists nothing")
        return metadata
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error_text(error)}") from error


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _add_optimizer(state: TrainingState, values: dict[str, Any]) -> None:
    """``state.<name>.<entry>`` and ``param_groups``, as a list or flattened by parameter."""
    settings: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        kind, _, rest = key.partition(".")
        if kind == "state":
            name, _, entry = rest.rpartition(".")
            state.entries.setdefault(clean_name(name), {})[entry] = step_tensor(value) if entry == "step" else value
        elif kind == "param_groups" and rest.split(".")[0].isdigit():
            number, _, setting = rest.partition(".")
            _add_setting(settings.setdefault(int(number), {}), setting, value)
        elif kind == "param_groups":
            name, _, setting = rest.rpartition(".")
            by_name.setdefault(clean_name(name), {})[setting] = value
    if by_name:
        state.groups = _group_by_settings(by_name)
    else:
        state.groups = [
            Group([clean_name(name) for name in own.pop("params")], own) for _, own in sorted(settings.items())
        ]
    state.step = updates(state.entries.values())


def _add_setting(settings: dict[str, Any], key: str, value: Any) -> None:
    """A list may have been taken apart: ``betas.0``, ``params.3``."""
    value = value.read() if isinstance(value, LazyTensor) else value
    name, _, number = key.partition(".")
    if number:
        settings.setdefault(name, []).append(value)
    else:
        settings[name] = value


def _group_by_settings(by_name: dict[str, dict[str, Any]]) -> list[Group]:
    """Parameters with the same settings form a group."""
    groups: list[Group] = []
    for name, settings in by_name.items():
        plain = {k: v.read() if isinstance(v, LazyTensor) else v for k, v in settings.items() if k != "params"}
        same = next((group for group in groups if repr(group.settings) == repr(plain)), None)
        if same is None:
            groups.append(Group([name], plain))
        else:
            same.names.append(name)
    return groups

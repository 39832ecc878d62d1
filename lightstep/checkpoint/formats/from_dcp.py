"""Reading folders of ``torch.distributed.checkpoint`` that ``dcp.save`` wrote from ``get_state_dict``.

``.metadata`` is a pickle. The unpickler that reads it accepts only the classes that such an index needs.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightstep.checkpoint.errors import CheckpointError, error_text, list_names
from lightstep.checkpoint.formats.from_lightstep import lazy
from lightstep.checkpoint.formats.safe_load import enum_member
from lightstep.checkpoint.formats.state import Group, LazyTensor, TrainingState, max_step, step_tensor
from lightstep.checkpoint.optimizer_content import same_settings
from lightstep.checkpoint.tensors import Chunk, StoredTensor
from lightstep.optimizer.param_groups import clean_name

METADATA = ".metadata"
_LISTED = re.compile(r"param_groups\.\d+\.params(\.\d+)?")
"""A key of groups that are a list. Flattened ones have a parameter's name in place of the number."""
_MODEL_KEYS, _OPTIMIZER_KEYS = ("model", "app.model"), ("optimizer", "optim", "app.optimizer", "app.optim")


def read_dcp(folder: Path) -> TrainingState:
    """The run in a folder: ``{"model": ..., "optimizer": ...}``, or a model's state dict alone.

    The optimizer may also be in a folder below: ``optim_states``, ``optimizer`` or ``optim``.

    Raises:
        CheckpointError: a file is missing, or shorter than the index says.
    """
    values, ordered = _values(folder)
    model, optimizer = _part(values, _MODEL_KEYS), _part(values, _OPTIMIZER_KEYS)
    if not model:
        model = {key: value for key, value in values.items() if not _part({key: value}, _OPTIMIZER_KEYS)}
    for name in ("optim_states", "optimizer", "optim"):
        if not optimizer and (folder / name / METADATA).is_file():
            optimizer, _ = _values(folder / name)
    weights = {clean_name(key): value for key, value in model.items() if isinstance(value, LazyTensor)}
    state = TrainingState("torch.distributed.checkpoint", weights, ordered=ordered)
    if optimizer:
        _add_optimizer(state, optimizer)
    return state


def _part(values: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """The values under the first of ``prefixes`` that has any; the keys are without the prefix."""
    for prefix in prefixes:
        found = {key.removeprefix(f"{prefix}."): v for key, v in values.items() if key.startswith(f"{prefix}.")}
        if found:
            return found
    return {}


def _values(folder: Path) -> tuple[dict[str, Any], bool]:
    """Lazy tensors and plain values by their dotted keys, and whether tensors are in the order of the state dict.

    They are if the first rank wrote a part of each. ``dcp.save`` lists the tensors of one rank after those of another,
    and divides what all ranks have among them.
    """
    metadata = _read_metadata(folder / METADATA)
    _check_files(folder, metadata)
    ordered = True
    values: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            found = _stored(key, stored, metadata.storage_data)
            ordered = ordered and any(chunk.file.startswith("__0_") for chunk in found.chunks)
            values[key] = lazy(folder, key, {key: found})
        else:
            location = metadata.storage_data[MetadataIndex(key)]
            with (folder / location.relative_path).open("rb") as stream:
                stream.seek(location.offset)
                values[key] = torch.load(io.BytesIO(stream.read(location.length)), weights_only=True)
    return values, ordered


def _stored(key: str, stored: TensorStorageMetadata, locations: Any) -> StoredTensor:
    found = [locations[MetadataIndex(key, chunk.offsets)] for chunk in stored.chunks]
    chunks = tuple(
        Chunk(chunk.offsets, chunk.sizes, location.relative_path, location.offset, location.length)
        for chunk, location in zip(stored.chunks, found, strict=True)
    )
    return StoredTensor(stored.properties.dtype, torch.Size(stored.size), chunks)


def _check_files(folder: Path, metadata: Any) -> None:
    """Raise :class:`CheckpointError` if a file is missing, too short, or outside the folder."""
    ends: dict[str, int] = {}
    for location in metadata.storage_data.values():
        name = location.relative_path
        if PurePosixPath(name).name != name:
            raise CheckpointError(f"{folder / METADATA} names {name!r}, a file outside the folder")
        ends[name] = max(ends.get(name, 0), location.offset + location.length)
    missing = [name for name in ends if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} is incomplete: a rank's part is missing, {list_names(sorted(missing))}")
    for name, end in ends.items():
        if (size := (folder / name).stat().st_size) < end:
            raise CheckpointError(f"{folder / name} is truncated: it has {size} bytes of {end}")


class _IndexUnpickler(pickle.Unpickler):
    """Accepts only the classes that an index needs."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(index_classes, name, None) if module == index_classes.__name__ else None
        if isinstance(found, type) and found.__module__ == module:
            return found
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in an index")
        return allowed


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "getattr"): enum_member,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "Path"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        if not metadata.state_dict_metadata:
            raise ValueError("it is empty")
        return metadata
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error_text(error)}") from error


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _add_optimizer(state: TrainingState, values: dict[str, Any]) -> None:
    """Add state from ``state.<name>.<entry>``, and groups from ``param_groups``, a list or flattened by parameter."""
    settings: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    listed = any(_LISTED.match(key) for key in values)
    for key, value in values.items():
        kind, _, rest = key.partition(".")
        if kind == "state":
            name, _, entry = rest.rpartition(".")
            state.entries.setdefault(clean_name(name), {})[entry] = step_tensor(value) if entry == "step" else value
        elif kind == "param_groups" and listed:
            number, _, setting = rest.partition(".")
            _add_setting(settings.setdefault(int(number), {}), setting, value)
        elif kind == "param_groups":
            name, _, setting = rest.rpartition(".")
            by_name.setdefault(clean_name(name), {})[setting] = value
    if by_name:
        state.groups = _group_by_settings(by_name)
    else:
        listed_groups = [_with_lists(group) for _, group in sorted(settings.items())]
        state.groups = [Group([clean_name(name) for name in group.pop("params")], group) for group in listed_groups]
    state.step = max_step(state.entries.values())


def _add_setting(settings: dict[str, Any], key: str, value: Any) -> None:
    """Add a hyper-parameter. Lists may be flattened, in any order: ``betas.0``, ``params.3``."""
    value = value.read() if isinstance(value, LazyTensor) else value
    name, _, number = key.partition(".")
    if number:
        settings.setdefault(name, {})[int(number)] = value
    else:
        settings[name] = value


def _with_lists(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with flattened lists as lists again."""
    return {
        key: [value[number] for number in sorted(value)] if isinstance(value, dict) else value
        for key, value in settings.items()
    }


def _group_by_settings(by_name: dict[str, dict[str, Any]]) -> list[Group]:
    """Groups of the parameters that have the same hyper-parameters."""
    groups: list[Group] = []
    for name, settings in by_name.items():
        plain = {k: v.read() if isinstance(v, LazyTensor) else v for k, v in settings.items() if k != "params"}
        same = next((group for group in groups if same_settings(group.settings, plain)), None)
        if same is None:
            groups.append(Group([name], plain))
        else:
            same.names.append(name)
    return groups

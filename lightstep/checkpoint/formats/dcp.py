"""Reading folders of ``torch.distributed.checkpoint`` that ``dcp.save`` wrote from ``get_state_dict``.

``.metadata`` is a pickle. The unpickler that reads it accepts only the classes that such an index needs.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.utils._pytree import tree_leaves, tree_map_only

from lightstep.checkpoint.errors import CheckpointError, error_text, list_names
from lightstep.checkpoint.formats.files import enum_member, load_file
from lightstep.checkpoint.formats.plain_torch import MODEL_KEYS, OPTIMIZER_KEYS, SCALER_KEYS, SCHEDULER_KEYS, add_rest
from lightstep.checkpoint.formats.state import Group, LazyTensor, TrainingState, max_step, step_tensor
from lightstep.checkpoint.run_state import same_settings
from lightstep.checkpoint.tensors import Chunk, StoredTensor
from lightstep.optimizer.param_groups import clean_name

METADATA = ".metadata"
_LISTED = re.compile(r"param_groups\.\d+\.params(\.\d+)?")
"""A key of groups that are a list. Flattened ones have a parameter's name in place of the number."""
_MODEL_KEYS = (*MODEL_KEYS, "app.model")
_OPTIMIZER_KEYS = (*OPTIMIZER_KEYS, "app.optimizer", "app.optim")
_NEVER_WEIGHTS = ("train_state", "lr_scheduler", "dataloader")
"""What torchtitan saves beside its model, whose names have no prefix."""
_SECTIONS = {*_NEVER_WEIGHTS, *SCHEDULER_KEYS, *SCALER_KEYS, "extra"}
"""First parts of keys that stand for a dictionary even if the index does not say that they were in one."""
_LARGEST_EXTRA = 2**30
"""Bytes of tensors that are kept as a part of ``extra``, which is in memory as a whole."""

_Values = dict[str, Any]
"""Key in the folder -> lazy tensor or plain value."""


def read_dcp(folder: Path) -> TrainingState:
    """The run in a folder: ``{"model": ..., "optimizer": ...}``, or a model's state dict alone.

    The optimizer may also be in a folder below: ``optim_states``, ``optimizer`` or ``optim``. A ``scheduler`` and a
    ``scaler`` are the run's; everything else is its ``extra``.

    Raises:
        CheckpointError: a file is missing, or shorter than the index says; or there is no model.
    """
    values, paths, ordered = _values(folder)
    model, optimizer, rest = _divided(values, paths)
    for name in ("optim_states", "optimizer", "optim"):
        if not optimizer and (folder / name / METADATA).is_file():
            optimizer, _, _ = _values(folder / name)
    weights = {clean_name(key): value for key, value in model.items() if isinstance(value, LazyTensor)}
    if not weights:
        found = list_names(dict.fromkeys(str(_path(key, paths)[0]) for key in values))
        raise CheckpointError(f"{folder} has no model: it has {found}, and model or a flat state dict is needed")
    state = TrainingState("torch.distributed.checkpoint", weights, ordered=ordered)
    state.notes += [f"{key} of the model is not a tensor and was left out" for key in model.keys() - weights.keys()]
    if optimizer:
        _add_optimizer(state, optimizer)
    _add_rest(state, unflatten_state_dict(rest, {key: _path(key, paths) for key in rest}))
    return state


def _divided(values: _Values, paths: _Paths) -> tuple[_Values, _Values, _Values]:
    """The values of the model and of the optimizer, without the prefixes of their keys, and all others."""
    optimizer, rest = _part(values, _OPTIMIZER_KEYS)
    model, others = _part(rest, _MODEL_KEYS)
    may_be_weights = {key: value for key, value in rest.items() if _may_be_weight(key, value)}
    flat = {key: value for key, value in may_be_weights.items() if len(paths.get(key, ())) == 1}
    if not model or (flat.keys() - others.keys() and flat.keys() & others.keys()):  # "model" may be a module's name
        model = flat or {key: value for key, value in may_be_weights.items() if key not in paths}
        others = {key: value for key, value in rest.items() if key not in model}
    return model, optimizer, others


def _may_be_weight(key: str, value: Any) -> bool:
    return isinstance(value, LazyTensor) and key.partition(".")[0] not in _NEVER_WEIGHTS


def _part(values: _Values, prefixes: tuple[str, ...]) -> tuple[_Values, _Values]:
    """The values under the first of ``prefixes`` that has any, without the prefix, and all others."""
    for prefix in prefixes:
        found = {key: value for key, value in values.items() if key.startswith(f"{prefix}.")}
        if found:
            others = {key: value for key, value in values.items() if key not in found}
            return {key.removeprefix(f"{prefix}."): value for key, value in found.items()}, others
    return {}, values


_Paths = Mapping[str, tuple[str | int, ...]]
"""Key -> where its value was in the nested state dict, if the index says so. One element: at the top."""


def _path(key: str, paths: _Paths) -> tuple[str | int, ...]:
    path = paths.get(key, (key,))
    return tuple(key.split(".")) if len(path) == 1 and key.partition(".")[0] in _SECTIONS else path


def _values(folder: Path) -> tuple[_Values, _Paths, bool]:
    """Lazy tensors and plain values, where they were, and whether tensors are in the order of the state dict.

    They are if the first rank wrote a part of each. ``dcp.save`` lists the tensors of one rank after those of another,
    and divides what all ranks have among them.
    """
    metadata = _read_metadata(folder / METADATA)
    _check_files(folder, metadata)
    ordered = True
    values: _Values = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            found = _stored(key, stored, metadata.storage_data)
            ordered = ordered and any(chunk.file.startswith("__0_") for chunk in found.chunks)
            values[key] = LazyTensor.stored(folder, key, found)
        else:
            location = metadata.storage_data[MetadataIndex(key)]
            file = folder / location.relative_path
            with file.open("rb") as stream:
                stream.seek(location.offset)
                values[key] = load_file(file, stream.read(location.length))
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return values, {key: path for key, path in paths.items() if isinstance(path, tuple) and path}, ordered


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


# -- what is neither of the model nor of the optimizer -----------------------------------------------------------------


def _add_rest(state: TrainingState, rest: dict[str, Any]) -> None:
    """Add the scheduler, the scaler and ``extra``. A note names sections that are too large for it."""
    kept = {}
    for key, value in rest.items():
        nbytes = sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, LazyTensor))
        if nbytes > _LARGEST_EXTRA:
            state.notes.append(f"{key} was left out: it has {nbytes / 2**30:.1f} GiB of tensors, and is not the model")
        else:
            kept[key] = tree_map_only(LazyTensor, LazyTensor.read, value)
    add_rest(state, kept)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _add_optimizer(state: TrainingState, values: dict[str, Any]) -> None:
    """Add state from ``state.<name>.<entry>``, and groups from ``param_groups``, a list or flattened by parameter."""
    by_number: dict[str, Any] = {}
    by_name: dict[str, dict[str, Any]] = {}
    listed = any(_LISTED.match(key) for key in values)
    for key, value in values.items():
        kind, _, rest = key.partition(".")
        if kind == "state":
            name, _, entry = rest.rpartition(".")
            state.entries.setdefault(clean_name(name), {})[entry] = step_tensor(value) if entry == "step" else value
        elif kind == "param_groups" and listed:
            by_number[key] = value.read() if isinstance(value, LazyTensor) else value
        elif kind == "param_groups":
            name, _, setting = rest.rpartition(".")
            by_name.setdefault(clean_name(name), {})[setting] = value
    if by_name:
        state.groups = _group_by_settings(by_name)
    else:
        # Lists may be flattened: param_groups.0.betas.0
        paths = {key: tuple(int(part) if part.isdecimal() else part for part in key.split(".")) for key in by_number}
        groups: list[Any] = unflatten_state_dict(by_number, paths).get("param_groups", [])
        state.groups = [Group([clean_name(name) for name in group.pop("params")], group) for group in groups]
    state.step = max_step(state.entries.values())


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

"""A complete checkpoint on disk, without its tensors: the manifest, the index, and the small state.

The small state is everything but the tensors of model and optimizer: ``extra``, the scheduler's state,
hyper-parameters, the loss scale, random states and optimizer state entries that are plain numbers. It is one
``torch.save`` file. A save checks that it can be loaded with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightstep.checkpoint.errors import DamagedError, error_text
from lightstep.checkpoint.layout import (
    INDEX,
    STATE,
    Manifest,
    absent_files,
    data_folder,
    read_checked,
    read_manifest,
    refuse_absent_parts,
    refuse_engine_files,
    unreplaced,
)
from lightstep.checkpoint.storage import write_file
from lightstep.checkpoint.tensors import Index, file_sizes, parse_index, read_whole, without_files
from lightstep.crc32 import crc32


def check_loadable(what: str, value: Any) -> None:
    """Check that ``torch.load(weights_only=True)`` can load ``value``.

    Raises:
        TypeError: it cannot; the message names the innermost key: ``extra['sampler'] is a Sampler ...``.
    """
    if _is_loadable(value):
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for key, part in inner:
        check_loadable(f"{what}[{key!r}]", part)
    kind = type(value)
    raise TypeError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}, which a weights-only load refuses; "
        "save plain numbers, strings, lists, dicts and tensors"
    )


def fingerprint(value: Any) -> int:
    """A checksum of what would be saved, by which ranks compare a value, wherever its tensors are."""
    buffer = io.BytesIO()
    torch.save(tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, value), buffer)
    return crc32(buffer.getvalue())


def write_state(folder: Path, state: dict[str, Any]) -> tuple[int, int]:
    """Write the file, and return its size and CRC-32."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return write_file(folder / STATE, buffer.getvalue())


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read the file.

    Raises:
        DamagedError: the file is damaged, or holds objects that a weights-only load refuses.
    """
    content = read_checked(folder, manifest, STATE)
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own message recommends weights_only=False
        raise DamagedError(
            f"{folder / STATE} cannot be read: it is damaged, or holds more than plain values and tensors"
        ) from error
    except Exception as error:
        raise DamagedError(f"{folder / STATE} cannot be read: {error_text(error)}") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{folder / STATE} cannot be read: it holds a {type(state).__name__}")
    return state


def _is_loadable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


# -- random states -----------------------------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's, torch's and the current accelerator's generators, as plain values."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    name, keys, position, has_gauss, gauss = cast(tuple[Any, ...], numpy.random.get_state())
    states["numpy"] = [str(name), keys.tolist(), int(position), int(has_gauss), float(gauss)]
    if (device := _accelerator()) is not None:
        states["accelerator"] = {"type": device, "state": torch.get_device_module(device).get_rng_state()}
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore what :func:`random_states` returned, except for generators that this machine does not have."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))
    saved = states.get("accelerator")
    if saved is not None and saved["type"] == _accelerator():
        torch.get_device_module(saved["type"]).set_rng_state(saved["state"])


def _accelerator() -> str | None:
    """The accelerator's device type if this process has initialised it: the check must not initialise it."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    assert device is not None
    is_initialized = getattr(torch.get_device_module(device.type), "is_initialized", lambda: True)
    return device.type if is_initialized() else None


def read_index(folder: Path, manifest: Manifest) -> Index:
    """The index of the tensors. Of a save in parts it has what is in this folder.

    Raises:
        DamagedError: it is damaged, or names bytes that its files do not have.
    """
    index, data = parse_index(read_checked(folder, manifest, INDEX)), manifest.get("folder")
    for name, size in file_sizes(index).items():
        if size > manifest["files"].get(f"{data}/{name}" if data else name, 0):
            file = data_folder(folder, manifest) / INDEX
            raise DamagedError(f"{file} cannot be read: {name} has fewer bytes than the {size} that it names")
    absent = absent_files(folder, manifest)
    return {key: without_files(stored, absent) for key, stored in index.items()} if absent else index


@dataclass
class SavedCheckpoint:
    """Manifest, index and small state of one save. The tensors stay on disk."""

    folder: Path
    manifest: Manifest
    index: Index
    state: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, manifest: Manifest | None = None) -> SavedCheckpoint:
        """Read the checkpoint in ``folder``.

        Args:
            manifest: the folder's, if it has been read already, by a caller who may need only one part of the save.

        Raises:
            CheckpointError: the checkpoint is incomplete or damaged, or was replaced in the meantime.
        """
        if manifest is None:
            manifest = read_manifest(folder)
            refuse_absent_parts(folder, manifest)
        refuse_engine_files(folder, manifest)
        with unreplaced(folder, manifest):
            return cls(folder, manifest, read_index(folder, manifest), read_state(folder, manifest))

    @property
    def data(self) -> Path:
        """The folder with the tensors."""
        return data_folder(self.folder, self.manifest)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors -> the name under which the tensor is saved."""
        return dict(self.manifest.get("aliases") or {})

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """Hyper-parameters, loss scale and plain state values; ``None`` if no optimizer was saved."""
        return self.state.get("optimizer")

    @property
    def groups(self) -> list[list[str]]:
        """Parameter names of each parameter group."""
        return list(self.manifest.get("groups") or [])

    @property
    def base(self) -> dict[str, Any] | None:
        """``name`` and ``shapes`` of the frozen base if it was left out; ``None`` if everything was saved."""
        return self.manifest.get("base")

    @property
    def base_shapes(self) -> dict[str, list[int]]:
        """The shapes of the frozen base by name; empty if everything was saved."""
        return dict((self.base or {}).get("shapes") or {})

    def model_names(self) -> set[str]:
        """The names of the model's tensors that were saved."""
        return {key.removeprefix("model.") for key in self.index if key.startswith("model.")}

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors on the host by name; tied names share one. The calling thread reads them."""
        found = {
            name: read_whole(self.data, f"model.{name}", self.index[f"model.{name}"]) for name in self.model_names()
        }
        return found | {alias: found[name] for alias, name in self.aliases.items() if name in found}

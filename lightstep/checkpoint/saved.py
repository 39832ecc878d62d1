"""A complete checkpoint on disk, without its tensors: the manifest, the index, and the small state; and whether every
byte is as it was written.

The small state is everything but the tensors of model and optimizer: ``extra``, the scheduler's state,
hyper-parameters, the loss scale, random states and optimizer state entries that are plain numbers. It is one
``torch.save`` file. A save checks that it can be loaded with ``weights_only=True``.

The Trainer and accelerate have files beside a checkpoint. Their sizes and checksums are in a list, which is written
last::

    checkpoint-100/
        lightstep/              a checkpoint
        model.safetensors       files of another library
        trainer_state.json
        lightstep-files.json    the list of these files; it also names the save that lightstep/ is from

Files that are not in the list are the user's.
"""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightstep.checkpoint.background import workers
from lightstep.checkpoint.errors import DamagedError, NotFoundError, error_text, unless_damaged
from lightstep.checkpoint.layout import (
    FORMAT,
    INDEX,
    MANIFEST,
    STATE,
    Manifest,
    absent_files,
    check_file,
    check_files,
    check_sizes,
    checkpoints_in,
    data_folder,
    find_checkpoint,
    holds_checkpoint,
    is_weights_only,
    read_checked,
    read_manifest,
    read_sealed,
    refuse_absent_parts,
    refuse_engine_files,
    seal,
    size_and_checksum,
    unreplaced,
)
from lightstep.checkpoint.storage import location, sync, write_file
from lightstep.checkpoint.tensors import Index, file_sizes, parse_index, read_chunk, read_whole, without_files
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
        """The model's tensors on the host by name; tied names share one."""
        found = {
            name: read_whole(self.data, f"model.{name}", self.index[f"model.{name}"]) for name in self.model_names()
        }
        return found | {alias: found[name] for alias, name in self.aliases.items() if name in found}


# -- verifying: every byte is read and compared with its checksum; no model is needed ----------------------------------

CHECKPOINT = "lightstep"
"""The folder of the checkpoint beside the other library's files."""

FILE_LIST = "lightstep-files.json"


def write_file_list(folder: Path, names: Iterable[str]) -> None:
    """Write the list of these files in ``folder``, relative to it, at once. It replaces an older list."""
    found = {name: size_and_checksum(folder / name) for name in sorted(names)}
    content = {
        "format": FORMAT,
        "save_id": _save_id(folder) if holds_checkpoint(folder / CHECKPOINT) else None,
        "files": {name: size for name, (size, _) in found.items()},
        "checksums": {name: checksum for name, (_, checksum) in found.items()},
    }
    temporary = folder / f".{FILE_LIST}"
    write_file(temporary, seal(content))
    os.replace(temporary, folder / FILE_LIST)
    sync(folder)


def read_file_list(folder: Path) -> Manifest | None:
    """The list, in the form of a checkpoint's manifest; ``None`` if the folder has none: the user may remove it.

    Raises:
        DamagedError: the list is damaged, files in it are missing or have other sizes, or the checkpoint is of another
            save.
        UnreadableError: its format is newer, or the network or a disk failed.
    """
    listed = read_sealed(folder / FILE_LIST, lambda content: (dict(content["files"]), dict(content["checksums"])))
    if listed is None:
        return None
    check_sizes(folder, listed)
    if listed.get("save_id") is not None:
        if not holds_checkpoint(folder / CHECKPOINT):
            raise DamagedError(f"{folder} is not a complete checkpoint: {CHECKPOINT} is missing")
        if _save_id(folder) != listed["save_id"]:
            raise DamagedError(f"{folder / CHECKPOINT} and the files beside it are of two saves; one was interrupted")
    return listed


def check_listed_files(folder: Path) -> bool:
    """Compare the files with the list. ``False`` if the folder has none.

    Raises:
        DamagedError: a file is damaged; the message names the first one.
        UnreadableError: a format is newer, or the network or a disk failed.
    """
    try:
        listed = read_file_list(folder)
        check_files(folder, listed or {}, (listed or {"files": ()})["files"])
    except DamagedError as error:
        raise DamagedError(f"{error}. If you changed it yourself, remove {folder / FILE_LIST}") from error
    return listed is not None


def _save_id(folder: Path) -> str | None:
    return find_checkpoint(folder / CHECKPOINT)[1].get("save_id")


_READERS = 4


@dataclass
class Verified:
    """The result for one checkpoint."""

    path: Path
    damage: list[str] = field(default_factory=list)
    """One sentence for each damaged file or tensor."""
    files: int = 0
    nbytes: int = 0


def verify_checkpoints(path: str | os.PathLike[str]) -> list[Verified]:
    """Verify a checkpoint, or every checkpoint in a folder. Checkpoints of the Trainer and of accelerate count too.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    root = location(path).resolve()
    if root.is_file():
        raise NotFoundError(f"{path} is a file; a folder is needed (lightstep checkpoint inspect reads other formats)")
    if _is_checkpoint(root) or not root.exists():
        return [_verify_any(root)]
    found = [verify(each) for each in checkpoints_in(root)]
    verified = {each.path for each in found}
    others = [entry for entry in root.iterdir() if entry not in verified and entry.is_dir() and _is_checkpoint(entry)]
    if not found and not others:
        raise NotFoundError(f"{path} holds no checkpoint of lightstep")
    return [*found, *map(_verify_any, sorted(others, key=lambda entry: (len(entry.name), entry.name), reverse=True))]


def _is_checkpoint(path: Path) -> bool:
    return any((path / name).exists() for name in (MANIFEST, FILE_LIST, f"{CHECKPOINT}/{MANIFEST}"))


def _verify_any(path: Path) -> Verified:
    """Verify a checkpoint, with the files beside it if they have a list."""
    if (path / FILE_LIST).exists():
        return _verify_listed(path)
    return verify(path if (path / MANIFEST).exists() or not path.exists() else path / CHECKPOINT)


def _verify_listed(path: Path) -> Verified:
    found = Verified(path)
    try:
        listed = read_file_list(path)
        assert listed is not None
        found.files, found.nbytes = len(listed["files"]) + 1, sum(listed["files"].values())
        found.damage = _damage(partial(check_file, path, listed, name) for name in listed["checksums"])
    except DamagedError as error:
        found.damage.append(str(error))
    if (path / CHECKPOINT).exists():
        inner = verify(path / CHECKPOINT)
        found.damage += inner.damage
        found.files, found.nbytes = found.files + inner.files, found.nbytes + inner.nbytes
    return found


def verify(path: Path) -> Verified:
    """Verify the checkpoint at ``path``, or the one that a crash left under a temporary name.

    Raises:
        CheckpointError: there is none, a newer version wrote it, or the network or a disk failed.
    """
    found = Verified(path)
    try:
        folder, manifest = find_checkpoint(path)
        absent = absent_files(folder, manifest)
        sizes = [size for name, size in manifest["files"].items() if name not in absent]
        found.files, found.nbytes = len(sizes) + 1, sum(sizes)
        found.damage = _damage(_checks(folder, manifest))
    except DamagedError as error:
        found.damage.append(str(error))
    return found


def is_undamaged(path: Path) -> bool:
    """Whether :func:`verify` finds a checkpoint without damage."""
    found = unless_damaged(partial(verify, path))
    return found is not None and not found.damage


def newest_undamaged_before(path: Path, with_state: bool) -> Path | None:
    """The newest undamaged checkpoint next to ``path`` that was saved before it.

    Args:
        with_state: skip checkpoints that were saved with ``weights_only``.
    """
    checkpoints = checkpoints_in(path.parent)
    older = checkpoints[checkpoints.index(path) + 1 :] if path in checkpoints else checkpoints
    return next((each for each in older if is_undamaged(each) and not (with_state and is_weights_only(each))), None)


def _checks(folder: Path, manifest: Manifest) -> Iterator[Callable[[], object]]:
    """One call per file and tensor chunk, which raises :class:`DamagedError` if it is damaged."""
    for name in manifest["checksums"]:
        yield partial(check_file, folder, manifest, name)
    data = data_folder(folder, manifest)
    if (data / INDEX).exists():
        for key, stored in read_index(folder, manifest).items():
            for chunk in stored.chunks:
                yield partial(read_chunk, data, key, chunk)


def _damage(checks: Iterable[Callable[[], object]]) -> list[str]:
    """One sentence for each check that found damage."""
    with workers(_READERS) as submit:
        results = [submit(partial(_damage_in, check)) for check in checks]
        return [text for result in results if (text := result.result()) is not None]


def _damage_in(check: Callable[[], object]) -> str | None:
    try:
        check()
    except DamagedError as error:
        return str(error)
    return None

"""What a checkpoint is on disk: one folder, whole or not there.

::

    step-100/
        lightstep.json    the manifest: versions, parameter names, sizes of all files; written last, it means "whole"
        tensors.json      where every piece of every tensor lies in the .distcp files
        state.pt          everything that is no tensor of model or optimizer: torch.save, loaded with weights_only=True
        __0_0_0.distcp    tensors, written by torch.distributed.checkpoint, each rank its own shards
        .metadata         torch's own index, for torch's own tools; never read here, because it is a pickle

What sharding.kind deepspeed writes has DeepSpeed's own files in place of the tensors (``lightstep/deepspeed``).

The manifest binds the files: it has an id of the save, so that a reader who finds the same manifest before and after
has read files of one save. Its ``counter`` says which checkpoint of a folder was saved last, whatever the clock says.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightstep.checkpoint.errors import CheckpointError, error_text
from lightstep.checkpoint.storage import FolderKind, final_name, leftovers, remove_own, sync, write_file

MANIFEST = "lightstep.json"
INDEX = "tensors.json"
STATE = "state.pt"
TORCHS_INDEX = ".metadata"
FORMAT = 1

Manifest = dict[str, Any]


# -- finding -----------------------------------------------------------------------------------------------------------


def find_checkpoint(path: Path) -> Path:
    """The whole checkpoint that ``path`` stands for: itself, or what a crash between two renames left beside it.

    Raises:
        CheckpointError: there is none, or it is incomplete.
    """
    if not path.exists():
        newest = _newest(leftovers(path))
        if newest is None:
            raise CheckpointError(f"{path} does not exist")
        return newest
    if not (path / MANIFEST).exists() and (newest := latest_checkpoint(path)) is not None:
        raise CheckpointError(f"{path} is a folder of checkpoints; the newest is {newest}")
    read_manifest(path)
    return path


def holds_checkpoint(path: Path) -> bool:
    """Whether a checkpoint is there, whole or damaged (loading it says what is wrong), or one that a crash left."""
    return path.exists() or _newest(leftovers(path)) is not None


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint directly in ``folder`` that was saved last, or ``None``.

    The order is that of the saves, which each checkpoint knows; the clock has no part in it, but for checkpoints of
    before there was such an order. Other processes may save and remove checkpoints meanwhile.
    """
    root = Path(folder)
    entries = _folders(root)
    newest = _newest(
        entry for entry in entries if final_name(entry) == entry.name or not (root / final_name(entry)).exists()
    )
    return None if newest is None else root / final_name(newest)


def is_complete(folder: Path) -> bool:
    """Whether the manifest is there and every file it lists has the size it lists."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _folders(root: Path) -> list[Path]:
    try:
        return [entry for entry in root.iterdir() if entry.is_dir()]
    except OSError:  # it is not there, or not any more
        return []


def _newest(folders: Iterable[Path]) -> Path | None:
    """Of the whole ones."""
    found = dict(_whole(folders))
    return max(found, key=lambda folder: (*found[folder], folder.name), default=None)


def _whole(folders: Iterable[Path]) -> Iterator[tuple[Path, tuple[int, int]]]:
    """The complete ones, with what orders them."""
    for folder in folders:
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            continue
        yield folder, (int(manifest.get("counter", 0)), int(manifest.get("saved_at", 0)))


# -- the manifest ------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        CheckpointError: not a checkpoint, incomplete, or of a newer format.
    """
    try:
        manifest: Manifest = json.loads((folder / MANIFEST).read_text())
        version, files = int(manifest["format"]), dict(manifest["files"])
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error_text(error)}") from error
    if version > FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {version}; this lightstep reads up to {FORMAT}")
    for name, size in files.items():
        _check_size(folder, name, size)
    return manifest


def is_unchanged(folder: Path, manifest: Manifest) -> bool:
    """Whether ``folder`` still is the checkpoint that ``manifest`` was read from, and not one that replaced it."""
    try:
        return bool(json.loads((folder / MANIFEST).read_text()) == manifest)
    except (OSError, ValueError):
        return False


def refuse_replaced(folder: Path, manifest: Manifest) -> None:
    """Raises :class:`CheckpointError` when what was read since ``manifest`` may be of two checkpoints."""
    if not is_unchanged(folder, manifest):
        raise CheckpointError(f"{folder} was replaced or removed while it was read; load again")


def manifest_header(path: Path, world_size: int) -> Manifest:
    """What every manifest begins with.

    Args:
        path: where the checkpoint goes; its number is one more than that of any checkpoint beside it.
    """
    beside = _folders(path.parent)
    return {
        "lightstep": _version(),
        "torch": torch.__version__,
        "save_id": secrets.token_hex(16),
        "counter": 1 + max((counter for _, (counter, _) in _whole(beside)), default=0),
        "saved_at": time.time_ns(),
        "world_size": world_size,
    }


def write_manifest(folder: Path, content: Manifest, files: Mapping[str, int]) -> None:
    """Declare the checkpoint whole.

    Args:
        files: all files with their sizes, as those who wrote and flushed them saw them; another machine may see old
            sizes for a while.
    """
    for parent in {(folder / name).parent for name in files}:
        sync(parent)
    listed = dict(sorted(files.items()))
    write_file(folder / MANIFEST, json.dumps({"format": FORMAT, **content, "files": listed}, indent=1).encode())
    sync(folder)


def sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """The sizes of files that this process wrote."""
    return {name: (folder / name).stat().st_size for name in names}


def refuse_engine_files(folder: Path, manifest: Manifest) -> None:
    """Raises :class:`CheckpointError` when DeepSpeed wrote the tensors: only it can read them."""
    if manifest.get("deepspeed"):
        raise CheckpointError(
            f"{folder} holds DeepSpeed's own files (sharding.kind deepspeed); for another strategy convert it first: "
            f"lightstep checkpoint convert {folder} DESTINATION --to lightstep"
        )


def _check_size(folder: Path, name: str, size: int) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{folder / MANIFEST} lists {name!r}, which is no file name")
    try:
        found = (folder / name).stat().st_size
    except OSError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {name} is missing") from None
    if found != size:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {name} has {found} bytes of {size}")


def _version() -> str:
    try:
        return importlib.metadata.version("lightstep-optim")
    except importlib.metadata.PackageNotFoundError:
        return "source checkout"


# -- whose files -------------------------------------------------------------------------------------------------------


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, whole or damaged. Files that no save wrote stay, and the folder with them."""
    remove_own(folder, sorted(_own_files(folder), key=MANIFEST.__eq__))  # the manifest last: it knows the others


def _own_files(folder: Path) -> set[str]:
    """What the manifest lists; without one that can be read, what is called as our files are."""
    try:
        listed = json.loads((folder / MANIFEST).read_text())["files"]
        safe = {name for name in listed if not Path(name).is_absolute() and ".." not in Path(name).parts}
    except (OSError, ValueError, KeyError, TypeError):
        safe = {INDEX, STATE, TORCHS_INDEX, *(file.name for file in folder.glob("*.distcp"))}
    return {MANIFEST, *safe}


CHECKPOINT = FolderKind(
    "a checkpoint",
    is_ours=lambda path: (path / MANIFEST).is_file(),
    is_whole=is_complete,
    own_files=_own_files,
)

"""What a checkpoint is on disk: one folder, whole or not there.

::

    step-100/
        lightstep.json    the manifest: versions, names, sizes and checksums of files; written last, it means "whole"
        tensors.json      where every piece of every tensor lies in the .distcp files, and its checksum
        state.pt          everything that is no tensor of model or optimizer: torch.save, loaded with weights_only=True
        __0_0_0.distcp    tensors in torch.distributed.checkpoint's format, each rank its own shards
        .metadata         torch's own index, for torch's own tools; never read here, because it is a pickle

At a URL all but the manifest lie in a folder inside, which the manifest names. What sharding.kind deepspeed writes has
DeepSpeed's own files in place of the tensors (``lightstep/deepspeed``).

The manifest binds the files: it has an id of the save, so that a reader who finds the same manifest before and after
has read files of one save, and their checksums. Its ``counter`` says which checkpoint of a folder was saved last,
whatever the clock says.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightstep.checkpoint.checksums import seal, unseal
from lightstep.checkpoint.errors import CheckpointError, DamagedError, error_text
from lightstep.checkpoint.storage import FolderKind, final_name, leftovers, location, storage_of, write_file
from lightstep.crc32 import crc32

logger = logging.getLogger(__name__)

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
    """The complete checkpoint directly in ``folder`` (a path or a URL) that was saved last, or ``None``.

    The order is that of the saves, which each checkpoint knows; the clock has no part in it, but for checkpoints of
    before there was such an order. Other processes may save and remove checkpoints meanwhile. Those that were saved
    with ``weights_only`` are passed over: a run that went on from one would lose its optimizer's state.
    """
    root = location(folder)
    while True:
        entries = _folders(root)
        newest = next((path for path in _in_order(root, entries) if _can_go_on(path)), None)
        if set(_folders(root)) == set(entries):  # else what went, or was renamed, may have been the newest in the list
            return newest


def checkpoints_in(root: Path) -> list[Path]:
    """Where checkpoints are, or should be after a crash, the one that was saved last first; some may be damaged."""
    return _in_order(root, _folders(root))


def _in_order(root: Path, entries: list[Path]) -> list[Path]:
    taken = {entry.name for entry in entries}
    own = [entry for entry in entries if final_name(entry) == entry.name or final_name(entry) not in taken]
    found: dict[Path, tuple[int, int]] = {}
    for entry, order in _orders(own, _read):
        path = root / final_name(entry)
        found[path] = max(found.get(path, order), order)
    return sorted(found, key=lambda path: (*found[path], path.name), reverse=True)


def is_complete(folder: Path) -> bool:
    """Whether the manifest is there and every file it lists has the size it lists."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def is_whole(path: Path) -> bool:
    """Whole, under its name or one that a crash left."""
    try:
        find_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _can_go_on(path: Path) -> bool:
    """Whole, with an optimizer's state; not one that another process has removed meanwhile."""
    try:
        return not is_partial(path)
    except CheckpointError:
        return False


def is_partial(path: Path) -> bool:
    """Whether a whole checkpoint was saved with ``weights_only``."""
    return bool(_read(find_checkpoint(path)).get("weights_only"))


def _folders(root: Path) -> list[Path]:
    try:
        return [entry for entry in root.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _newest(folders: Iterable[Path]) -> Path | None:
    """Of the whole ones."""
    found = dict(_orders(folders, read_manifest))
    return max(found, key=lambda folder: (*found[folder], folder.name), default=None)


def _orders(folders: Iterable[Path], read: Callable[[Path], Manifest]) -> Iterator[tuple[Path, tuple[int, int]]]:
    """What orders the checkpoints among these folders."""
    for folder in folders:
        with suppress(CheckpointError):
            yield folder, _order(read(folder))


def _order(manifest: Manifest) -> tuple[int, int]:
    return int(manifest.get("counter", 0)), int(manifest.get("saved_at", 0))


# -- the manifest ------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        DamagedError: incomplete or damaged.
        CheckpointError: not a checkpoint, or of a newer format.
    """
    manifest = _read(folder)
    for name, size in manifest["files"].items():
        _check_size(folder, name, size)
    return manifest


def _read(folder: Path) -> Manifest:
    """Without a look at the files."""
    try:
        manifest, unharmed = unseal((folder / MANIFEST).read_bytes())
        version, _ = int(manifest["format"]), dict(manifest["files"])
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST}. If another library wrote it, convert it: "
            f"lightstep checkpoint convert {folder} DST --to lightstep"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / MANIFEST} cannot be read: {error_text(error)}") from error
    if not unharmed:
        raise DamagedError(f"{folder / MANIFEST} is damaged: its text does not have the checksum at its end")
    if version > FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {version}; this lightstep reads up to {FORMAT}")
    return manifest


def data_folder(folder: Path, manifest: Manifest) -> Path:
    """Where the files beside the manifest are: inside, for a checkpoint that was written at a URL."""
    return folder / manifest["folder"] if manifest.get("folder") else folder


def read_checked(folder: Path, manifest: Manifest, name: str) -> bytes:
    """A small file, compared with its checksum; ``name`` is without the :func:`data_folder`.

    Raises:
        DamagedError: it is another one.
    """
    file = data_folder(folder, manifest) / name
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error_text(error)}") from error
    expected = manifest.get("checksums", {}).get(_listed(manifest.get("folder"), name))
    if expected is not None and crc32(content) != expected:
        raise DamagedError(f"{file} is damaged: its checksum is {crc32(content):08x} and should be {expected:08x}")
    return content


def say_if_unchecked(folder: Path, manifest: Manifest) -> None:
    """A warning about a checkpoint of before there were checksums."""
    if "checksums" not in manifest:
        logger.warning("%s has no checksums: damage in it would not be noticed; save it again to have them", folder)


def is_unchanged(folder: Path, manifest: Manifest) -> bool:
    """Whether ``folder`` still is the checkpoint that ``manifest`` was read from, and not one that replaced it."""
    try:
        return _read(folder) == manifest
    except CheckpointError:
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
    return {
        "lightstep": _version(),
        "torch": torch.__version__,
        "save_id": secrets.token_hex(16),
        "counter": 1 + max((order[0] for _, order in _orders(_folders(path.parent), _read)), default=0),
        "saved_at": time.time_ns(),
        "world_size": world_size,
    }


def commit_checkpoint(
    folder: Path, target: Path, content: Manifest, files: Mapping[str, tuple[int, int | None]]
) -> None:
    """Declare what is in ``folder`` whole, and put it in the place of ``target``.

    Args:
        files: all files with their sizes and checksums (of those in the index there is none), as those who wrote and
            flushed them saw them; another machine may see old sizes for a while.
    """
    inside = folder.name if folder.parent == target else None
    sizes = {_listed(inside, name): size for name, (size, _) in sorted(files.items())}
    checksums = {_listed(inside, name): value for name, (_, value) in sorted(files.items()) if value is not None}
    if inside is not None:
        for name, size in sizes.items():
            _check_size(target, name, size)  # another saver may have removed them
    place = {} if inside is None else {"folder": inside}
    manifest = {"format": FORMAT, **content, **place, "files": sizes, "checksums": checksums}
    write_file((folder if inside is None else target) / MANIFEST, seal(manifest))
    storage_of(target).commit(folder, target, CHECKPOINT)


def _listed(inside: str | None, name: str) -> str:
    """A file's name in the manifest."""
    return f"{inside}/{name}" if inside else name


def refuse_engine_files(folder: Path, manifest: Manifest) -> None:
    """Raises :class:`CheckpointError` when DeepSpeed wrote the tensors: only it can read them."""
    if manifest.get("deepspeed"):
        raise CheckpointError(
            f"{folder} holds DeepSpeed's own files (sharding.kind deepspeed); for another strategy convert it first: "
            f"lightstep checkpoint convert {folder} DESTINATION --to lightstep"
        )


def _check_size(folder: Path, name: str, size: int) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{folder / MANIFEST} lists {name!r}, which is not a file name")
    try:
        found = (folder / name).stat().st_size
    except OSError:
        raise DamagedError(f"{folder} is not a complete checkpoint: {name} is missing") from None
    if found != size:
        raise DamagedError(f"{folder} is not a complete checkpoint: {name} has {found} bytes of {size}")


def _version() -> str:
    try:
        return importlib.metadata.version("lightstep-optim")
    except importlib.metadata.PackageNotFoundError:
        return "source checkout"


# -- whose files -------------------------------------------------------------------------------------------------------


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, whole or damaged. Files that no save wrote stay, and the folder with them."""
    own = sorted(_own_files(folder), key=MANIFEST.__eq__)  # the manifest last: it knows the others
    storage_of(folder).remove(folder, own)


def _own_files(folder: Path) -> set[str]:
    """What the manifest lists; without one that can be read, what is called as our files are."""
    try:
        listed = unseal((folder / MANIFEST).read_bytes())[0]["files"]
        safe = {name for name in listed if not Path(name).is_absolute() and ".." not in Path(name).parts}
    except (OSError, ValueError, KeyError, TypeError):
        tensors = [entry.name for entry in folder.iterdir() if entry.name.endswith(".distcp")]
        safe = {INDEX, STATE, TORCHS_INDEX, *tensors}
    return {MANIFEST, *safe}


CHECKPOINT = FolderKind(
    "a checkpoint",
    is_ours=lambda path: (path / MANIFEST).is_file(),
    is_whole=is_complete,
    own_files=_own_files,
)

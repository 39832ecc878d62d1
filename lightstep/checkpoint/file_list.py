"""The list of the files beside a checkpoint, with their sizes and checksums; it is written last.

::

    checkpoint-100/
        lightstep/              a checkpoint
        model.safetensors       files of another library: the transformers Trainer, accelerate
        trainer_state.json
        lightstep-files.json    the list of these files; it also names the save that lightstep/ is from

Files that are not in the list are the user's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lightstep.checkpoint.checksums import check_files, seal, size_and_checksum, unseal
from lightstep.checkpoint.errors import CheckpointError, DamagedError, error_text
from lightstep.checkpoint.layout import FORMAT, Manifest, check_sizes, find_checkpoint, holds_checkpoint, read_manifest
from lightstep.checkpoint.storage import sync, write_file

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
    """The list, in the form of a checkpoint's manifest; ``None`` if the folder has none (an old version wrote it).

    Raises:
        DamagedError: the list is damaged, files in it are missing or have other sizes, or the checkpoint is of another
            save.
        CheckpointError: its format is newer.
    """
    file = folder / FILE_LIST
    try:
        listed, undamaged = unseal(file.read_bytes())
        version, _, _ = int(listed["format"]), dict(listed["files"]), dict(listed["checksums"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{file} cannot be read: {error_text(error)}") from error
    if not undamaged:
        raise DamagedError(f"{file} is damaged: its text does not have the checksum at its end")
    if version > FORMAT:
        raise CheckpointError(f"{file} has format {version}; this lightstep reads up to {FORMAT}")
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
        CheckpointError: the list's format is newer.
    """
    try:
        listed = read_file_list(folder)
        check_files(folder, listed or {}, (listed or {"files": ()})["files"])
    except DamagedError as error:
        raise DamagedError(f"{error}. If you changed it yourself, remove {folder / FILE_LIST}") from error
    return listed is not None


def _save_id(folder: Path) -> str | None:
    return read_manifest(find_checkpoint(folder / CHECKPOINT)).get("save_id")

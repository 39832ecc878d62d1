"""Verifying checkpoints: every byte is read and compared with its checksum. No model is needed.

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

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lightstep.checkpoint.background import Worker
from lightstep.checkpoint.errors import CheckpointError, DamagedError, NotFoundError
from lightstep.checkpoint.layout import (
    FORMAT,
    INDEX,
    MANIFEST,
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
    read_manifest,
    read_sealed,
    seal,
    size_and_checksum,
)
from lightstep.checkpoint.saved import read_index
from lightstep.checkpoint.storage import location, sync, write_file
from lightstep.checkpoint.tensors import read_chunk

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
        CheckpointError: its format is newer.
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
        CheckpointError: there is none, or a newer version wrote it.
    """
    found = Verified(path)
    try:
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
        absent = absent_files(folder, manifest)
        sizes = [size for name, size in manifest["files"].items() if name not in absent]
        found.files, found.nbytes = len(sizes) + 1, sum(sizes)
        found.damage = _damage(_checks(folder, manifest))
    except DamagedError as error:
        found.damage.append(str(error))
    return found


def is_undamaged(path: Path) -> bool:
    """Whether :func:`verify` finds a checkpoint without damage."""
    try:
        return not verify(path).damage
    except CheckpointError:
        return False


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
    with ExitStack() as stack:
        workers = itertools.cycle([stack.enter_context(Worker()) for _ in range(_READERS)])
        results = [next(workers).submit(partial(_damage_in, check)) for check in checks]
        return [text for result in results if (text := result.result()) is not None]


def _damage_in(check: Callable[[], object]) -> str | None:
    try:
        check()
    except DamagedError as error:
        return str(error)
    return None

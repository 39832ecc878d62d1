"""Verifying checkpoints: every byte is read and compared with its checksum. No model is needed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lightstep.checkpoint.checksums import check_file
from lightstep.checkpoint.errors import CheckpointError, DamagedError, NotFoundError
from lightstep.checkpoint.file_list import CHECKPOINT, FILE_LIST, read_file_list
from lightstep.checkpoint.layout import (
    INDEX,
    MANIFEST,
    Manifest,
    checkpoints_in,
    data_folder,
    find_checkpoint,
    is_weights_only,
    read_manifest,
)
from lightstep.checkpoint.read import read_chunk
from lightstep.checkpoint.saved import read_index
from lightstep.checkpoint.storage import location
from lightstep.checkpoint.workers import Worker

_READERS = 4


@dataclass
class Verified:
    """The result for one checkpoint."""

    path: Path
    damage: list[str] = field(default_factory=list)
    """One sentence for each damaged file or tensor."""
    unchecked: bool = False
    """The checkpoint has no checksums (an old version wrote it). Only names and sizes of its files were checked."""
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
        found.unchecked, found.files, found.nbytes = (
            inner.unchecked,
            found.files + inner.files,
            found.nbytes + inner.nbytes,
        )
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
        found.unchecked = "checksums" not in manifest
        found.files, found.nbytes = len(manifest["files"]) + 1, sum(manifest["files"].values())
        if not found.unchecked:
            found.damage = _damage(_checks(folder, manifest))
    except DamagedError as error:
        found.damage.append(str(error))
    return found


def is_undamaged(path: Path) -> bool:
    """Whether :func:`verify` finds a checkpoint without damage. One without checksums counts as undamaged."""
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

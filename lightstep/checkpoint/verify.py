"""Verifying checkpoints: every byte is read and compared with its checksum. No model is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lightstep.checkpoint.checksums import crc32_of
from lightstep.checkpoint.errors import CheckpointError, DamagedError, error_text
from lightstep.checkpoint.layout import (
    INDEX,
    MANIFEST,
    Manifest,
    checkpoints_in,
    data_folder,
    find_checkpoint,
    is_weights_only,
    read_checked,
    read_manifest,
)
from lightstep.checkpoint.read import read_chunk
from lightstep.checkpoint.storage import location
from lightstep.checkpoint.tensors import parse_index

_BLOCK = 8 * 2**20
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
    """Verify a checkpoint, or every checkpoint in a folder.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    root = location(path).resolve()
    if (root / MANIFEST).exists() or not root.exists():
        return [verify(root)]
    found = [verify(each) for each in checkpoints_in(root)]
    verified = {each.path for each in found}
    unreadable = [e for e in root.iterdir() if e not in verified and e.is_dir() and (e / MANIFEST).exists()]
    if not found and not unreadable:
        raise CheckpointError(f"{path} holds no checkpoint of lightstep")
    return [*found, *map(verify, unreadable)]


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
            with ThreadPoolExecutor(_READERS) as pool:
                results = [pool.submit(_damage_in, check) for check in _checks(folder, manifest)]
                found.damage = [text for result in results if (text := result.result()) is not None]
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


def size_and_checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    return file.stat().st_size, crc32_of(_blocks(file))


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare these files with the manifest's checksums, if it has them.

    Raises:
        DamagedError: a file is damaged; it names the first one.
    """
    for name in names:
        if name in manifest.get("checksums", {}):
            _check_file(folder, manifest, name)


def _checks(folder: Path, manifest: Manifest) -> Iterator[Callable[[], object]]:
    """One call per file and tensor chunk, which raises :class:`DamagedError` if it is damaged."""
    for name in manifest["checksums"]:
        yield partial(_check_file, folder, manifest, name)
    data = data_folder(folder, manifest)
    if (data / INDEX).exists():
        for key, stored in parse_index(read_checked(folder, manifest, INDEX)).items():
            for chunk in stored.chunks:
                yield partial(read_chunk, data, key, chunk)


def _check_file(folder: Path, manifest: Manifest, name: str) -> None:
    expected = manifest["checksums"][name]
    try:
        found = crc32_of(_blocks(folder / name))
    except OSError as error:
        raise DamagedError(f"{folder / name} cannot be read: {error_text(error)}") from error
    if found != expected:
        raise DamagedError(f"{folder / name} is damaged: its checksum is {found:08x}, not {expected:08x}")


def _damage_in(check: Callable[[], object]) -> str | None:
    try:
        check()
    except DamagedError as error:
        return str(error)
    return None


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            yield block

"""The layout of a checkpoint on disk: one folder, complete or absent.

::

    step-100/
        lightstep.json    the manifest: versions, names, sizes and checksums of files; written last
        tensors.json      the index: file, offset and checksum of every chunk of every tensor
        state.pt          all that is not a tensor of model or optimizer: torch.save, loaded with weights_only=True
        __0_0_0.distcp    tensors in the format of torch.distributed.checkpoint; each rank writes its own shards
        .metadata         torch's index, for torch's tools; lightstep never reads it, because it is a pickle

At a URL all files but the manifest are in a folder inside ``step-100``, which the manifest names. Checkpoints of
sharding.kind deepspeed have DeepSpeed's own files in place of the tensors (``lightstep/deepspeed``). Where hosts share
no disk, each has the tensors of its ranks and a copy of the rest (``disks.py``).

Every byte has a CRC-32: the manifest has those of all small files, one of which is the index, which has those of all
tensors. The manifest ends with its own. It also has a random id of the save: if a reader finds the same manifest before
and after it reads, all it has read is from one save. Its ``counter`` orders the checkpoints in a folder by the time
they were saved, independent of the clock.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightstep.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    NotFoundError,
    UnreadableError,
    error_text,
    unless_damaged,
)
from lightstep.checkpoint.storage import (
    FolderKind,
    UrlPath,
    final_name,
    is_nothing,
    leftovers,
    location,
    storage_for,
    write_file,
)
from lightstep.crc32 import crc32
from lightstep.extras import MissingLibraryError
from lightstep.version import __version__

_BLOCK = 8 * 2**20

_SEAL = b'"crc32": "%08x"\n}'


def seal(content: dict[str, Any]) -> bytes:
    """``content`` as JSON, with the checksum of all text before it as the last key."""
    text = json.dumps(content, indent=1).encode().removesuffix(b"\n}") + b",\n "
    return text + _SEAL % crc32(text)


def unseal(text: bytes) -> tuple[dict[str, Any], bool]:
    """The content of sealed text, and whether its checksum is right.

    Raises:
        ValueError, TypeError: ``text`` is not JSON, or not a mapping.
    """
    content: dict[str, Any] = dict(json.loads(text))
    body = text[: -len(_SEAL % 0)]
    return content, text == body + _SEAL % crc32(body)


def size_and_checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    return file.stat().st_size, _checksum(file)


def check_file(folder: Path, manifest: Mapping[str, Any], name: str) -> None:
    """Compare a file in ``folder`` with its checksum in the manifest.

    Raises:
        DamagedError: they differ, or the file is gone.
        UnreadableError: the network or a disk failed.
    """
    expected = manifest["checksums"][name]
    try:
        with reading(folder / name, listed=True):
            found = _checksum(folder / name)
    except OSError as error:
        raise DamagedError(f"{folder / name} cannot be read: {error_text(error)}") from error
    if found != expected:
        raise DamagedError(f"{folder / name} is damaged: its checksum is {found:08x}, not {expected:08x}")


def check_files(folder: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Compare those of these files that have checksums in the manifest with them.

    Raises:
        DamagedError, UnreadableError: as :func:`check_file`, of the first such file.
    """
    for name in names:
        if name in manifest["checksums"]:
            check_file(folder, manifest, name)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            checksum = crc32(block, checksum)
    return checksum


MANIFEST = "lightstep.json"
INDEX = "tensors.json"
STATE = "state.pt"
TORCH_INDEX = ".metadata"
FORMAT = 1

Manifest = dict[str, Any]


# -- finding -----------------------------------------------------------------------------------------------------------


def find_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """The complete checkpoint for ``path``, and its manifest: the folder itself, or one that a crash left under a
    temporary name.

    Raises:
        CheckpointError: there is none, or it is incomplete.
    """
    with reading(path):
        if is_nothing(path):
            newest = _newest_complete(leftovers(path))
            if newest is not None:
                return newest, read_manifest(newest)
            if is_nothing(path):  # else another process has just put it there
                raise NotFoundError(f"{path} does not exist or is an empty folder")
        has_manifest = (path / MANIFEST).exists()
    if not has_manifest and (newest := latest_checkpoint(path)) is not None:
        raise NotFoundError(f"{path} is a folder of checkpoints; the newest is {newest}")
    return path, read_manifest(path)


def holds_checkpoint(path: Path) -> bool:
    """Whether there is a checkpoint at ``path``, or a complete one that a crash left under a temporary name.

    A damaged one counts: loading it says what is wrong.
    """
    return not is_nothing(path) or _newest_complete(leftovers(path)) is not None


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint directly in ``folder`` (a path or a URL) that was saved last, or ``None``.

    Every checkpoint has a counter, so the order does not depend on the clock. Checkpoints without optimizer state are
    skipped: a run that continued from one would lose its own. If all are, the newest one that was not saved with
    ``weights_only`` counts. Other processes may save and remove checkpoints at the same time.

    Raises:
        CheckpointError: the network or a disk failed, or a newer lightstep has written one, so which one is the newest
            is not known.
    """
    root = location(folder)
    while True:
        entries = _folders(root)
        paths = _newest_first(root, entries)
        newest = next((path for path in paths if _is_resumable(path, with_state=True)), None)
        newest = newest or next((path for path in paths if _is_resumable(path)), None)
        if set(_folders(root)) == set(entries):  # else the newest may have been renamed or removed: look again
            return newest


def checkpoints_in(root: Path) -> list[Path]:
    """The paths of the checkpoints in ``root``, the one that was saved last first. Some may be damaged.

    A checkpoint that a crash left under a temporary name counts with its final path, if nothing is there.
    """
    return _newest_first(root, _folders(root))


def _newest_first(root: Path, entries: list[Path]) -> list[Path]:
    candidates = [entry for entry in entries if final_name(entry) == entry.name or is_nothing(root / final_name(entry))]
    found: dict[Path, int] = {}
    for entry, counter in _counters(candidates, _read):
        path = root / final_name(entry)
        found[path] = max(found.get(path, counter), counter)
    return sorted(found, key=lambda path: (found[path], path.name), reverse=True)


def is_complete(path: Path) -> bool:
    """Whether a checkpoint with all of its files is at ``path``, or under a temporary name that a crash left."""
    return unless_damaged(partial(find_checkpoint, path)) is not None


def _is_resumable(path: Path, with_state: bool = False) -> bool:
    """Whether the checkpoint is complete, was not saved with ``weights_only``, and has optimizer state if asked for."""
    found = unless_damaged(partial(find_checkpoint, path))
    if found is None:  # incomplete, or another process has removed it
        return False
    _, manifest = found
    return not manifest.get("weights_only") and not (with_state and manifest.get("groups") is None)


def is_weights_only(path: Path) -> bool:
    """Whether the checkpoint was saved with ``weights_only``.

    Raises:
        CheckpointError: there is no complete checkpoint at ``path``.
    """
    return bool(find_checkpoint(path)[1].get("weights_only"))


def _folders(root: Path) -> list[Path]:
    try:
        with reading(root):
            return [entry for entry in root.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _newest_complete(folders: Iterable[Path]) -> Path | None:
    found = dict(_counters(folders, read_manifest))
    return max(found, key=lambda folder: (found[folder], folder.name), default=None)


def _counters(folders: Iterable[Path], read: Callable[[Path], Manifest]) -> Iterator[tuple[Path, int]]:
    """The checkpoints among ``folders``, each with the counter that orders them."""
    for folder in folders:
        if (manifest := unless_damaged(partial(read, folder))) is not None:
            yield folder, manifest["counter"]


# -- the manifest ------------------------------------------------------------------------------------------------------

_ANSWERS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, MissingLibraryError)


@contextmanager
def reading(file: Path, listed: bool = False) -> Iterator[None]:
    """Tell a failure of the network or of a disk from an answer: that a file is gone, or something else.

    A local folder that may not be entered is another user's, who has one beside the run's. At a URL the credentials
    may have expired.

    Args:
        listed: a manifest that could be read lists the file, so the folder is no other user's.

    Raises:
        UnreadableError: it failed.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the libraries of servers have errors of their own (gcsfs's are no OSError)
        of_another_user = isinstance(error, PermissionError) and not listed and not _is_visible(file)
        if of_another_user or isinstance(error, _ANSWERS):
            raise
        raise UnreadableError(f"{file} could not be read ({error_text(error)}); try again") from error


def _is_visible(file: Path) -> bool:
    """Whether its folder may be entered."""
    try:
        return isinstance(file, UrlPath) or bool(file.stat())
    except OSError:
        return False


def _content(file: Path, listed: bool = False) -> bytes:
    with reading(file, listed):
        try:
            return file.read_bytes()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return file.read_bytes()  # on a network disk another host has removed or replaced what was being read


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        DamagedError: the checkpoint is incomplete or damaged.
        UnreadableError: its format is newer, or the network or a disk failed.
        CheckpointError: there is no checkpoint.
    """
    manifest = _read(folder)
    check_sizes(folder, manifest)
    return manifest


def _read(folder: Path) -> Manifest:
    """The manifest; the files that it lists are not checked."""
    manifest = read_sealed(folder / MANIFEST, _check_types)
    if manifest is None:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST}. If another library wrote it, convert it: "
            f"lightstep checkpoint convert {folder} DST --to lightstep"
        )
    return manifest


def read_sealed(file: Path, check_types: Callable[[Manifest], object]) -> Manifest | None:
    """The content of a file that :func:`seal` made; ``None`` if there is none.

    Args:
        check_types: raises ``TypeError``, ``KeyError``, ``ValueError`` or ``AttributeError`` if the content, whose
            checksum may be right, is not what a save writes.

    Raises:
        DamagedError: it is damaged.
        UnreadableError: its format is newer, or the network or a disk failed.
    """
    try:
        content, undamaged = unseal(_content(file))
        version = int(content["format"])
        if version <= FORMAT:
            check_types(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedError(f"{file} cannot be read: {error_text(error)}") from error
    if not undamaged:
        raise DamagedError(f"{file} is damaged: its text does not have the checksum at its end")
    if version > FORMAT:
        raise UnreadableError(
            f"{file} has format {version}, and lightstep {__version__} reads up to {FORMAT}; install a newer lightstep"
        )
    return content


def _check_types(manifest: Manifest) -> None:
    """Anybody can write a manifest with a right checksum. One that cannot be used counts as damaged.

    Raises:
        TypeError, KeyError, AttributeError: an entry is missing, or is not what a save writes.
    """
    numbers = [*manifest["files"].values(), *manifest["checksums"].values(), manifest["counter"]]
    aliases, base = manifest.get("aliases") or {}, manifest.get("base") or {"shapes": {}}
    groups = [name for group in manifest.get("groups") or [] for name in [*group]]
    names = [*groups, *aliases.values(), manifest.get("folder") or "", manifest.get("optimizer") or ""]
    for part in manifest.get("parts") or []:
        names += [part["host"], part["path"], *part["files"]]
        numbers += part["ranks"]
    lengths = [length for shape in base["shapes"].values() for length in [*shape]]
    wrong = [value for value in numbers + lengths if type(value) is not int]
    wrong += [value for value in names if not isinstance(value, str)]
    if wrong:
        raise TypeError(f"it has {wrong[0]!r} where a save writes something else")


def data_folder(folder: Path, manifest: Manifest) -> Path:
    """The folder with the other files: the manifest's own, or one inside it for a checkpoint at a URL."""
    return folder / manifest["folder"] if manifest.get("folder") else folder


def read_checked(folder: Path, manifest: Manifest, name: str) -> bytes:
    """The content of a small file in :func:`data_folder`, compared with its checksum.

    Raises:
        DamagedError: the file is gone or damaged.
        UnreadableError: the network or a disk failed.
    """
    file = data_folder(folder, manifest) / name
    try:
        content = _content(file, listed=True)
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error_text(error)}") from error
    expected = manifest["checksums"].get(_manifest_name(manifest.get("folder"), name))
    if crc32(content) != expected:
        raise DamagedError(f"{file} is damaged: its checksum is {crc32(content):08x}, not {expected:08x}")
    return content


@contextmanager
def unreplaced(folder: Path, manifest: Mapping[str, Any]) -> Iterator[None]:
    """Raise :class:`CheckpointError`, whatever the block raised, if the checkpoint was replaced or removed in it."""
    try:
        yield
    finally:
        if unless_damaged(partial(_read, folder)) != manifest:
            raise CheckpointError(f"{folder} was replaced or removed while it was read; load again")


def manifest_header(path: Path, world_size: int) -> Manifest:
    """The entries that every manifest begins with.

    Args:
        path: the checkpoint's final path. Its counter is one more than that of any checkpoint in the same folder.
    """
    return {
        "lightstep": __version__,
        "torch": torch.__version__,
        "save_id": secrets.token_hex(16),
        "counter": 1 + max((counter for _, counter in _counters(_folders(path.parent), _read)), default=0),
        "saved_at": time.time_ns(),
        "world_size": world_size,
    }


def write_manifest(folder: Path, target: Path, content: Manifest, files: Mapping[str, tuple[int, int | None]]) -> None:
    """Write the manifest of the checkpoint in ``folder``, which is complete then.

    Args:
        target: where it will be.
        files: name -> size and checksum of every file but the manifest. Files with tensors have no checksum: the index
            has one per chunk. The sizes come from the ranks that wrote the files; on a network file system another
            machine may see old sizes for a while.
    """
    data = folder.name if folder.parent == target else None  # at a URL
    sizes = {_manifest_name(data, name): size for name, (size, _) in sorted(files.items())}
    checksums = {_manifest_name(data, name): value for name, (_, value) in sorted(files.items()) if value is not None}
    if data is not None:
        for name, size in sizes.items():
            _check_size(target, name, size)  # another process that saves here may have removed them
        content = {**content, "folder": data}
    text = seal({"format": FORMAT, **content, "files": sizes, "checksums": checksums})
    if data is None:
        write_file(folder / MANIFEST, text)
    else:
        _replace_at_url(target / MANIFEST, text)


def _replace_at_url(file: Path, text: bytes) -> None:
    """Write a file at a URL. If that fails, the file is what it was: some file systems write in place."""
    before = None
    with suppress(FileNotFoundError):
        before = file.read_bytes()
    try:
        write_file(file, text)
    except BaseException:
        with suppress(Exception):  # of the two errors the first one counts
            if before is None:
                storage_for(file).remove(file.parent, [file.name])
            else:
                write_file(file, before)
        raise


def _manifest_name(data: str | None, name: str) -> str:
    """A file's name in the manifest: relative to the manifest's folder."""
    return f"{data}/{name}" if data else name


def refuse_engine_files(folder: Path, manifest: Manifest) -> None:
    """Raise :class:`CheckpointError` if DeepSpeed wrote the tensors: only DeepSpeed can load them."""
    if manifest.get("deepspeed"):
        raise CheckpointError(
            f"{folder} holds DeepSpeed's own files (sharding.kind deepspeed); for another strategy convert it first: "
            f"lightstep checkpoint convert {folder} DESTINATION --to lightstep"
        )


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise :class:`CheckpointError` unless every file that the manifest lists is there with its size.

    Of a save in parts one part is enough, but all of that.
    """
    absent = absent_files(folder, manifest)
    if absent and absent == {name for part in manifest["parts"] for name in part["files"]}:
        raise DamagedError(f"{folder} is not a complete checkpoint: {min(absent)} is missing")
    for name, size in manifest["files"].items():
        if name not in absent:
            _check_size(folder, name, size)


def absent_files(folder: Path, manifest: Manifest) -> set[str]:
    """The files of those parts of a save on several disks of which this folder has nothing."""
    parts = [part["files"] for part in manifest.get("parts") or ()]
    with reading(folder):
        return {name for files in parts if not any((folder / file).exists() for file in files) for name in files}


def refuse_absent_parts(folder: Path, manifest: Manifest) -> None:
    """Raise :class:`CheckpointError` unless all parts of a save on several disks are in this folder."""
    absent = absent_files(folder, manifest)
    for part in manifest.get("parts") or ():
        if not absent.isdisjoint(part["files"]):
            raise CheckpointError(
                f"{folder} is one part of a save on several disks; copy the .distcp files of {part['path']} on "
                f"{part['host']} into it"
            )


def _check_size(folder: Path, name: str, size: int) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{folder / MANIFEST} lists {name!r}, which is not a file name")
    try:
        with reading(folder / name, listed=True):
            found = (folder / name).stat().st_size
            if found != size:
                found = _size_on_server(folder / name)
    except OSError:
        raise DamagedError(f"{folder} is not a complete checkpoint: {name} is missing") from None
    if found != size:
        raise DamagedError(f"{folder} is not a complete checkpoint: {name} has {found} bytes of {size}")


def _size_on_server(file: Path) -> int:
    """The client of a network disk remembers sizes from when another host was writing, but not those of open files."""
    if isinstance(file, UrlPath):
        return int(file.stat().st_size)
    with file.open("rb") as stream:
        return os.fstat(stream.fileno()).st_size


# -- removing ----------------------------------------------------------------------------------------------------------


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, complete or not. The user's files stay, and then the folder does too."""
    own = sorted(_own_files(folder), key=MANIFEST.__eq__)  # the manifest last: it lists the others
    storage_for(folder).remove(folder, own)


def _own_files(folder: Path) -> set[str]:
    """The manifest and the files that it lists; if it cannot be read, the files whose names a save uses."""
    try:
        listed = unseal((folder / MANIFEST).read_bytes())[0]["files"]
        safe = {name for name in listed if not Path(name).is_absolute() and ".." not in Path(name).parts}
    except (OSError, ValueError, KeyError, TypeError):
        tensors = [entry.name for entry in folder.iterdir() if entry.name.endswith(".distcp")]
        safe = {INDEX, STATE, TORCH_INDEX, *tensors}
    return {MANIFEST, *safe}


CHECKPOINT = FolderKind(
    "a checkpoint",
    is_ours=lambda path: (path / MANIFEST).is_file(),
    is_complete=is_complete,
    own_files=_own_files,
)

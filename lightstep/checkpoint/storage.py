"""Where folders are written: what a save asks of a storage, and the storage that is a local file system.

Folders are put in their place when they are whole, by one writer at a time. On a local file system a folder
``step-100`` is written as ``.step-100.saving-<token>``, flushed to disk and renamed. One that it replaces is renamed to
``.step-100.replaced-<token>`` first; files in it that its writer did not write move into the new folder, and the rest
is removed. A crash leaves at least one whole folder under one of the three names. ``.step-100.lock`` is locked while
somebody writes; the operating system lets go of it when that process ends, however it ends.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.urls import UrlPath, UrlStorage
from lightstep.crc32 import crc32

logger = logging.getLogger(__name__)

_WRITE_BEHIND = 8 << 20
"""Bytes of a file after which the disk is told to begin with them."""

_SAVING, _REPLACED = ".saving-", ".replaced-"


@dataclass(frozen=True)
class FolderKind:
    """What is known of a kind of folder.

    Attributes:
        name: for messages: ``"a checkpoint"``.
        is_ours: whether a folder is of this kind, and may be replaced by another one.
        is_whole: whether what a crash left may take the folder's place.
        own_files: the files (``/`` between parts) that its writer wrote; all others are the user's.
    """

    name: str
    is_ours: Callable[[Path], bool]
    is_whole: Callable[[Path], bool]
    own_files: Callable[[Path], Collection[str]]


class Storage(Protocol):
    """What differs between places. Paths are those of ``pathlib``, or have the same methods (:class:`UrlPath`)."""

    def new_folder(self, path: Path, kind: FolderKind) -> AbstractContextManager[Path]:
        """A folder to write what belongs at ``path``; after an error in the block it is removed.

        Raises:
            CheckpointError: ``path`` is neither free, nor empty, nor of this kind; another process writes to it.
        """

    def create(self, file: Path) -> BinaryIO:
        """A new file, which a crash of the machine does not harm once it is closed."""

    def read(self, file: Path, start: int, size: int) -> bytes:
        """A part of a file; fewer bytes where it ends."""

    def commit(self, folder: Path, path: Path, kind: FolderKind) -> None:
        """Put the whole ``folder`` in the place of ``path``. A failure leaves ``path`` as it was."""

    def remove(self, folder: Path, own: Iterable[str]) -> None:
        """Remove these files in this order, and the folders that are empty then: the user's files stay."""


class LocalStorage:
    """A file system of this machine, or one that it has mounted."""

    @contextmanager
    def new_folder(self, path: Path, kind: FolderKind) -> Iterator[Path]:
        """Beside ``path``, which is locked meanwhile."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):  # before anything is looked at: somebody may be putting a folder there
            refuse_foreign(path, kind.is_ours, kind.name)
            _tidy(path, kind)
            temporary = _beside(path, _SAVING)
            temporary.mkdir()
            try:
                yield temporary
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def create(self, file: Path) -> BinaryIO:
        return io.BufferedWriter(_Synced(file, "wb"))

    def read(self, file: Path, start: int, size: int) -> bytes:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            return stream.read(size)

    def commit(self, folder: Path, path: Path, kind: FolderKind) -> None:
        """Two renames, or one."""
        for parent, _, _ in os.walk(folder):
            sync(Path(parent))
        aside = _beside(path, _REPLACED) if path.exists() and any(path.iterdir()) else None
        try:
            if aside is not None:
                os.replace(path, aside)
            os.replace(folder, path)
            sync(path.parent)
        except BaseException:
            if not folder.exists():
                os.replace(path, folder)
            if aside is not None and aside.exists():
                os.replace(aside, path)
            raise
        if aside is not None:
            _remove_replaced(aside, path, kind)

    def remove(self, folder: Path, own: Iterable[str]) -> None:
        with suppress(OSError):
            for name in own:
                (folder / name).unlink(missing_ok=True)
            for parent, _, _ in os.walk(folder, topdown=False):
                if not os.listdir(parent):
                    os.rmdir(parent)


class _Synced(io.FileIO):
    """Closed when the disk has it. The disk begins while the next bytes are made, not when the file is closed."""

    _begun = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        end = self.tell()
        if end - self._begun >= _WRITE_BEHIND and hasattr(os, "posix_fadvise"):
            # Linux queues what is dirty there for the disk; elsewhere it is a hint without harm.
            os.posix_fadvise(self.fileno(), self._begun, end - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = end
        return written

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


def location(path: str | os.PathLike[str]) -> Path:
    """Where a local path or a URL (``s3://bucket/run/step-100``) leads; a URL's has the methods of a ``Path``."""
    if isinstance(path, UrlPath) or "://" in str(path):
        return cast(Path, UrlPath(str(path)))
    return Path(path)


def storage_of(path: Path) -> Storage:
    """What keeps the files there."""
    return UrlStorage() if isinstance(path, UrlPath) else LocalStorage()


def write_file(path: Path, content: bytes) -> tuple[int, int]:
    """Write ``content``, safe from crashes; its size and checksum."""
    with storage_of(path).create(path) as stream:
        stream.write(content)
    return len(content), crc32(content)


@contextmanager
def new_folder_of_ranks(path: Path, kind: FolderKind, ranks: Ranks) -> Iterator[Path]:
    """:meth:`Storage.new_folder` for several ranks that write into one folder: the first of them makes it."""
    with ExitStack() as held_by_first:
        yield ranks.together(
            lambda: held_by_first.enter_context(storage_of(path).new_folder(path, kind)), only_first=True
        )


@contextmanager
def new_file(path: Path, is_ours: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """The same for one file, which takes its place at the end of the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        refuse_foreign(path, is_ours, what)
        for leftover in leftovers(path):
            leftover.unlink()
        temporary = _beside(path, _SAVING)
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def leftovers(path: Path) -> list[Path]:
    """What saves to ``path`` have beside it: those that crashed, or one that is under way."""
    if isinstance(path, UrlPath) or not path.parent.is_dir():
        return []
    return [entry for entry in path.parent.iterdir() if entry.name != path.name and final_name(entry) == path.name]


def final_name(entry: Path) -> str:
    """``step-100`` for ``step-100`` and for what a crash leaves of it."""
    for mark in (_SAVING, _REPLACED):
        name, found, _ = entry.name.rpartition(mark)
        if found and name.startswith("."):
            return name[1:]
    return entry.name


def was_replaced(folder: Path) -> bool:
    """Whether a leftover is what stood in the folder's place, and not what should have come there."""
    return _REPLACED in folder.name


def refuse_foreign(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Raise :class:`CheckpointError` unless ``path`` is free, an empty folder, or ours to replace."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())) or is_ours(path):
        return
    raise CheckpointError(f"{path} exists and is not {what}; choose another path or remove it")


# -- one writer --------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing to ``path``, where the file system has locks.

    Raises:
        CheckpointError: another process is at it.
    """
    file = path.parent / f".{path.name}.lock"
    descriptor = _lock(file, path)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(file: Path, path: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _flock(descriptor)
            if _is_same(descriptor, file):
                _sign(descriptor)
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise CheckpointError(f"{holder} is saving to {path}; wait for it, or choose another path") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the one before has removed it


def _sign(descriptor: int) -> None:
    """Say who has the lock, as far as there is room on the disk."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _flock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        logger.debug("no lock: %s", error)


def _is_same(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


# -- what crashes leave ------------------------------------------------------------------------------------------------


def _tidy(path: Path, kind: FolderKind) -> None:
    """Finish what a crash interrupted: a whole leftover takes an empty place, the others are removed."""
    found = leftovers(path)
    whole = [] if path.exists() else [folder for folder in found if kind.is_whole(folder)]
    if whole:
        newest = min(whole, key=was_replaced)  # what should have come is newer than what it replaces
        os.replace(newest, path)
        found.remove(newest)
        sync(path.parent)
    for folder in found:
        if was_replaced(folder) and path.exists():
            _remove_replaced(folder, path, kind)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def settle(parent: Path, kind: FolderKind, wanted: Callable[[str], bool]) -> None:
    """Finish what killed processes began at the ``wanted`` names in ``parent``, unless somebody is saving there."""
    if isinstance(parent, UrlPath) or not parent.is_dir():
        return
    names = {final_name(entry) for entry in parent.iterdir() if final_name(entry) != entry.name}
    names |= {entry.name[1:-5] for entry in parent.glob(".*.lock")}
    for name in filter(wanted, names):
        with suppress(OSError, CheckpointError), locked(parent / name):
            _tidy(parent / name, kind)


def _remove_replaced(old: Path, new: Path, kind: FolderKind) -> None:
    """Remove what was replaced, but for the user's files, which move into the new folder."""
    try:
        _move_others(old, new, set(kind.own_files(old)))
    except OSError as error:
        logger.warning("files in %s could not be moved to %s: %s", old, new, error)
        return
    shutil.rmtree(old, ignore_errors=True)


def _move_others(old: Path, new: Path, own: set[str]) -> None:
    for parent, folders, files in os.walk(old):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (*files, *links):
            entry = Path(parent, name)
            relative = entry.relative_to(old)
            if relative.as_posix() not in own and not os.path.lexists(new / relative):
                (new / relative).parent.mkdir(parents=True, exist_ok=True)
                os.replace(entry, new / relative)


def _beside(path: Path, mark: str) -> Path:
    return path.parent / f".{path.name}{mark}{secrets.token_hex(4)}"


# -- flushed to disk ---------------------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Wait until the disk has a file's content or a folder's entries."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

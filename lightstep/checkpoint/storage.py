"""Where folders are written: the storage protocol, and the storage for local file systems.

One writer at a time writes a folder. The folder appears at its path when it is complete. On a local file system
``step-100`` is written as ``.step-100.saving-<token>``, flushed to disk and renamed. A folder that it replaces is
renamed to ``.step-100.replaced-<token>`` first. Files that its writer did not write are then moved from there into the
new folder, and the rest is removed. After a crash at least one complete folder has one of the three names. The writer
holds a lock on ``.step-100.lock``, which the operating system releases when the process ends.
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
from lightstep.paths import is_url, local_path

logger = logging.getLogger(__name__)

_WRITE_BEHIND = 8 << 20
"""Bytes after which the operating system is told to write them to disk."""

_SAVING, _REPLACED = ".saving-", ".replaced-"


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder: what it is called, and how to recognise it.

    Attributes:
        name: for messages: ``"a checkpoint"``.
        is_ours: whether a folder is of this kind. Such a folder may be replaced.
        is_complete: whether a folder that a crash left may be moved to the path it was meant for.
        own_files: the files that its writer wrote, relative to the folder, with ``/``. All others are the user's.
    """

    name: str
    is_ours: Callable[[Path], bool]
    is_complete: Callable[[Path], bool]
    own_files: Callable[[Path], Collection[str]]


class Storage(Protocol):
    """What depends on where files are. Paths are ``pathlib`` paths, or have the same methods (:class:`UrlPath`)."""

    def new_folder(self, path: Path, kind: FolderKind) -> AbstractContextManager[Path]:
        """A temporary folder for what :meth:`commit` will put at ``path``. An error in the block removes the folder.

        Raises:
            CheckpointError: something else is at ``path``, or another process is writing to it.
        """

    def create(self, file: Path) -> BinaryIO:
        """A new file. Once it is closed, its content survives a crash of the machine."""

    def read(self, file: Path, start: int, size: int) -> bytes:
        """``size`` bytes of a file from ``start`` on, or fewer if the file ends before."""

    def commit(self, folder: Path, path: Path, kind: FolderKind) -> None:
        """Replace ``path`` with the complete ``folder``. A failure leaves ``path`` as it was."""

    def remove(self, folder: Path, own: Iterable[str]) -> None:
        """Remove these files in this order, then empty folders. The user's files stay."""


class LocalStorage:
    """A local or mounted file system."""

    @contextmanager
    def new_folder(self, path: Path, kind: FolderKind) -> Iterator[Path]:
        """The temporary folder is next to ``path``, which is locked in the block."""
        if _is_working_directory(path):
            raise CheckpointError(f"{path} is the working directory, which cannot be replaced; choose a folder in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):  # before the checks: another process may be replacing the folder
            check_replaceable(path, kind.is_ours, kind.name)
            _recover(path, kind)
            temporary = _temporary_path(path, _SAVING)
            temporary.mkdir()
            try:
                yield temporary
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def create(self, file: Path) -> BinaryIO:
        return io.BufferedWriter(_SyncedFile(file, "wb"))

    def read(self, file: Path, start: int, size: int) -> bytes:
        with file.open("rb") as stream:  # one call of an unbuffered file reads less than 2 GiB
            stream.seek(start)
            return stream.read(size)

    def commit(self, folder: Path, path: Path, kind: FolderKind) -> None:
        """Two renames if ``path`` has content, else one."""
        for parent, _, _ in os.walk(folder):
            sync(Path(parent))
        replaced = _temporary_path(path, _REPLACED) if path.exists() and any(path.iterdir()) else None
        try:
            if replaced is not None:
                os.replace(path, replaced)
            os.replace(folder, path)
            sync(path.parent)
        except BaseException:
            if not folder.exists():
                os.replace(path, folder)
            if replaced is not None and replaced.exists():
                os.replace(replaced, path)
            raise
        if replaced is not None:
            _remove_replaced(replaced, path, kind)

    def remove(self, folder: Path, own: Iterable[str]) -> None:
        with suppress(OSError):
            for name in own:
                (folder / name).unlink(missing_ok=True)
            for parent, _, _ in os.walk(folder, topdown=False):
                if not os.listdir(parent):
                    os.rmdir(parent)


class _SyncedFile(io.FileIO):
    """A file that is on disk when ``close()`` returns. Write-back starts during the writes, not at ``close()``."""

    _written_back = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        end = self.tell()
        if end - self._written_back >= _WRITE_BEHIND and hasattr(os, "posix_fadvise"):
            # On Linux this starts the write-back of dirty pages in the range. Elsewhere it is a harmless hint.
            os.posix_fadvise(self.fileno(), self._written_back, end - self._written_back, os.POSIX_FADV_DONTNEED)
            self._written_back = end
        return written

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


def location(path: str | os.PathLike[str]) -> Path:
    """A ``Path`` for a local path; a :class:`UrlPath`, with the same methods, for a URL (``s3://bucket/run/step-100``).

    Raises:
        CheckpointError: a ``Path`` was made of a URL.
    """
    if isinstance(path, UrlPath) or "://" in str(path):
        return cast(Path, UrlPath(str(path)))
    if is_url(path):
        raise CheckpointError(f"{str(path)!r} is a pathlib.Path that was made of a URL; pass the URL as a string")
    return Path(path).expanduser()


def local_folder(path: str | os.PathLike[str], needed: str) -> Path:
    """:func:`~lightstep.paths.local_path`, absolute.

    Raises:
        CheckpointError: it is a URL.
    """
    try:
        return local_path(path, needed).resolve()
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def storage_for(path: Path) -> Storage:
    """The storage that ``path`` is in."""
    return UrlStorage() if isinstance(path, UrlPath) else LocalStorage()


def write_file(path: Path, content: bytes) -> tuple[int, int]:
    """Write ``content`` to a new file, flush it to disk, and return its size and CRC-32."""
    with storage_for(path).create(path) as stream:
        stream.write(content)
    return len(content), crc32(content)


@contextmanager
def new_shared_folder(path: Path, kind: FolderKind, ranks: Ranks) -> Iterator[Path]:
    """:meth:`Storage.new_folder` for ranks that write into one folder. The first rank creates it."""
    with ExitStack() as stack:
        yield ranks.together(lambda: stack.enter_context(storage_for(path).new_folder(path, kind)), only_first=True)


@contextmanager
def new_file(path: Path, is_ours: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """A temporary path for a single file, which replaces ``path`` at the end of the block.

    Args:
        is_ours: whether what is at ``path`` may be replaced.
        what: what may be replaced, for the error.

    Raises:
        CheckpointError: something else is at ``path``, or another process is writing to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        check_replaceable(path, is_ours, what)
        for leftover in leftovers(path):
            leftover.unlink()
        temporary = _temporary_path(path, _SAVING)
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def leftovers(path: Path) -> list[Path]:
    """Temporary folders next to ``path``: of saves that crashed, or of one that is running."""
    if isinstance(path, UrlPath) or not path.parent.is_dir():
        return []
    return [entry for entry in path.parent.iterdir() if entry.name != path.name and final_name(entry) == path.name]


def final_name(entry: Path) -> str:
    """``step-100`` for ``step-100`` and for its temporary folders."""
    for suffix in (_SAVING, _REPLACED):
        name, found, _ = entry.name.rpartition(suffix)
        if found and name.startswith("."):
            return name[1:]
    return entry.name


def was_replaced(folder: Path) -> bool:
    """Whether a temporary folder is the old folder that a save replaced, and not the new one."""
    return _REPLACED in folder.name


def check_replaceable(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Raise :class:`CheckpointError` unless ``path`` does not exist, is an empty folder, or ``is_ours``."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())) or is_ours(path):
        return
    raise CheckpointError(f"{path} exists and is not {what}; choose another path or remove it")


# -- one writer --------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing to ``path`` in the block, if the file system supports locks.

    Raises:
        CheckpointError: another process is writing to it.
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
                _write_holder(descriptor)
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise CheckpointError(f"{holder} is saving to {path}; wait for it, or choose another path") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous holder removed the file between open() and flock()


def _write_holder(descriptor: int) -> None:
    """Write this process's id and host into the lock file, for the error in other processes."""
    with suppress(OSError):  # the disk may be full
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
        logger.debug("the file system does not support locks: %s", error)


def _is_same(descriptor: int, file: Path) -> bool:
    """Whether ``file`` is still the file that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


# -- recovery after crashes --------------------------------------------------------------------------------------------


def _recover(path: Path, kind: FolderKind) -> None:
    """Finish what a crash interrupted: if nothing is at ``path``, move a complete folder there. Remove the others."""
    found = leftovers(path)
    complete = [] if path.exists() else [folder for folder in found if kind.is_complete(folder)]
    if complete:
        newest = min(complete, key=was_replaced)  # the new folder before the one that it replaces
        os.replace(newest, path)
        found.remove(newest)
        sync(path.parent)
    for folder in found:
        if was_replaced(folder) and path.exists():
            _remove_replaced(folder, path, kind)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def recover_interrupted(parent: Path, kind: FolderKind, is_selected: Callable[[str], bool]) -> None:
    """Finish what crashes interrupted at the selected names in ``parent``, except where a save is running."""
    if isinstance(parent, UrlPath) or not parent.is_dir():
        return
    names = {final_name(entry) for entry in parent.iterdir() if final_name(entry) != entry.name}
    names |= {entry.name[1:-5] for entry in parent.glob(".*.lock")}
    for name in filter(is_selected, names):
        with suppress(OSError, CheckpointError), locked(parent / name):
            _recover(parent / name, kind)


def remove_folder(path: Path) -> None:
    """Remove a local folder at once: after a crash :func:`recover_interrupted` removes the rest."""
    hidden = _temporary_path(path, _REPLACED)
    with suppress(OSError):
        os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _remove_replaced(old: Path, new: Path, kind: FolderKind) -> None:
    """Move the user's files from the replaced folder to the new one, and remove the rest."""
    try:
        _move_user_files(old, new, set(kind.own_files(old)))
    except OSError as error:
        logger.warning("files in %s could not be moved to %s: %s", old, new, error)
        return
    shutil.rmtree(old, ignore_errors=True)


def _move_user_files(old: Path, new: Path, own: set[str], inside: str = "") -> None:
    """Move all but ``own``, and what the new folder has too. A folder that is only the user's moves whole."""
    for entry in list((old / inside).iterdir()):
        name = f"{inside}{entry.name}"
        exists = os.path.lexists(new / name)
        is_shared = exists or any(file.startswith(f"{name}/") for file in own)
        if is_shared and entry.is_dir() and not entry.is_symlink():
            _move_user_files(old, new, own, f"{name}/")
        elif name not in own and not exists:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(entry, new / name)


def _is_working_directory(path: Path) -> bool:
    with suppress(OSError):  # it may have been removed
        return path == Path.cwd()
    return False


def _temporary_path(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}{suffix}{secrets.token_hex(4)}"


# -- flushing to disk --------------------------------------------------------------------------------------------------


def sync_files(folder: Path) -> None:
    """Wait until the content of all files in a folder is on disk. :meth:`LocalStorage.commit` waits for the entries."""
    for file in folder.rglob("*"):
        if file.is_file():
            sync(file)


def sync(path: Path) -> None:
    """Wait until a file's content or a folder's entries are on disk."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Where folders are written: local file systems, and URLs.

One writer at a time writes a folder, which appears at its path when it is complete.

On a local file system ``step-100`` is written as ``.step-100.saving-<token>``, flushed to disk and renamed. A folder
that it replaces is renamed to ``.step-100.replaced-<token>`` first. Files that its writer did not write are then moved
from there into the new folder, and the rest is removed. After a crash at least one complete folder has one of the three
names. The writer holds a lock on ``.step-100.lock``, which the operating system releases when the process ends.

A network disk (NFS) is a local path whose client believes what it has seen for up to a minute, although other hosts
change it. :func:`ask_server` makes it look where that matters; an empty folder counts as nothing.

URLs (fsspec: ``s3://``, ``gs://``, ``hf://``, ``memory://``, ...) have no atomic rename. A save writes its files to a
new folder inside the checkpoint's folder, ``step-100/data-<token>``, and then ``step-100/lightstep.json``, a single
object that names the new folder. After that it removes the folders of older saves. There are no locks: if two processes
save to one URL, one of them finds its files removed and raises.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from filelock import FileLock, Timeout

from lightstep.checkpoint.errors import CheckpointError
from lightstep.crc32 import crc32
from lightstep.distributed import Ranks
from lightstep.extras import needs
from lightstep.paths import is_url, local_path

logger = logging.getLogger(__name__)

_WRITE_BEHIND = 8 << 20
"""Bytes after which the operating system is told to write them to disk."""

_SAVING, _REPLACED = ".saving-", ".replaced-"
_REMOVED = ".nfs"
"""How the name of a file begins that was removed from a network disk while it was open."""
_DATA = re.compile(r"data-[0-9a-f]{16}")


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


# -- local file systems ------------------------------------------------------------------------------------------------


class LocalStorage:
    """A local or mounted file system."""

    @contextmanager
    def new_folder(self, path: Path, kind: FolderKind) -> Iterator[Path]:
        """A temporary folder for what :meth:`commit` will put at ``path``, which is locked in the block.

        An error in the block removes the folder, which is next to ``path``.

        Raises:
            CheckpointError: something else is at ``path``, or another process is writing to it.
        """
        if _is_working_directory(path):
            raise CheckpointError(f"{path} is the working directory, which cannot be replaced; choose a folder in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):  # before the checks: another process may be replacing the folder
            ask_server(path)
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
        """A new file. Once it is closed, its content survives a crash of the machine."""
        return io.BufferedWriter(_SyncedFile(file, "wb"))

    def read(self, file: Path, start: int, buffer: memoryview) -> int:
        """Fill the buffer from ``start`` of a file on; returns how many bytes the file has there, at most as many."""
        with file.open("rb") as stream:  # one call of an unbuffered file reads less than 2 GiB
            stream.seek(start)
            return stream.readinto(buffer)

    def commit(self, folder: Path, path: Path, kind: FolderKind) -> None:
        """Replace ``path`` with the complete ``folder``: two renames if ``path`` has content, else one.

        A failure leaves ``path`` as it was.
        """
        for parent, _, _ in os.walk(folder):
            sync(Path(parent))
        replaced = None if is_nothing(path) else _temporary_path(path, _REPLACED)
        try:
            if replaced is not None:
                _rename(path, replaced)
            _rename(folder, path)
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
        """Remove these files in this order, then empty folders. The user's files stay."""
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


# -- URLs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UrlPath:
    """The methods of ``pathlib.Path`` that checkpoints need, for a URL. Listings are not cached: others may write."""

    _url: str

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> UrlPath:
        above = self._url.rpartition("/")[0]
        return UrlPath(above) if "://" in above else self

    def fsspec(self) -> tuple[Any, str]:
        """fsspec's file system for this URL, and the path in it."""
        with needs("urls"):
            from fsspec.core import url_to_fs
        try:
            system, path = url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # the protocol is unknown, or its library is not installed
            raise CheckpointError(f"{self._url} cannot be reached: {error}") from error
        return system, path

    def resolve(self) -> UrlPath:
        return self

    def exists(self) -> bool:
        return self._kind() is not None

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        """``None`` if nothing is there. (fsspec's ``exists`` and ``isdir`` also say no if the network fails.)"""
        system, path = self.fsspec()
        try:
            return str(system.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def iterdir(self) -> Iterator[UrlPath]:
        system, path = self.fsspec()
        return (self / entry.rstrip("/").rpartition("/")[2] for entry in system.ls(path, detail=False))

    def stat(self) -> Any:
        system, path = self.fsspec()
        return SimpleNamespace(st_size=int(system.size(path)))

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        system, path = self.fsspec()
        return cast(BinaryIO, system.open(path, mode))

    def read_bytes(self) -> bytes:
        system, path = self.fsspec()
        return bytes(system.cat_file(path))


class UrlStorage:
    """A storage that fsspec reaches, with the methods of :class:`LocalStorage`. Every path is a :class:`UrlPath`."""

    @contextmanager
    def new_folder(self, path: Path, kind: FolderKind) -> Iterator[Path]:
        # List before the check of the manifest: another process may finish its save in between.
        has_others = any(not _DATA.fullmatch(entry.name) for entry in _entries(path))
        if path.is_file() or (has_others and not kind.is_ours(path)):
            raise CheckpointError(f"{path} exists and is not {kind.name}; choose another path or remove it")
        folder = path / f"data-{secrets.token_hex(8)}"
        system, name = cast(UrlPath, folder).fsspec()
        system.makedirs(name, exist_ok=True)
        try:
            yield folder
        except BaseException:
            if not _is_named(folder, path, kind):
                _remove(folder)
            raise

    def create(self, file: Path) -> BinaryIO:
        return file.open("wb")

    def read(self, file: Path, start: int, buffer: memoryview) -> int:
        system, path = cast(UrlPath, file).fsspec()
        content = system.cat_file(path, start=start, end=start + len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def commit(self, folder: Path, path: Path, kind: FolderKind) -> None:
        """Remove the folders of earlier saves: the manifest at ``path`` names the new one."""
        for entry in _entries(path):
            if _DATA.fullmatch(entry.name) and entry != folder:
                _remove(entry)

    def remove(self, folder: Path, own: Iterable[str]) -> None:
        with suppress(Exception):  # as in :func:`_remove`
            for name in own:
                system, path = cast(UrlPath, folder / name).fsspec()
                with suppress(FileNotFoundError):
                    system.rm_file(path)
            for entry in _entries(folder):
                if _DATA.fullmatch(entry.name):
                    _remove(entry)
            if not _entries(folder):
                _remove(folder)


def _entries(folder: Path) -> list[Path]:
    """What is in the folder; nothing if it does not exist."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_named(folder: Path, path: Path, kind: FolderKind) -> bool:
    """Whether what is at ``path`` consists of files in ``folder``, or this cannot be found out."""
    try:
        return any(name.startswith(f"{folder.name}/") for name in kind.own_files(path))
    except FileNotFoundError:
        return False
    except Exception:  # an error of the network, of whatever library
        return True


def _remove(folder: Path) -> None:
    """What a server refuses to remove stays: a save that is whole must not fail for it. Its libraries have errors of
    their own (gcsfs's are no ``OSError``)."""
    system, path = cast(UrlPath, folder).fsspec()
    with suppress(Exception):
        system.rm(path, recursive=True)


# -- either of them ----------------------------------------------------------------------------------------------------


def location(path: str | os.PathLike[str]) -> Path:
    """A ``Path`` for a local path; a :class:`UrlPath`, with the same methods, for a URL (``s3://bucket/run/step-100``).

    Raises:
        CheckpointError: a ``Path`` was made of a URL.
    """
    if isinstance(path, UrlPath) or "://" in str(path):
        return cast(Path, UrlPath(str(path).rstrip("/")))
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


def storage_for(path: Path) -> LocalStorage | UrlStorage:
    """The storage that ``path`` is in."""
    return UrlStorage() if isinstance(path, UrlPath) else LocalStorage()


def write_file(path: Path, content: bytes) -> tuple[int, int]:
    """Write ``content`` to a new file, flush it to disk, and return its size and CRC-32."""
    with storage_for(path).create(path) as stream:
        stream.write(content)
    return len(content), crc32(content)


@contextmanager
def new_shared_folder(path: Path, kind: FolderKind, ranks: Ranks) -> Iterator[Path]:
    """:meth:`LocalStorage.new_folder` for ranks that write into one folder. The first rank creates it.

    Raises:
        CheckpointError: a rank does not see the folder.
    """
    with ExitStack() as stack:
        folder = ranks.together(lambda: stack.enter_context(storage_for(path).new_folder(path, kind)), only_first=True)
        ranks.together(lambda: _refuse_unseen(folder))
        yield folder


def _refuse_unseen(folder: Path) -> None:
    if not isinstance(folder, UrlPath) and not folder.exists():
        raise CheckpointError(
            f"{folder.parent} on {socket.gethostname()} is not the folder that the first rank sees; save to a disk "
            "that all hosts share"
        )


@contextmanager
def temporary_mark(path: Path) -> Iterator[Path | None]:
    """An empty folder beside ``path`` in the block, which other hosts see on the same disk.

    ``None`` for a URL, and where none can be made: the disk may be full until older checkpoints are removed. After a
    crash the next save to ``path`` removes the folder.
    """
    mark: Path | None = None
    if not isinstance(path, UrlPath):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            (made := _temporary_path(path, _SAVING)).mkdir()
            mark = made
    try:
        yield mark
    finally:
        if mark is not None:
            with suppress(OSError):
                mark.rmdir()


@contextmanager
def new_file(path: Path, is_ours: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """A temporary path for a single file, which replaces ``path`` at the end of the block. An error in the block leaves
    ``path`` as it was.

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
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


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
    if is_nothing(path) or is_ours(path):
        return
    raise CheckpointError(f"{path} exists and is not {what}; choose another path or remove it")


def is_nothing(path: Path) -> bool:
    """Whether nothing is at ``path``, or an empty folder (which no URL has). It may come and go: :func:`ask_server`."""
    if not path.exists():  # this also renews the stale handle of a network disk, which `scandir` does not
        return True
    if isinstance(path, UrlPath):
        return False
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


# -- network disks -----------------------------------------------------------------------------------------------------


def ask_server(path: Path) -> None:
    """Let the client of a network disk find out whether a folder is at ``path`` that it believes is not there.

    It asks nobody before it says so, but it does to make a folder.
    """
    if not isinstance(path, UrlPath) and not path.exists():
        with suppress(OSError):
            path.mkdir()
            path.rmdir()


def is_seen(mark: Path, path: Path) -> bool:
    """Whether this host, which saves to ``path``, has the :func:`temporary_mark` that another one has made."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # the client may believe that it is not there
    return mark.exists()


def _rename(source: Path, target: Path) -> None:
    """Rename a folder.

    If the answer of a network disk's server is lost, the client asks again, and is told that there is no ``source``.
    """
    folder = source.stat()
    try:
        os.replace(source, target)
    except FileNotFoundError:
        ask_server(target)
        if not (target.exists() and os.path.samestat(folder, target.stat())):
            raise


# -- one writer --------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing to ``path`` in the block, if the file system supports locks.

    Raises:
        CheckpointError: another process is writing to it.
    """
    file = path.parent / f".{path.name}.lock"
    lock = FileLock(file, timeout=0, thread_local=False)  # another thread may release it
    try:
        lock.acquire()
    except Timeout:
        raise CheckpointError(f"{_holder(file)} is saving to {path}; wait for it, or choose another path") from None
    except (OSError, NotImplementedError) as error:
        logger.debug("the file system does not support locks: %s", error)
    try:
        with suppress(OSError):  # the disk may be full
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def _holder(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace") or "another process"
    return "another process"


# -- recovery after crashes --------------------------------------------------------------------------------------------


def _recover(path: Path, kind: FolderKind) -> None:
    """Finish what a crash interrupted: if nothing is at ``path``, move a complete folder there. Remove the others."""
    found = leftovers(path)
    complete = [folder for folder in found if kind.is_complete(folder)]  # first: ``path`` may be an old name of one
    if complete and is_nothing(path):
        newest = min(complete, key=was_replaced)  # the new folder before the one that it replaces
        _rename(newest, path)
        found.remove(newest)
        sync(path.parent)
    for folder in found:
        if was_replaced(folder) and not is_nothing(path):
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
        if entry.name.startswith(_REMOVED):
            continue
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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

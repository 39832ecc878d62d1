"""Checkpoints at URLs, through fsspec: ``s3://``, ``gs://``, ``hf://``, ``memory://`` and every other protocol it has.

Object stores have no atomic rename. A save writes its files to a new folder inside the checkpoint's folder,
``step-100/data-<token>``, and then writes ``step-100/lightstep.json``, a single object that names the new folder. After
that it removes the folders of older saves. There are no locks: if two processes save to one URL, one of them finds its
files removed and raises.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from lightstep.checkpoint.errors import CheckpointError
from lightstep.extras import needs

if TYPE_CHECKING:
    from lightstep.checkpoint.storage import FolderKind

_DATA = re.compile(r"data-[0-9a-f]{16}")


class UrlPath:
    """The methods of ``pathlib.Path`` that checkpoints need, for a URL. Listings are not cached: others may write."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"UrlPath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlPath) and str(other) == self._url

    def __hash__(self) -> int:
        return hash(self._url)

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
        system, path = self.fsspec()
        return bool(system.exists(path))

    def is_file(self) -> bool:
        system, path = self.fsspec()
        return bool(system.isfile(path))

    def is_dir(self) -> bool:
        system, path = self.fsspec()
        return bool(system.isdir(path))

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
    """A storage that fsspec reaches. Every path is a :class:`UrlPath`."""

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
            _remove(folder)
            raise

    def create(self, file: Path) -> BinaryIO:
        return file.open("wb")

    def read(self, file: Path, start: int, size: int) -> bytes:
        system, path = cast(UrlPath, file).fsspec()
        return bytes(system.cat_file(path, start=start, end=start + size))

    def commit(self, folder: Path, path: Path, kind: FolderKind) -> None:
        """Remove the folders of earlier saves: the manifest at ``path`` names the new one."""
        for entry in _entries(path):
            if _DATA.fullmatch(entry.name) and entry != folder:
                _remove(entry)

    def remove(self, folder: Path, own: Iterable[str]) -> None:
        with suppress(OSError):
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


def _remove(folder: Path) -> None:
    system, path = cast(UrlPath, folder).fsspec()
    with suppress(OSError):
        system.rm(path, recursive=True)

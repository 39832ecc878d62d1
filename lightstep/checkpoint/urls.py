"""Checkpoints at URLs, through fsspec: ``s3://``, ``gs://``, ``hf://``, ``memory://`` and what else it knows.

There are no renames to rely on. A save writes into a folder of its own inside the checkpoint's,
``step-100/data-<token>``, and then ``step-100/lightstep.json``, which names it: one object, there or not. Whatever
older saves left is removed after that. Nothing keeps two savers apart here; one of them finds its files gone and says
so.
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
    """What is used here of ``pathlib.Path``, for a URL. Listings are not cached: other processes write too."""

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
        """fsspec's file system, and the path in it."""
        with needs("urls"):
            from fsspec.core import url_to_fs
        try:
            system, path = url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # the protocol's own library is missing, or there is none
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
    """What fsspec reaches. Paths are :class:`UrlPath` under their other name."""

    @contextmanager
    def new_folder(self, path: Path, kind: FolderKind) -> Iterator[Path]:
        system, place = cast(UrlPath, path).fsspec()
        others = any(not _DATA.fullmatch(entry.name) for entry in _inside(path))  # first: another saver may end now
        if system.isfile(place) or (others and not kind.is_ours(path)):
            raise CheckpointError(f"{path} exists and is not {kind.name}; choose another path or remove it")
        folder = path / f"data-{secrets.token_hex(8)}"
        system, place = cast(UrlPath, folder).fsspec()
        system.makedirs(place, exist_ok=True)
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
        """The manifest at ``path`` names the folder: what earlier saves left can go."""
        for entry in _inside(path):
            if _DATA.fullmatch(entry.name) and entry != folder:
                _remove(entry)

    def remove(self, folder: Path, own: Iterable[str]) -> None:
        with suppress(OSError):
            for name in own:
                system, path = cast(UrlPath, folder / name).fsspec()
                with suppress(FileNotFoundError):
                    system.rm_file(path)
            for entry in _inside(folder):
                if _DATA.fullmatch(entry.name):
                    _remove(entry)
            if not _inside(folder):
                _remove(folder)


def _inside(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:  # nothing is there
        return []


def _remove(folder: Path) -> None:
    system, path = cast(UrlPath, folder).fsspec()
    with suppress(OSError):
        system.rm(path, recursive=True)

"""Where a conversion goes: written aside, put in its place when it is whole; nothing foreign is ever replaced."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightstep.checkpoint.format import CheckpointError, commit, discard, sync


def refuse_overlap(source: Path, destination: Path) -> None:
    """Replacing the destination must not touch the source, which is read until the end."""
    source, destination = source.resolve(), destination.resolve()
    if source == destination or source in destination.parents or destination in source.parents:
        raise CheckpointError(f"{destination} and {source} lie in each other; choose a destination outside the source")


@contextmanager
def new_folder(path: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder beside ``path`` to write into; it takes the place of ``path`` at the end, or is removed after an error.

    Raises:
        CheckpointError: ``path`` is there, is not empty, and ``is_ours`` says no.
    """
    refuse_foreign(path, is_ours)
    path.parent.mkdir(parents=True, exist_ok=True)
    _settle(path)
    temporary = path.parent / f".{path.name}.saving-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        yield temporary
        _sync_all(temporary)
        commit(temporary, path)
    except BaseException:
        discard(temporary)
        raise


@contextmanager
def new_file(path: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """The same for one file."""
    refuse_foreign(path, is_ours)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.saving-*"):
        leftover.unlink()
    temporary = path.parent / f".{path.name}.saving-{secrets.token_hex(4)}"
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def refuse_foreign(path: Path, is_ours: Callable[[Path], bool]) -> None:
    """Raise unless ``path`` is free, an empty folder, or ours to replace."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())) or is_ours(path):
        return
    raise CheckpointError(f"{path} exists and was not written by a conversion; choose another path or remove it")


def _settle(path: Path) -> None:
    """Finish what a crash between two renames left: the folder that was to be replaced goes back."""
    for replaced in path.parent.glob(f".{path.name}.replaced-*"):
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(replaced, path)
    for leftover in path.parent.glob(f".{path.name}.saving-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    for entry in folder.rglob("*"):
        sync(entry)
    sync(folder)

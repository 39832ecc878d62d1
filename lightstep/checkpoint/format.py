"""What a checkpoint is on disk: one folder, whole or not there.

::

    step-100/
        lightstep.json    the manifest: versions, parameter names, sizes of all files; written last, it means "whole"
        tensors.json      where every piece of every tensor lies in the .distcp files
        state.pt          everything that is no tensor of model or optimizer: torch.save, loaded with weights_only=True
        __0_0_0.distcp    tensors, written by torch.distributed.checkpoint, each rank its own shards
        .metadata         torch's own index, for torch's own tools; never read here, because it is a pickle

What sharding.kind deepspeed writes has DeepSpeed's own files in place of the tensors (``deepspeed_checkpoint.py``).

A checkpoint is written into a hidden sibling (``.step-100.saving-<token>``), flushed to disk, and renamed. When it
replaces another one, that one is renamed aside first (``.step-100.replaced-<token>``) and removed after. A crash leaves
at least one whole folder under one of the three names, and :func:`find_checkpoint` finds it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightstep.checkpoint.ranks import ElsewhereError, Ranks

MANIFEST = "lightstep.json"
INDEX = "tensors.json"
STATE = "state.pt"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or cannot be loaded; the message names the path and the cause."""


def begin(path: Path) -> Path:
    """Make the folder to write into, next to ``path``; what crashed saves left behind is settled or removed.

    Raises:
        CheckpointError: ``path`` is something other than a checkpoint or an empty folder.
    """
    _refuse_foreign(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    settle(path)
    temporary = path.parent / f".{path.name}.saving-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, path: Path) -> None:
    """Put the whole checkpoint in ``temporary`` in the place of ``path``. A failure leaves ``path`` as it was."""
    aside = None
    if path.exists() and any(path.iterdir()):
        aside = path.parent / f".{path.name}.replaced-{secrets.token_hex(4)}"
    try:
        if aside is not None:
            os.replace(path, aside)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        if not temporary.exists():
            os.replace(path, temporary)
        if aside is not None and aside.exists():
            os.replace(aside, path)
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def settle(path: Path) -> None:
    """Finish what a crash interrupted: the newest whole leftover takes an empty place, the others are removed."""
    leftovers = _leftovers(path)
    if leftovers and not path.exists():
        whole = [folder for folder in leftovers if is_complete(folder)]
        if whole:
            newest = max(whole, key=_age)
            os.replace(newest, path)
            leftovers.remove(newest)
            sync(path.parent)
    for folder in leftovers:
        shutil.rmtree(folder, ignore_errors=True)


def find_checkpoint(path: Path) -> Path:
    """The whole checkpoint that ``path`` stands for: itself, or what a crash between two renames left beside it.

    Raises:
        CheckpointError: there is none, or it is incomplete.
    """
    if not path.exists():
        whole = [folder for folder in _leftovers(path) if is_complete(folder)]
        if not whole:
            raise CheckpointError(f"{path} does not exist")
        return max(whole, key=_age)
    if not (path / MANIFEST).exists() and (newest := latest_checkpoint(path)) is not None:
        raise CheckpointError(f"{path} is a folder of checkpoints; the newest is {newest}")
    read_manifest(path)
    return path


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint directly in ``folder`` (by the time it was saved), or ``None``."""
    root = Path(folder)
    if not root.is_dir():
        return None
    whole = [entry for entry in root.iterdir() if entry.is_dir() and is_complete(entry)]
    usable = [entry for entry in whole if _name_of(entry) == entry.name or not (root / _name_of(entry)).exists()]
    if not usable:
        return None
    return root / _name_of(max(usable, key=lambda entry: (_age(entry), entry.name)))


def is_complete(folder: Path) -> bool:
    """Whether the manifest is there and every file it lists has the size it lists."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def refuse_engine_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises :class:`CheckpointError` when DeepSpeed wrote the tensors: only it can read them."""
    if manifest.get("deepspeed"):
        raise CheckpointError(
            f"{folder} holds DeepSpeed's own files (sharding.kind deepspeed); for another strategy convert it first: "
            f"lightstep checkpoint convert {folder} DESTINATION --to lightstep"
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Raises:
        CheckpointError: not a checkpoint, incomplete, or of a newer format.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = int(manifest["format"]), dict(manifest["files"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error_text(error)}") from error
    if version > FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {version}; this lightstep reads up to {FORMAT}")
    for name, size in files.items():
        _check_size(folder, name, size)
    return manifest


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Declare the checkpoint whole: every file in ``folder`` is listed with its size, and all is flushed to disk."""
    found = sorted(folder.rglob("*"))
    files = {entry.relative_to(folder).as_posix(): entry.stat().st_size for entry in found if entry.is_file()}
    for entry in [*found, folder]:
        sync(entry)
    write_file(folder / MANIFEST, json.dumps({"format": FORMAT, **content, "files": files}, indent=1).encode())
    sync(folder)


def write_file(path: Path, content: bytes) -> None:
    """Write ``content`` and wait until the disk has it."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def discard(temporary: Path) -> None:
    """Remove what a failed save has written so far."""
    shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def saving(path: Path, ranks: Ranks) -> Iterator[Path]:
    """The folder that all ranks write into, removed after an error; the first rank's :func:`commit` ends the block."""
    temporary = ranks.together(lambda: begin(path), only_first=True)
    try:
        yield temporary
    except BaseException:
        if ranks.is_first:
            discard(temporary)
        raise


def sync(path: Path) -> None:
    """Wait until the disk has a file's content or a folder's entries."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Whatever goes wrong becomes one :class:`CheckpointError` with the path; a type error stays one, with the path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except ElsewhereError as error:
        kind = TypeError if error.kind == "TypeError" else CheckpointError
        raise kind(f"{what}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{what}: {error_text(error)}") from error


def error_text(error: BaseException) -> str:
    """The cause in a few words: the operating system's own when there is one anywhere in the chain."""
    for link in chain(error):
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and everything that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _check_size(folder: Path, name: str, size: int) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{folder / MANIFEST} lists {name!r}, which is no file name")
    try:
        found = (folder / name).stat().st_size
    except OSError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {name} is missing") from None
    if found != size:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {name} has {found} bytes of {size}")


def _refuse_foreign(path: Path) -> None:
    """Saving replaces the folder: make sure that it is ours to replace."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} exists and is not a checkpoint; choose another path or remove it")


def _leftovers(path: Path) -> list[Path]:
    if not path.parent.is_dir():
        return []
    return [entry for entry in path.parent.iterdir() if entry.name != path.name and _name_of(entry) == path.name]


def _name_of(entry: Path) -> str:
    """``step-100`` for ``step-100`` and for what a crash leaves of it."""
    for mark in (".saving-", ".replaced-"):
        name, found, _ = entry.name.rpartition(mark)
        if found and name.startswith("."):
            return name[1:]
    return entry.name


def _age(folder: Path) -> int:
    """When it was saved, in nanoseconds since 1970."""
    return int(json.loads((folder / MANIFEST).read_text()).get("saved_at", 0))

"""Folders of accelerate and the Trainer: whole ones appear under their names, damaged ones are found, old ones go."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lightstep.checkpoint.background import PendingSave, writer_group
from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.layout import has_complete_checkpoint, holds_checkpoint
from lightstep.checkpoint.storage import (
    FolderKind,
    new_shared_folder,
    recover_interrupted,
    remove_folder,
    storage_for,
    sync,
)
from lightstep.checkpoint.verify import CHECKPOINT, FILE_LIST, check_listed_files, read_file_list, write_file_list
from lightstep.distributed import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedFolders:
    """The folders that a library saves, with a checkpoint in ``lightstep/`` and small files beside it.

    Args:
        name: of one of them, for messages: ``"a checkpoint of the Trainer"``.
        prefix: what the names of numbered folders begin with; a number follows.
        patterns: the files beside the checkpoint.
        is_ours: whether a folder may be replaced.
        has_files: whether the library's files are all there, if no list of them is.
        is_resumable: whether a whole folder has what a run continues from.
    """

    name: str
    prefix: str
    patterns: tuple[str, ...]
    is_ours: Callable[[Path], bool]
    has_files: Callable[[Path], bool]
    is_resumable: Callable[[Path], bool] = lambda _: True

    def is_whole(self, folder: Path) -> bool:
        """Whether all files are there, with their sizes if there is a list of them."""
        try:
            if read_file_list(folder) is not None:
                return True
        except CheckpointError:
            return False
        checkpoint = folder / CHECKPOINT
        return self.has_files(folder) and (not holds_checkpoint(checkpoint) or has_complete_checkpoint(checkpoint))

    def own_files(self, folder: Path) -> set[str]:
        """The files that a save has written, by their paths in ``folder``."""
        patterns = (f"{CHECKPOINT}/**/*", *self.patterns)
        found = {file.relative_to(folder).as_posix() for pattern in patterns for file in folder.glob(pattern)}
        with suppress(CheckpointError):
            found |= set((read_file_list(folder) or {"files": ()})["files"])
        return {*found, FILE_LIST}

    @property
    def kind(self) -> FolderKind:
        return FolderKind(self.name, is_ours=self.is_ours, is_complete=self.is_whole, own_files=self.own_files)

    def number(self, name: str) -> int | None:
        """The number in a name; ``None`` if it is the name of something else."""
        found = re.fullmatch(rf"{re.escape(self.prefix)}(\d+)", name)
        return None if found is None else int(found[1])

    def numbered(self, parent: Path) -> dict[Path, int]:
        """The numbered folders, the oldest first: times depend on the clock. Other folders are the user's."""
        found = {path: self.number(path.name) for path in parent.glob(f"{self.prefix}*") if path.is_dir()}
        numbers = {path: number for path, number in found.items() if number is not None}
        return dict(sorted(numbers.items(), key=lambda item: item[1]))

    def newest(self, parent: Path, below: int | None = None) -> Path | None:
        """The newest folder to continue from; a warning names newer ones, whose save was interrupted.

        Args:
            below: only those with a lower number.
        """
        found = [path for path, number in self.numbered(parent).items() if below is None or number < below]
        for newer, folder in enumerate(reversed(found)):
            if self.is_whole(folder) and self.is_resumable(folder):
                if newer:
                    names = ", ".join(path.name for path in found[-newer:])
                    logger.warning(
                        "lightstep: the save of %s was interrupted; the newest whole one is %s", names, folder
                    )
                return folder
        return None

    def rotate(self, saved: Path, limit: int | None, best: str | None = None) -> None:
        """Keep ``limit`` whole folders up to ``saved``, which has just been saved, and remove the others before it.

        The best one counts, as in the Trainer. It is always kept, and so are ``saved`` and the newest one to resume
        from. Folders with higher numbers stay: a run that was resumed from an earlier one will replace them.
        """
        if limit is None or limit <= 0:
            return
        numbers = self.numbered(saved.parent)
        earlier = [path for path, number in reversed(numbers.items()) if number <= numbers[saved]]
        whole = [path for path in earlier if path == saved or self.is_whole(path)]
        if len(whole) <= limit:
            return
        kept = {saved, *(path for path in whole if is_same(path, best)), *list(filter(self.is_resumable, whole))[:1]}
        for path in whole:
            if len(kept) < limit:
                kept.add(path)
        for path in earlier:
            if path not in kept:
                remove_folder(path)

    def remove_leftovers(self, parent: Path, besides: str | None = None) -> None:
        """Remove hidden folders of saves whose process was killed, but for that of the name ``besides``."""
        recover_interrupted(parent, self.kind, lambda name: name != besides and self.number(name) is not None)


def is_same(folder: Path, other: str | None) -> bool:
    return other is not None and folder.resolve() == Path(other).resolve()


def check_before_load(folder: Path) -> None:
    """Compare the files beside the checkpoint with their list, on the first rank; a warning says that there is none.

    Raises:
        DamagedError: a file is damaged; the message names it. All ranks raise.
    """

    def check() -> None:
        if folder.is_dir() and not check_listed_files(folder):
            logger.warning("%s has no %s: damage in its files would not be noticed; save again", folder, FILE_LIST)

    with checkpoint_errors(f"{folder} was not loaded"):
        Ranks().together(check, only_first=True)


class PendingFolder(PendingSave):
    """A handle for a folder with a checkpoint in it: ``done()`` and ``result(timeout=None)``, the folder's path.

    The files are written to ``folder``, in a hidden folder beside ``path``. Its checkpoint may be written by a thread;
    when that has ended, ``folder`` is renamed to ``path``. Without ``checkpoint`` that happens at the end of the block.
    All ranks use it::

        with PendingFolder(path, folders, rotate) as pending:
            ...  # small files into pending.folder
            pending.checkpoint = strategy.save_checkpoint(pending.folder / CHECKPOINT, ..., asynchronous=True)
            pending.write_later = ...  # what is written after the checkpoint, on the first rank

    Args:
        path: where the folder appears. An older folder is replaced; files in it that no save wrote are kept.
        folders: what may be replaced.
        rotate: called on the first rank when the folder is in its place.

    If the block fails on one rank, it is left with an error on all of them, and the hidden folder is removed. In the
    block the others may only wait in :meth:`Ranks.together <lightstep.distributed.Ranks.together>`.

    Raises:
        CheckpointError: another process is saving to ``path``, something else is there, or another rank has failed.
    """

    checkpoint: PendingSave | None = None
    write_later: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, path: Path, folders: SavedFolders, rotate: Callable[[], None]) -> None:
        super().__init__()
        self.path, self._place, self._kind, self._rotate = path, path.resolve(), folders.kind, rotate
        self._ranks = Ranks()
        self._hidden_folder = ExitStack()

    def __enter__(self) -> PendingFolder:
        with checkpoint_errors(f"{self.path} was not saved"):
            hidden = new_shared_folder(self._place, self._kind, self._ranks)
            self.folder = self._hidden_folder.enter_context(hidden) / Path(os.path.abspath(self.path)).name
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            if isinstance(error, Exception):  # else this process is about to end
                self._ranks.leave(error)
            self._remove(error)
            return
        try:
            with checkpoint_errors(f"{self.path} was not saved"):
                self._ranks.together(lambda: None)  # the small files of every rank are written
        except Exception as failure:
            self._remove(failure)
            raise
        if self.checkpoint is None:
            self._put_in_place(self._ranks)
            self.set_result(self.path)
            return
        writers = writer_group(self._ranks)
        self.checkpoint.add_done_callback(lambda _: self._complete(writers))

    def _remove(self, error: BaseException) -> None:
        """Remove the hidden folder, to which nobody writes any more."""
        if self.checkpoint is not None and isinstance(error, Exception):
            self.checkpoint.exception()
        self._hidden_folder.__exit__(type(error), error, error.__traceback__)

    def _complete(self, writers: Ranks) -> None:
        """The checkpoint has been written, or has failed on every rank."""
        assert self.checkpoint is not None
        try:
            self._put_in_place(writers, self.checkpoint.exception())
            self.set_result(self.path)
        except BaseException as error:
            if self.checkpoint.exception() is None:  # else the checkpoint reports it, at the latest when Python exits
                logger.error("%s", error)
            self.set_exception(error)

    def _put_in_place(self, ranks: Ranks, error: BaseException | None = None) -> None:
        """Rename ``folder`` to ``path``, or remove it and raise ``error``."""
        with self._hidden_folder, checkpoint_errors(f"{self.path} was not saved"):
            if error is not None:
                raise error
            ranks.together(self._commit, only_first=True)

    def _commit(self) -> None:
        self.write_later()
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        beside = [file for file in files if file.relative_to(self.folder).parts[0] != CHECKPOINT]
        for file in beside:  # the others are on the disk
            sync(file)
        write_file_list(self.folder, [file.relative_to(self.folder).as_posix() for file in beside])
        storage_for(self._place).commit(self.folder, self._place, self._kind)
        self.folder.parent.rmdir()
        self._rotate()

    def result(self, timeout: float | None = None) -> Path:
        self.exception(timeout)  # raises TimeoutError if the save is still running
        if self.checkpoint is not None:
            with suppress(Exception):
                self.checkpoint.result()  # its error is raised here
        return super().result()

    def finish(self) -> None:
        """Wait on every rank; raise the error, unless ``result()`` or the optimizer's step has raised it already."""
        self.exception()
        self._ranks.together(self._raise_once)

    def _raise_once(self) -> None:
        if self.checkpoint is None or not self.checkpoint._result_seen:
            self.raise_if_failed()


class SavesFolders:
    """A library's object whose saves may be pending, one at a time."""

    _pending_save: PendingFolder | None = None

    def _finish_save(self) -> None:
        """Wait for the pending save on every rank, if there is one, and raise its error."""
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            pending.finish()

"""Folders that appear when all of their files are whole, and may be written while training goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from lightstep.checkpoint.background import PendingSave, writer_group
from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.storage import FolderKind, new_shared_folder, storage_for, sync
from lightstep.checkpoint.verify import CHECKPOINT, FILE_LIST, check_listed_files, read_file_list, write_file_list
from lightstep.distributed import Ranks

logger = logging.getLogger(__name__)


class PendingFolder(PendingSave):
    """A handle for a folder with a checkpoint in it: ``done()`` and ``result(timeout=None)``, the folder's path.

    The files are written to ``folder``, in a hidden folder beside ``path``. Its checkpoint may be written by a thread;
    when that has ended, ``folder`` is renamed to ``path``. Without ``checkpoint`` that happens at the end of the block.
    All ranks use it::

        with PendingFolder(path, kind, rotate) as pending:
            ...  # small files into pending.folder
            pending.checkpoint = strategy.save_checkpoint(pending.folder / CHECKPOINT, ..., asynchronous=True)
            pending.write_later = ...  # what is written after the checkpoint, on the first rank

    Args:
        path: where the folder appears. An older folder is replaced; files in it that no save wrote are kept.
        kind: what may be replaced.
        rotate: called on the first rank when the folder is in its place.

    If the block fails on one rank, it is left with an error on all of them, and the hidden folder is removed. In the
    block the others may only wait in :meth:`Ranks.together <lightstep.distributed.Ranks.together>`.

    Raises:
        CheckpointError: another process is saving to ``path``, something else is there, or another rank has failed.
    """

    checkpoint: PendingSave | None = None
    write_later: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, path: Path, kind: FolderKind, rotate: Callable[[], None]) -> None:
        super().__init__()
        self.path, self._place, self._kind, self._rotate = path, path.resolve(), kind, rotate
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


def folder_kind(
    name: str, patterns: tuple[str, ...], is_ours: Callable[[Path], bool], is_complete: Callable[[Path], bool]
) -> FolderKind:
    """Folders with a checkpoint in ``lightstep/`` and files that match ``patterns`` beside it.

    Args:
        name: for messages: ``"a checkpoint of the Trainer"``.
        is_ours: whether a folder may be replaced.
        is_complete: whether all that belongs to the folder is in it.
    """
    return FolderKind(
        name,
        is_ours=is_ours,
        is_complete=is_complete,
        own_files=partial(_own_files, patterns=(f"{CHECKPOINT}/**/*", *patterns)),
    )


def _own_files(folder: Path, patterns: tuple[str, ...]) -> set[str]:
    found = {file.relative_to(folder).as_posix() for pattern in patterns for file in folder.glob(pattern)}
    with suppress(CheckpointError):
        found |= set((read_file_list(folder) or {"files": ()})["files"])
    return {*found, FILE_LIST}


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


def newest_whole(folders: Sequence[Path], is_complete: Callable[[Path], bool]) -> Path | None:
    """The newest folder to continue from; a warning names newer ones, whose save was interrupted.

    Args:
        folders: the oldest first.
    """
    for number, folder in enumerate(reversed(folders)):
        if is_complete(folder):
            if number:
                names = ", ".join(path.name for path in folders[-number:])
                logger.warning("lightstep: the save of %s was interrupted; the newest whole one is %s", names, folder)
            return folder
    return None

"""Removing older checkpoints when a new one is saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.layout import CHECKPOINT, is_complete, read_manifest, remove_checkpoint
from lightstep.checkpoint.storage import recover_interrupted
from lightstep.checkpoint.verify import is_undamaged
from lightstep.distributed import Ranks

_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints a save keeps.

    Attributes:
        keep_last: how many complete ones, with the new one; ``None``: all.
        keep_every: those whose number is a multiple of it are kept too; 0: none.
        weights_only: whether the new checkpoint has no optimizer state. Checkpoints of the other kind are not touched.

    Raises:
        ValueError: ``keep_every`` without ``keep_last``, or a number that is too small.
    """

    keep_last: int | None = None
    keep_every: int = 0
    weights_only: bool = False

    def __post_init__(self) -> None:
        last, every = self.keep_last, self.keep_every
        if last is None and every:
            raise ValueError(f"keep_every is {every} without keep_last: nothing would be removed; set both")
        if (last is not None and last < 1) or every < 0:
            raise ValueError(f"keep_last is {last} and keep_every {every}; at least 1 and 0 are needed")

    def check(self, path: Path) -> None:
        """Raise ``ValueError`` unless ``path`` ends in a number, if older checkpoints are to be removed."""
        if self.keep_last is not None and not _NUMBERED.fullmatch(path.name):
            raise ValueError(f"keep_last needs a path that ends in a number, such as runs/a/step-100; got {path}")

    @contextmanager
    def applied(self, path: Path, ranks: Ranks, removes: bool | None = None) -> Iterator[None]:
        """Remove older checkpoints before and after the block, which saves to ``path``.

        Before the block the surplus over ``keep_last`` is removed, which makes room; after it those that the
        new one makes superfluous. Called by all ranks.

        Args:
            removes: whether this rank removes; default: the first one does.

        Raises:
            ValueError: ``path`` does not end in a number.
        """
        self.check(path)
        removes = ranks.is_first if removes is None else removes
        ranks.together(lambda: self.remove_old(path, saved=False) if removes else None)
        yield
        ranks.together(lambda: self.remove_old(path) if removes else None)

    def remove_old(self, path: Path, saved: bool = True) -> None:
        """Keep the newest complete checkpoints up to ``path``, and remove the older ones next to it.

        Checkpoints with higher numbers stay: a run that was resumed from an earlier one will replace them when it gets
        there. The user's files stay.

        Args:
            saved: whether ``path`` has just been saved. Before the save, nothing is removed unless the checkpoints that
                are kept have been verified byte by byte.
        """
        if self.keep_last is None:
            return
        prefix, number = _split(path.name)

        def is_earlier(name: str) -> bool:
            return _split(name)[0] == prefix and _split(name)[1] < number

        recover_interrupted(path.parent, CHECKPOINT, is_earlier)
        found = [entry for entry in _checkpoints(path.parent) if is_earlier(entry.name)]
        earlier = [entry for entry in sorted(found, key=_number, reverse=True) if _matches(entry, self.weights_only)]
        count = self.keep_last - saved
        if not saved and len(earlier) <= count:
            return
        is_usable: Callable[[Path], bool] = is_complete if saved else is_undamaged
        kept = list(islice((entry for entry in earlier if is_usable(entry)), count))
        if not saved and not kept:
            return
        for entry in earlier:
            if entry not in kept and not (
                self.keep_every and _number(entry) % self.keep_every == 0 and is_complete(entry)
            ):
                remove_checkpoint(entry)


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, complete or not, and empty folders, which a crash during a removal may leave."""
    try:
        return [entry for entry in folder.iterdir() if CHECKPOINT.is_ours(entry) or _is_empty(entry)]
    except OSError:  # nothing has been saved yet
        return []


def _is_empty(entry: Path) -> bool:
    return entry.is_dir() and not any(entry.iterdir())


def _split(name: str) -> tuple[str | None, int]:
    """``("step-", 100)`` for ``"step-100"``; ``(None, 0)`` for a name that does not end in a number."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (None, 0)


def _number(path: Path) -> int:
    return _split(path.name)[1]


def _matches(folder: Path, weights_only: bool) -> bool:
    """Whether the checkpoint is of this kind; one that cannot be read counts as both."""
    try:
        return (read_manifest(folder).get("groups") is None) == weights_only
    except CheckpointError:
        return True

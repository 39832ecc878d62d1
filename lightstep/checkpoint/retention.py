"""Which older checkpoints go when a new one is saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.layout import CHECKPOINT, is_complete, read_manifest, remove_checkpoint
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.storage import settle
from lightstep.checkpoint.verify import is_undamaged

_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class Retention:
    """What a save keeps of the checkpoints before it; ``keep_last`` is ``None`` to keep all.

    Raises:
        ValueError: numbers that mean nothing.
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

    @contextmanager
    def around(self, path: Path, ranks: Ranks) -> Iterator[None]:
        """Save to ``path`` in this block: room is made before it, and what is too many is removed after it.

        Called by all ranks; the first one looks and removes.

        Raises:
            ValueError: ``path`` has no number.
        """
        if self.keep_last is not None and not _NUMBERED.fullmatch(path.name):
            raise ValueError(f"keep_last needs a path that ends in a number, such as runs/a/step-100; got {path}")
        ranks.together(partial(self._remove, path, saved=False), only_first=True)
        yield
        ranks.together(partial(self._remove, path, saved=True), only_first=True)

    def _remove(self, path: Path, saved: bool) -> None:
        if self.keep_last is not None:
            remove_old_checkpoints(path, self.keep_last, self.keep_every, self.weights_only, saved)


def remove_old_checkpoints(
    path: Path, keep_last: int, keep_every: int = 0, weights_only: bool = False, saved: bool = True
) -> None:
    """Of ``path`` and the checkpoints of lower numbers beside it, keep the ``keep_last`` newest that are whole.

    Those of higher numbers stay: they are what a resumed run went past, and it saves over them when it gets there.
    Checkpoints of weights alone and those with optimizer state do not count for each other. Files of the user's stay.

    Args:
        keep_every: checkpoints whose number is a multiple of it stay too; 0: none do.
        saved: whether ``path`` has just been saved. Before it is, others are only removed for those whose every byte
            has been read.
    """
    prefix, number = _split(path.name)

    def is_earlier(name: str) -> bool:
        return _split(name)[0] == prefix and _split(name)[1] < number

    settle(path.parent, CHECKPOINT, is_earlier)
    beside = [entry for entry in _checkpoints(path.parent) if is_earlier(entry.name)]
    earlier = [entry for entry in sorted(beside, key=_number, reverse=True) if _is_of_kind(entry, weights_only)]
    left = keep_last - saved
    if not saved and len(earlier) <= left:
        return
    is_whole: Callable[[Path], bool] = is_complete if saved else is_undamaged
    newest = list(islice((entry for entry in earlier if is_whole(entry)), left))
    if not saved and not newest:
        return
    for entry in earlier:
        if entry not in newest and not (keep_every and _number(entry) % keep_every == 0 and is_complete(entry)):
            remove_checkpoint(entry)


def _checkpoints(folder: Path) -> list[Path]:
    """Whole or not, down to the empty folder that a crash in the middle of a removal may leave."""
    try:
        return [entry for entry in folder.iterdir() if CHECKPOINT.is_ours(entry) or _is_empty(entry)]
    except OSError:  # nothing has been saved yet
        return []


def _is_empty(entry: Path) -> bool:
    return entry.is_dir() and not any(entry.iterdir())


def _split(name: str) -> tuple[str | None, int]:
    """``("step-", 100)``; of a name without a number ``(None, 0)``."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (None, 0)


def _number(path: Path) -> int:
    return _split(path.name)[1]


def _is_of_kind(folder: Path, weights_only: bool) -> bool:
    """What cannot be read is of either."""
    try:
        return (read_manifest(folder).get("groups") is None) == weights_only
    except CheckpointError:
        return True

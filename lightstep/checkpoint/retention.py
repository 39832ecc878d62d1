"""Which older checkpoints go when a new one is saved."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.layout import CHECKPOINT, is_complete, read_manifest, remove_checkpoint
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.storage import location
from lightstep.checkpoint.verify import is_undamaged

_NUMBERED = re.compile(r"(.*?)(\d+)")


@contextmanager
def retained(
    path: str | os.PathLike[str], keep_last: int | None, keep_every: int, weights_only: bool, ranks: Ranks
) -> Iterator[None]:
    """Save to ``path`` in this block: room is made before it, and what is too many is removed after it.

    Called by all ranks; the first one looks and removes.

    Raises:
        ValueError: the numbers, or a path without one.
    """
    place = location(path).resolve()
    if keep_last is None and keep_every:
        raise ValueError(f"keep_every is {keep_every} without keep_last: nothing would be removed; set both")
    if keep_last is not None and (keep_last < 1 or keep_every < 0):
        raise ValueError(f"keep_last is {keep_last} and keep_every {keep_every}; at least 1 and 0 are needed")
    if keep_last is not None and not _NUMBERED.fullmatch(place.name):
        raise ValueError(f"keep_last needs a path that ends in a number, such as runs/a/step-100; got {path}")

    def remove(saved: bool) -> None:
        if keep_last is not None:
            remove_old_checkpoints(place, keep_last, keep_every, weights_only, saved)

    ranks.together(partial(remove, saved=False), only_first=True)
    yield
    ranks.together(partial(remove, saved=True), only_first=True)


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
    beside = [entry for entry in _beside(path) if _number(entry) < _number(path) and _is_of_kind(entry, weights_only)]
    earlier = sorted(beside, key=_number, reverse=True)
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


def _beside(path: Path) -> list[Path]:
    """Checkpoints, whole or not, with the name of ``path`` but for the number."""
    try:
        entries = [entry for entry in path.parent.iterdir() if CHECKPOINT.is_ours(entry)]
    except OSError:  # nothing has been saved yet
        return []
    return [entry for entry in entries if _prefix(entry) == _prefix(path)]


def _prefix(path: Path) -> str | None:
    found = _NUMBERED.fullmatch(path.name)
    return found and found[1]


def _number(path: Path) -> int:
    found = _NUMBERED.fullmatch(path.name)
    assert found is not None
    return int(found[2])


def _is_of_kind(folder: Path, weights_only: bool) -> bool:
    """What cannot be read is of either."""
    try:
        return (read_manifest(folder).get("groups") is None) == weights_only
    except CheckpointError:
        return True

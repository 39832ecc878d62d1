"""Contenders in turn, in rounds of alternating direction; whoever fails gets a note, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from lightstep.bench.contender import Skipped
from lightstep.bench.ranks import Ranks

logger = logging.getLogger(__name__)


class Noted(Protocol):
    """What can fail; `note` says why it did, `skipped` that it cannot run here at all."""

    note: str | None
    skipped: bool


Row = TypeVar("Row", bound=Noted)


def forth_and_back(rows: Sequence[Row], rounds: int) -> Iterator[tuple[int, Row]]:
    """(round, row) of those without a note; forth and back, so that a machine that slows down favours nobody."""
    for number in range(rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            if row.note is None:
                yield number, row


def attempt(phase: Callable[[], None], row: Noted, ranks: Ranks) -> bool:
    """Do it; a failure on any rank becomes this row's note. Whether it succeeded everywhere."""
    row.note = ranks.agree(_failure(phase, row))
    return row.note is None


def _failure(phase: Callable[[], None], row: Noted) -> str | None:
    try:
        phase()
    except Skipped as reason:
        row.skipped = True
        return str(reason)
    except Exception as error:
        logger.info("a contender failed", exc_info=True)
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first_line}"
    return None

"""One run: the link, then the iteration without an optimizer and every contender in turn, one model at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightstep.bench.iteration.contender import Batch, Task, Training
from lightstep.bench.iteration.registry import Entry, baseline
from lightstep.bench.iteration.window import Cell, count_syncs, time_window
from lightstep.bench.link import Link, measure_link
from lightstep.bench.measure import Baseline, Effort, free_memory
from lightstep.bench.ranks import Ranks
from lightstep.bench.registry import NEEDS_GROUP
from lightstep.bench.rounds import attempt, forth_and_back


@dataclass
class Row:
    """One contender's results by tokens; `note` says why there is none at all."""

    entry: Entry
    cells: dict[int, Cell]
    note: str | None = None
    skipped: bool = False


@dataclass
class Run:
    """Everything measured so far. The first row is the iteration without an optimizer."""

    task: Task
    effort: Effort
    rounds: int
    ranks: Ranks
    rows: list[Row]
    batches: dict[int, Batch]
    link: Link | None = None


def start(task: Task, effort: Effort, rounds: int, ranks: Ranks, entries: Sequence[Entry]) -> Run:
    """A run that has measured nothing yet."""
    rows = [Row(entry, {tokens: Cell() for tokens in task.tokens}) for entry in (baseline(), *entries)]
    return Run(task, effort, rounds, ranks, rows, task.batches(ranks.rank))


def measure_all(run: Run, progress: Callable[[str], None]) -> None:
    """Fill the rows. `progress` is called with a sentence before each contender, and may save what is there."""
    progress("the link")
    run.link = measure_link(run.task.device, run.ranks)
    for number, row in forth_and_back(run.rows, run.rounds):
        progress(f"round {number + 1} of {run.rounds}: {row.entry.label}")
        visit = Visit(run, row, last=number == run.rounds - 1)
        try:
            visit.measure()
        finally:
            visit.close()
            del visit
            free_memory(run.task.device)


class Visit:
    """One contender in one round, from building it to letting go of it."""

    def __init__(self, run: Run, row: Row, last: bool) -> None:
        self._run, self._row, self._last = run, row, last
        self._training: Training | None = None

    def measure(self) -> None:
        """All numbers of tokens, the smallest first: its first iteration makes the state."""
        if not attempt(self._build, self._row, self._run.ranks):
            return
        warmup = self._run.effort.warmup + 1
        for tokens, cell in self._row.cells.items():
            phase = functools.partial(self._time, tokens, cell, warmup)
            if cell.note is not None or not attempt(phase, cell, self._run.ranks):
                return
            warmup = self._run.effort.warmup

    def _build(self) -> None:
        self._baseline = Baseline.now(self._run.task.device)
        if self._row.entry.name in NEEDS_GROUP:
            self._run.ranks.ensure_group()
        self._training = self._row.entry.build(self._run.task)
        for cell in self._row.cells.values():
            cell.weight_bytes = self._training.weight_bytes()

    def _time(self, tokens: int, cell: Cell, warmup: int) -> None:
        assert self._training is not None
        run, device = self._run, self._run.task.device
        batch = run.batches[tokens]
        run.ranks.barrier()
        time_window(self._training, batch, device, warmup, run.effort.steps, self._baseline, cell)
        if self._last and tokens == run.task.tokens[0]:
            count_syncs(self._training, batch, device, cell)

    def close(self) -> None:
        if self._training is not None:
            self._training.close()
        self._training = None

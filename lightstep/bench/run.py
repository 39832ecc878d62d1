"""One run: the link, then every contender in turn, in rounds of alternating direction, one at a time in memory.

Steps follow each other without a gap, and each is timed from the end of the one before, in the order of the device's
main stream. So nothing a step leaves behind (copies still under way, buffers filled ahead, updates beside the next
forward) is anybody's gain: it delays the next one. Whoever fails gets a note, and the run goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.bench.contender import Contender, Inputs, Skipped, Task, nbytes
from lightstep.bench.disk import DiskTime
from lightstep.bench.entries import Entry
from lightstep.bench.link import Link, measure_link
from lightstep.bench.probes import Clock, HostSyncs, allocation_counts, free_memory, pinned_bytes
from lightstep.bench.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass
class Cell:
    """What was seen of one contender at one size on this rank, over all rounds.

    `windows`: for each round the ms of its steps, and `landing_ms` what came after the last of them. `peak_bytes`
    leaves the inputs out. `seen` is for what one task alone looks at. None is: not measurable on this device. `note`
    says why there is nothing, `skipped` that it cannot be measured here at all.
    """

    windows: list[list[float]] = field(default_factory=list)
    landing_ms: list[float] = field(default_factory=list)
    parameters: int = 0
    weight_bytes: int = 0
    input_bytes: int = 0
    peak_bytes: int | None = None
    host_bytes: int = 0
    allocations: float | None = None
    driver_allocations: int | None = None
    host_syncs: int | None = None
    first_sync: str | None = None
    traffic: tuple[int, int] | None = None
    sample: Tensor | None = None
    disk: DiskTime | None = None
    seen: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    skipped: bool = False


@dataclass(frozen=True)
class Row:
    """One contender and its results by size."""

    entry: Entry
    task: Task
    cells: dict[int, Cell]


@dataclass(frozen=True)
class Effort:
    """How much is measured: untimed steps before, timed steps in each round."""

    steps: int
    warmup: int
    rounds: int = 1


@dataclass
class Run:
    """Everything measured so far. `checkpoints` is a folder to save them in."""

    task: Task
    effort: Effort
    ranks: Ranks
    rows: list[Row]
    checkpoints: Path | None = None
    link: Link | None = None


def start(task: Task, effort: Effort, ranks: Ranks, entries: Sequence[Entry], checkpoints: Path | None = None) -> Run:
    """A run that has measured nothing yet."""
    if task.baseline is not None:
        entries = [Entry.of(task.baseline), *entries]
    rows = [Row(entry, part, {case: Cell() for case in part.cases}) for part in task.parts() for entry in entries]
    return Run(task, effort, ranks, rows, checkpoints)


def measure_all(run: Run, progress: Callable[[str], None]) -> None:
    """Fill the rows. `progress` is called with a sentence before each contender, and may save what is there."""
    progress("the link")
    run.link = measure_link(run.task.device, run.ranks)
    for number in range(run.effort.rounds):
        for row in run.rows if number % 2 == 0 else reversed(run.rows):  # a machine that slows down favours nobody
            if all(cell.note is not None for cell in row.cells.values()):
                continue
            progress(f"round {number + 1} of {run.effort.rounds}: {row.entry.label}")
            visit = Visit(run, row, number)
            try:
                visit.measure()
            finally:
                visit.close()
                del visit
                free_memory(run.task.device)
    again = measure_link(run.task.device, run.ranks)
    if run.link is not None and again is not None:
        run.link = run.link.or_faster(again)


class Visit:
    """One contender in one round, from building it to letting go of it."""

    contender: Contender | None = None

    def __init__(self, run: Run, row: Row, number: int) -> None:
        self.run, self.row, self.number = run, row, number
        self.device = run.task.device
        self.inputs: dict[int, Inputs] = {}

    def measure(self) -> None:
        """All sizes, the smallest first: its first step makes the state."""
        if not attempt(self._build, self.row.cells.values(), self.run.ranks):
            return
        for case, cell in self.row.cells.items():
            phases = [self.row.task.measure]
            if self.number == self.run.effort.rounds - 1:
                phases.append(self.row.task.probe)
            for phase in phases:
                self.run.ranks.barrier()
                if cell.note is not None or not attempt(partial(phase, self, case, cell), [cell], self.run.ranks):
                    return
            self.inputs.clear()

    def _build(self) -> None:
        self._device_before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        self._pinned_before = pinned_bytes(self.device)
        if self.row.entry.needs_group:
            self.run.ranks.ensure_group()
        self.contender = contender = self.row.entry.build(self.row.task)
        for cell in self.row.cells.values():
            cell.weight_bytes = nbytes(contender.device_weights())
            cell.parameters = sum(weight.numel() for weight in contender.weights())

    def time(self, work: Callable[[Any], None], inputs: Inputs, cell: Cell, warmup: int, settle: bool) -> None:
        """Warm up, then time one window of steps, their memory and what they allocate.

        Args:
            settle: begin on a quiet machine; else the first step waits for what the warm-up left to be done.
        """
        assert self.contender is not None
        for step in range(warmup):
            work(inputs[step])
        if settle:
            self.settle()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        before = allocation_counts(self.device)
        clock = Clock(self.device)
        clock.lap()
        for step in range(self.run.effort.steps):
            work(inputs[step])
            clock.lap()
        self.contender.finish()
        clock.lap()
        *window, landing = clock.read()
        cell.windows.append(window)
        cell.landing_ms.append(landing)
        after = allocation_counts(self.device)
        if before is not None and after is not None:
            cell.allocations = (after[0] - before[0]) / len(window)
            cell.driver_allocations = after[1] - before[1]
        self._note_memory(self.contender, inputs, cell)

    def _note_memory(self, contender: Contender, inputs: Inputs, cell: Cell) -> None:
        # What one step is given counts; that the bench holds a second set for the next one is its own affair.
        cell.input_bytes = inputs.nbytes // len(inputs.sets)
        pinned = pinned_bytes(self.device) - self._pinned_before
        cell.host_bytes = contender.host_bytes() + not_listed(contender, pinned)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self._device_before - inputs.nbytes
            cell.peak_bytes = max(peak, cell.peak_bytes or 0)

    def count_syncs(self, work: Callable[[Any], None], inputs: Inputs, cell: Cell) -> None:
        """One more step, untimed, that counts the host's waits."""
        if self.device.type == "cuda":
            with HostSyncs() as syncs:
                work(inputs[0])
            cell.host_syncs, cell.first_sync = syncs.count, syncs.first

    def settle(self) -> None:
        """Wait until nothing is left to be done."""
        if self.contender is not None:
            self.contender.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self.contender is not None:
            self.contender.close()
        self.contender = None
        self.inputs.clear()


def not_listed(contender: Contender, pinned: int) -> int:
    """What torch's pinned allocator took beyond the contender's tensors: what it rounds up, what steps reuse."""
    return max(0, pinned - nbytes(tensor for tensor in contender.host_tensors() if tensor.is_pinned()))


def attempt(phase: Callable[[], None], cells: Iterable[Cell], ranks: Ranks) -> bool:
    """Do it; a failure on any rank becomes the cells' note. Whether it succeeded everywhere."""
    note, skipped = _failure(phase)
    note = ranks.agree(note)
    for cell in cells if note is not None else ():
        cell.note, cell.skipped = note, skipped
    return note is None


def _failure(phase: Callable[[], None]) -> tuple[str | None, bool]:
    try:
        phase()
    except Skipped as reason:
        return str(reason), True
    except Exception as error:
        logger.info("a contender failed", exc_info=True)
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first_line}", False
    return None, False

"""One run: the link, then every contender in turn, in rounds of alternating direction, one at a time in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightstep.bench.contender import Contender, Setup
from lightstep.bench.disk import time_saving
from lightstep.bench.link import Link, measure_link
from lightstep.bench.measure import Baseline, Effort, Measurement, free_memory, probe, time_steps
from lightstep.bench.model import GradientSets
from lightstep.bench.ranks import Ranks
from lightstep.bench.registry import NEEDS_GROUP, PEERS, Build
from lightstep.bench.rounds import attempt, forth_and_back
from lightstep.bench.strategies import StrategyContender


@dataclass
class Row:
    """One contender's result; `note` says why there is none."""

    name: str
    about: str
    kind: str
    measurement: Measurement = field(default_factory=Measurement)
    note: str | None = None
    skipped: bool = False

    @property
    def measured(self) -> bool:
        return self.note is None and bool(self.measurement.step_ms)


@dataclass
class Run:
    """Everything measured so far. `rows` are in the order asked for; `checkpoints` is a folder to save them in."""

    setup: Setup
    effort: Effort
    rounds: int
    ranks: Ranks
    rows: list[Row]
    checkpoints: Path | None = None
    link: Link | None = None


def start(
    setup: Setup,
    effort: Effort,
    rounds: int,
    ranks: Ranks,
    names: Mapping[str, str],
    checkpoints: Path | None = None,
) -> Run:
    """A run over `names` (contender name to kind) that has measured nothing yet."""
    rows = [Row(name, PEERS[name].about if name in PEERS else name, kind) for name, kind in names.items()]
    return Run(setup, effort, rounds, ranks, rows, checkpoints)


def measure_all(run: Run, builds: Mapping[str, Build], progress: Callable[[str, Run], None]) -> None:
    """Fill the rows. `progress` is called with a sentence before each contender, and may save what is there."""
    progress("the link", run)
    run.link = measure_link(run.setup.device, run.ranks)
    for number, row in forth_and_back(run.rows, run.rounds):
        progress(f"round {number + 1} of {run.rounds}: {row.name}", run)
        _measure_one(run, row, builds[row.name], number)
    _link_again(run)
    progress("done", run)


def _link_again(run: Run) -> None:
    again = measure_link(run.setup.device, run.ranks)
    if run.link is not None and again is not None:
        run.link = run.link.or_faster(again)


def _measure_one(run: Run, row: Row, build: Build, number: int) -> None:
    visit = Visit(run, row, build, number)
    try:
        for phase in (visit.build, visit.time, visit.probe):
            if not attempt(phase, row, run.ranks):
                return
    finally:
        visit.close()
        del visit
        free_memory(run.setup.device)


class Visit:
    """One contender in one round, from building it to letting go of it."""

    def __init__(self, run: Run, row: Row, build: Build, number: int) -> None:
        self._run, self._row, self._build, self._number = run, row, build, number
        self._contender: Contender | None = None
        self._gradients: GradientSets | None = None

    def build(self) -> None:
        device = self._run.setup.device
        self._baseline = Baseline.now(device)
        if self._row.name in NEEDS_GROUP:
            self._run.ranks.ensure_group()
        self._contender = contender = self._build(self._run.setup)
        self._row.about = contender.about
        self._gradients = GradientSets(contender.gradient_weights(), contender.gradient_dtype, device)
        self._gradients.refresh(self._run.setup.seed + self._number + 1)

    def time(self) -> None:
        assert self._contender is not None and self._gradients is not None
        run = self._run
        run.ranks.barrier()
        into = self._row.measurement
        time_steps(self._contender, self._gradients, run.setup.device, run.effort, self._baseline, into)

    def probe(self) -> None:
        assert self._contender is not None and self._gradients is not None
        run, contender = self._run, self._contender
        if self._number == run.rounds - 1:
            probe(contender, self._gradients, run.setup.device, self._row.measurement)
            if run.checkpoints is not None and isinstance(contender, StrategyContender):
                self._row.measurement.disk = time_saving(contender.save, run.checkpoints, run.ranks)

    def close(self) -> None:
        if self._contender is not None:
            self._contender.close()
        self._contender = self._gradients = None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

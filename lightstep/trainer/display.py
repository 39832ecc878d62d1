"""The output of `lightstep train`: sentences and a progress bar, or occasional lines without a terminal."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class Figures:
    """Figures of the steps since the last figures."""

    losses: Sequence[float]
    """Of each step, nats per byte."""
    grad_norms: Sequence[float]
    loss_scale: float
    tokens_per_second: float
    memory: int
    """Bytes at the peak so far."""
    skipped: int = 0
    """Steps of the run that were skipped because of non-finite gradients."""


@dataclass
class _Mean:
    """Means over all steps since the last output."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, figures: Figures) -> None:
        self.losses += filter(math.isfinite, figures.losses)
        self.norms += filter(math.isfinite, figures.grad_norms)
        self.rates.append(figures.tokens_per_second)

    def text(self, last: Figures) -> str:
        parts = [f"loss {_mean(self.losses):.3f}", f"norm {_mean(self.norms):.2f}"]
        if last.loss_scale != 1:
            parts.append(f"scale {last.loss_scale:g}")
        parts += [f"{statistics.harmonic_mean(self.rates):,.0f} tokens/s", f"{last.memory / 1e9:.1f} GB"]
        if last.skipped:
            parts.append(f"{last.skipped} skipped")
        return "  ".join(parts)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


class Display:
    """Prints on the first rank only.

    Args:
        seconds, steps: without a terminal, print a line when either has passed since the last one; 0 steps: by time
            alone.
    """

    def __init__(self, console: Console, is_main: bool, seconds: float = 10, steps: int = 0) -> None:
        self._console = console if is_main else Console(quiet=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._steps, self._saving = 0, ""
        self._every_seconds, self._every_steps = seconds, steps
        self._started = time.monotonic()
        self._shown: tuple[int, float] | None = None
        self._mean = _Mean()

    def say(self, sentence: str) -> None:
        """Print one line above the progress bar."""
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def training(self, start: int, steps: int) -> Iterator[None]:
        """Show progress from ``start`` to ``steps``."""
        self._steps, self._shown, self._started = steps, None, time.monotonic()
        with Progress(
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}{task.fields[saving]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=False,
        ) as self._progress:
            self._task = self._progress.add_task("", total=steps, completed=start, figures="", saving="")
            yield

    def advance(self, step: int, saving: bool = False) -> None:
        """Show that ``step`` steps are done, and whether a checkpoint is being written."""
        assert self._progress is not None
        self._saving = "  saving" if saving else ""
        self._progress.update(self._task, completed=step, saving=self._saving)

    def show(self, step: int, figures: Figures) -> None:
        """Show new figures: the progress bar at once, a line when it is due, with means since the last line."""
        assert self._progress is not None
        self._mean.add(figures)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, figures=self._mean.text(figures))
        elif self._due(step):
            elapsed = time.monotonic() - self._started
            self.say(f"step {step}/{self._steps}  {self._mean.text(figures)}{self._saving}  {elapsed:.0f} s")
            self._shown = step, time.monotonic()
        else:
            return
        self._mean = _Mean()

    def _due(self, step: int) -> bool:
        if self._shown is None or step == self._steps:
            return True
        last, then = self._shown
        enough = self._every_steps > 0 and step - last >= self._every_steps
        return enough or time.monotonic() - then >= self._every_seconds

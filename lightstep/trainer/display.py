"""What `lightstep train` shows: sentences, and a progress bar (lines now and then where there is no terminal)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINES = 10
"""Lines of progress over a whole run without a terminal."""


@dataclass(frozen=True)
class Figures:
    """Where training stands."""

    loss: float
    """Nats per byte."""
    grad_norm: float
    loss_scale: float
    tokens_per_second: float
    memory_gib: float
    skipped: int = 0
    """Steps that were skipped because their gradients were not finite."""

    def __str__(self) -> str:
        text = (
            f"loss {self.loss:.3f}  norm {self.grad_norm:.2f}  scale {self.loss_scale:g}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {self.memory_gib:.1f} GiB"
        )
        return f"{text}  {self.skipped} skipped" if self.skipped else text


class Display:
    """Quiet on all ranks but the first."""

    def __init__(self, console: Console, is_main: bool) -> None:
        self._console = console if is_main else Console(quiet=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._steps, self._saving = 0, ""
        self._next_line = 0
        self._started = time.monotonic()

    def say(self, sentence: str) -> None:
        """One line, above the progress bar."""
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def training(self, start: int, steps: int) -> Iterator[None]:
        """Show progress from ``start`` to ``steps``."""
        self._steps, self._next_line, self._started = steps, start, time.monotonic()
        with Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}{task.fields[saving]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=False,
        ) as self._progress:
            self._task = self._progress.add_task("", total=steps, completed=start, figures="", saving="")
            yield

    def advance(self, step: int, saving: bool = False) -> None:
        """``step`` steps are done; ``saving``: while a checkpoint is being written."""
        assert self._progress is not None
        self._saving = "  saving" if saving else ""
        self._progress.update(self._task, completed=step, saving=self._saving)

    def show(self, step: int, figures: Figures) -> None:
        """New figures."""
        assert self._progress is not None
        self._progress.update(self._task, completed=step, figures=str(figures))
        if not self._console.is_terminal and (step >= self._next_line or step == self._steps):
            self.say(f"step {step}/{self._steps}  {figures}{self._saving}  {time.monotonic() - self._started:.0f} s")
            self._next_line = step + max(self._steps // _LINES, 1)

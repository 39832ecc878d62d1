"""`lightstep bench --timeline`: a profiler's trace of a few iterations of each contender, and a picture of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from lightstep.bench.iteration.contender import Batch, Task, Training
from lightstep.bench.iteration.lanes import draw, hidden_copies
from lightstep.bench.iteration.registry import Entry
from lightstep.bench.iteration.trace import read_timeline
from lightstep.bench.measure import Effort, free_memory
from lightstep.bench.ranks import Ranks
from lightstep.bench.registry import NEEDS_GROUP
from lightstep.bench.rounds import attempt
from lightstep.bench.run import device_name


class Recording:
    """One contender's timelines; `said` is what they show, `note` why there are none, or not all."""

    def __init__(self, entry: Entry, task: Task, effort: Effort, ranks: Ranks, folder: Path) -> None:
        self.entry = entry
        self.note: str | None = None
        self.skipped = False
        self.pictures: list[Path] = []
        self.said: list[str] = []
        self._task, self._effort, self._ranks, self._folder = task, effort, ranks, folder
        self._batches = task.batches(ranks.rank)

    def record(self) -> None:
        """A trace and a picture for each number of tokens; only the first rank writes."""
        try:
            attempt(self._record_all, self, self._ranks)
        finally:
            free_memory(self._task.device)

    def _record_all(self) -> None:
        if self.entry.name in NEEDS_GROUP:
            self._ranks.ensure_group()
        training = self.entry.build(self._task)
        try:
            warmup = self._effort.warmup + 1  # the first one makes the state
            for tokens, batch in self._batches.items():
                self._record_one(training, tokens, batch, warmup)
                warmup = self._effort.warmup
        finally:
            training.close()

    def _record_one(self, training: Training, tokens: int, batch: Batch, warmup: int) -> None:
        for _ in range(warmup):
            training.iterate(batch)
        path = self._folder / f"{_file_name(self.entry.name)}-{tokens}-timeline.json"
        if self._ranks.is_main:
            _trace(training, batch, self._effort.steps, path)
            self._draw(tokens, path)
        else:
            for _ in range(self._effort.steps + 1):
                training.iterate(batch)
        training.finish()

    def _draw(self, tokens: int, trace: Path) -> None:
        timeline = read_timeline(json.loads(trace.read_text())["traceEvents"])
        picture = trace.with_suffix(".png")
        title = f"{self.entry.label}, {tokens} tokens, {device_name(self._task.device)}"
        draw(timeline, picture, title)
        self.pictures.append(picture)
        self.said += [f"{self.entry.label}, {tokens} tokens: {line}" for line in hidden_copies(timeline)]


def record_all(
    task: Task,
    effort: Effort,
    ranks: Ranks,
    entries: Sequence[Entry],
    folder: Path,
    progress: Callable[[str], None],
) -> list[Recording]:
    """Record every contender in turn, on a GPU. `effort`: iterations in the picture, and those before them."""
    recordings = [Recording(entry, task, effort, ranks, folder) for entry in entries]
    for recording in recordings:
        progress(f"the timeline of {recording.entry.label}")
        recording.record()
    return recordings


def _trace(training: Training, batch: Batch, iterations: int, path: Path) -> None:
    """Write the Chrome trace of `iterations`, after one more that only starts the profiler."""
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=1, active=iterations, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(1 + iterations):
            training.iterate(batch)
            profiler.step()


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", Path(name).name if "/" in name else name)

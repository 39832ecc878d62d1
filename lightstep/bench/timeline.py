"""`lightstep bench --timeline`: a profiler's trace of some iterations of each contender, and a picture of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lightstep.bench.contender import Contender
from lightstep.bench.iteration import IterationTask
from lightstep.bench.run import Measurement
from lightstep.bench.trace import (
    COLLECTIVES,
    MAIN,
    OTHERS,
    TO_DEVICE,
    TO_HOST,
    UPDATES,
    Span,
    Timeline,
    merged,
    read_timeline,
)
from lightstep.plan.measure import device_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class TimelineTask(IterationTask):
    """Writes a trace and a picture to `folder`, on the first rank only."""

    folder: Path

    stem = "timeline"
    baseline = None
    view = None

    def measure(self, measurement: Measurement) -> None:
        contender, effort, entry = measurement.contender, measurement.run.effort, measurement.row.entry
        batch = self.batch(measurement.run.ranks.rank)
        for _ in range(1 + effort.warmup):
            contender.iterate(batch)
        if measurement.run.ranks.is_main:
            trace = self.folder / f"{_file_name(entry.name)}-{self.case}-timeline.json"
            _trace(contender, batch, effort.steps, trace)
            timeline = read_timeline(json.loads(trace.read_text())["traceEvents"])
            picture, name = trace.with_suffix(".png"), f"{entry.label}, {self.case} tokens"
            draw(timeline, picture, f"{name}, {device_name(self.device)}")
            measurement.row.extra = {
                "picture": picture,
                "said": [f"{name}: {line}" for line in copies_in_forward(timeline)],
            }
        else:
            for _ in range(effort.steps + 1):
                contender.iterate(batch)
        contender.finish()

    def probe(self, measurement: Measurement) -> None:
        return


def _trace(contender: Contender, batch: tuple[torch.Tensor, torch.Tensor], iterations: int, path: Path) -> None:
    """Write the Chrome trace of `iterations`, after one untraced iteration that starts the profiler."""
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=1, active=iterations, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(1 + iterations):
            contender.iterate(batch)
            profiler.step()


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", Path(name).name if "/" in name else name)


# -- the picture ------------------------------------------------------------------------------------------------------

_COLORS = {  # Okabe and Ito
    MAIN: "#0072B2",
    UPDATES: "#D55E00",
    TO_DEVICE: "#009E73",
    TO_HOST: "#CC79A7",
    COLLECTIVES: "#E69F00",
    OTHERS: "#999999",
}
_FINEST = 2000  # gaps narrower than 1/2000 of the picture are not drawn


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """Write the picture as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 1.8 + 0.5 * len(timeline.lanes)), layout="constrained")
    axes = figure.subplots()
    for row, (lane, spans) in enumerate(timeline.lanes.items()):
        bars = [(start, end - start) for start, end in merged(spans, timeline.end / _FINEST)]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=_COLORS[lane], linewidth=0)
    axes.set_yticks(range(len(timeline.lanes)), list(timeline.lanes))
    axes.set_ylim(len(timeline.lanes) - 0.5, -1.1)
    axes.set_xlim(0, timeline.end)
    axes.set_xlabel("ms; dashed: an iteration begins" if timeline.forwards else "ms")
    axes.spines[["top", "right"]].set_visible(False)
    for name, span in phases(timeline):
        _draw_phase(axes, name, span)
    for start, _ in timeline.forwards:
        axes.axvline(start, color="black", linestyle="--", linewidth=1)
    figure.suptitle("\n".join([title, *copies_in_forward(timeline)]))
    figure.savefig(path, dpi=150, metadata={"Title": title})


def phases(timeline: Timeline) -> list[tuple[str, Span]]:
    """Forward, backward and step of every complete iteration in the trace, in order."""
    found: list[tuple[str, Span]] = []
    for forward in timeline.forwards:
        step = next((step for step in timeline.steps if step[0] >= forward[1]), None)
        if step is not None:
            found += [("forward", forward), ("backward", (forward[1], step[0])), ("step", step)]
    return found


def copies_in_forward(timeline: Timeline) -> list[str]:
    """How much of the copies in each direction ran during a forward."""
    return [
        f"{timeline.overlap(lane, timeline.forwards):.0f} of {timeline.busy(lane):.0f} ms of copies {lane} in a forward"
        for lane in (TO_DEVICE, TO_HOST)
        if lane in timeline.lanes and timeline.forwards
    ]


def _draw_phase(axes: Axes, name: str, span: Span) -> None:
    start, end = span
    style = {"arrowstyle": "|-|", "mutation_scale": 3, "color": "grey"}
    axes.annotate("", (start, -0.6), (end, -0.6), arrowprops=style)
    axes.text((start + end) / 2, -0.66, name, ha="center", va="bottom", fontsize="small", clip_on=True)

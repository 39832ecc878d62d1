"""A timeline as a picture: one row for each lane, the phases above, a line where each iteration begins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightstep.bench.iteration.trace import (
    COLLECTIVES,
    MAIN,
    OTHERS,
    TO_DEVICE,
    TO_HOST,
    UPDATES,
    Span,
    Timeline,
    merged,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {  # Okabe and Ito
    MAIN: "#0072B2",
    UPDATES: "#D55E00",
    TO_DEVICE: "#009E73",
    TO_HOST: "#CC79A7",
    COLLECTIVES: "#E69F00",
    OTHERS: "#999999",
}
_FINEST = 2000  # gaps below this part of the picture's width are not drawn


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """Write the picture as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 1.8 + 0.5 * len(timeline.lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, (lane, spans) in enumerate(timeline.lanes.items()):
        bars = [(start, end - start) for start, end in merged(spans, timeline.end / _FINEST)]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=_COLORS[lane], linewidth=0)
    axes.set_yticks(range(len(timeline.lanes)), list(timeline.lanes))
    axes.set_ylim(len(timeline.lanes) - 0.5, -1.1)
    axes.set_xlim(0, timeline.end)
    axes.set_xlabel("ms; dashed: an iteration begins")
    axes.spines[["top", "right"]].set_visible(False)
    for name, span in phases(timeline):
        _draw_phase(axes, name, span)
    for start, _ in timeline.forwards:
        axes.axvline(start, color="black", linestyle="--", linewidth=1)
    figure.suptitle("\n".join([title, *hidden_copies(timeline)]))
    figure.savefig(path, dpi=150, metadata={"Title": title})


def phases(timeline: Timeline) -> list[tuple[str, Span]]:
    """Forward, backward and step of every iteration that the trace holds whole, in order."""
    found: list[tuple[str, Span]] = []
    for forward in timeline.forwards:
        step = next((step for step in timeline.steps if step[0] >= forward[1]), None)
        if step is not None:
            found += [("forward", forward), ("backward", (forward[1], step[0])), ("step", step)]
    return found


def hidden_copies(timeline: Timeline) -> list[str]:
    """How much of the copies of each direction ran while the device was in a forward."""
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

"""Whole iterations as a picture: forward and backward in grey, what the optimizer adds in colour, and peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightstep.bench.chart import GREY, add_legend, bars
from lightstep.bench.iteration.report import title
from lightstep.bench.report import Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(values: Values, path: Path) -> None:
    """Write the chart of `report.as_json`'s values as a PNG: one line of panels for each number of tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in values["rows"] if "iteration_ms" in row and row["kind"] != "baseline"]
    with_memory = any(row["peak_device_bytes"] is not None for row in measured)
    lines, columns = len(values["tokens_per_rank"]), 2 if with_memory else 1
    figure = Figure(figsize=(11, lines * 1.2 + 0.6 + 0.45 * max(1, len(measured))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False)
    for line, tokens in zip(panels, values["tokens_per_rank"], strict=True):
        rows = [row for row in measured if row["tokens"] == tokens]
        _draw_times(line[0], rows)
        line[0].set_title(title(values, tokens), loc="left", fontsize="medium")
        if with_memory:
            _draw_memory(line[1], rows)
    add_legend(figure)
    figure.savefig(path, dpi=150, metadata={"Title": values["command"], "Description": values["date"]})


def _draw_times(axes: Axes, rows: list[Values]) -> None:
    exposed = [max(0.0, row["exposed_ms"] or 0.0) for row in rows]
    rest = [row["iteration_ms"] - own for row, own in zip(rows, exposed, strict=True)]
    axes.barh(range(len(rows)), rest, color=GREY, edgecolor="black", linewidth=0.6, label="forward and backward alone")
    bars(axes, rows, rest, exposed)
    axes.set_xlabel("ms per iteration (less is better)")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.invert_yaxis()


def _draw_memory(axes: Axes, rows: list[Values]) -> None:
    weights = [row["weight_bytes"] / 1e9 for row in rows]
    beyond = [(row["peak_device_bytes_beyond_weights"] or 0) / 1e9 for row in rows]
    axes.barh(range(len(rows)), weights, color=GREY, edgecolor="black", linewidth=0.6, label="weights", hatch="..")
    bars(axes, rows, weights, beyond)
    axes.set_xlabel("peak device memory, GB (less is better)")
    axes.set_yticks(range(len(rows)), [""] * len(rows))
    axes.invert_yaxis()

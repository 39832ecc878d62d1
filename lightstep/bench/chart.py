"""The result as a chart: a line of panels for each section, with a bar and a range for each row."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from lightstep.bench.report import Panel, Values, View, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The Okabe-Ito palette is safe for the common kinds of color blindness; the hatch also works in grayscale.
_STYLE = {
    "lightstep": ("#0072B2", "", "lightstep"),
    "peer": ("#E69F00", "//", "others"),
}
_GREY = "#D0D0D0"
_LINE = 84  # characters of a title that fit beside the names of the rows


def draw(values: Values, view: View, path: Path) -> None:
    """Write the chart as a PNG."""
    from matplotlib.figure import Figure

    measured = [row for row in values["rows"] if view.key in row]
    panels = [panel for panel in view.panels if any(row.get(panel.key) for row in measured)] or view.panels[:1]
    sections = view.sections(values)
    height = len(sections) * 1.2 + 0.8 + 0.45 * max(1, len(measured))
    figure = Figure(figsize=(11, height), layout="constrained")
    for line, (title, rows) in zip(figure.subplots(len(sections), len(panels), squeeze=False), sections, strict=True):
        line[0].set_title(textwrap.fill(title, _LINE), loc="left", fontsize="medium")
        shown = [row for row in rows if view.key in row and row["kind"] != "baseline"]
        for axes, panel in zip(line, panels, strict=True):
            _draw_panel(axes, panel, shown, values)
            axes.set_yticks(range(len(shown)), [label(row) for row in shown] if axes is line[0] else [""] * len(shown))
            axes.invert_yaxis()
    if values["hardware"]["device"] == "CPU":
        figure.suptitle("Measured on a CPU: nothing crosses a link here", fontsize="medium")
    _add_legend(figure)
    figure.savefig(path, dpi=150, metadata={"Title": values["command"], "Description": values["date"]})


def _draw_panel(axes: Axes, panel: Panel, shown: list[Values], values: Values) -> None:
    ends = [(row.get(panel.key) or 0.0) / panel.unit for row in shown]
    bases = [min(end, (row.get(panel.base) or 0.0) / panel.unit) for row, end in zip(shown, ends, strict=True)]
    edge: Values = {"edgecolor": "black", "linewidth": 0.6}
    if panel.base_label is not None:
        axes.barh(range(len(shown)), bases, color=_GREY, label=panel.base_label, **edge)
    for kind, (color, hatch, name) in _STYLE.items():
        places = [i for i, row in enumerate(shown) if row["kind"] == kind]
        if places:
            lengths = [ends[i] - bases[i] for i in places]
            left = [bases[i] for i in places]
            axes.barh(places, lengths, left=left, color=color, hatch=hatch, label=name, **edge)
    for place, (row, end) in enumerate(zip(shown, ends, strict=True)):
        least, most = (value / panel.unit for value in row.get(panel.spread) or [end * panel.unit] * 2)
        if most > least:
            axes.errorbar(end, place, xerr=[[max(0.0, end - least)], [max(0.0, most - end)]], color="black", capsize=3)
        text = f"{end:.0f}" if end >= 100 else f"{end:.1f}"
        behind: Values = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # hides the mark's line
        offset: Values = {"xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(text, (max(end, most), place), va="center", bbox=behind, **offset)
    if (mark := panel.mark(values)) is not None:
        axes.axvline(mark[0], color="black", linestyle=":", linewidth=1.2, label=mark[1])
    axes.set_xlabel(f"{panel.label} (less is better)")
    axes.margins(x=0.14)
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Figure) -> None:
    """Add one legend below all panels, with each label once."""
    entries = [entry for axes in figure.axes for entry in zip(*axes.get_legend_handles_labels(), strict=True)]
    unique = {name: handle for handle, name in reversed(entries)}
    if unique:
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=len(unique), frameon=False)

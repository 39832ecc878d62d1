"""The table as a picture: time and device memory per parameter, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightstep.bench.report import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common kind of colour blindness; the hatch tells them apart in grey.
STYLE = {
    "lightstep": ("#0072B2", "", "lightstep"),
    "peer": ("#E69F00", "//", "others"),
}
GREY = "#D0D0D0"

Values = dict[str, Any]


def draw(values: Values, path: Path) -> None:
    """Write the chart of `report.as_json`'s values as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in values["rows"] if row["note"] is None]
    figure = Figure(figsize=(11, 2.2 + 0.45 * max(1, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    with_memory = any(row["peak_device_bytes_beyond"] is not None for row in rows)
    panels = figure.subplots(1, 2 if with_memory else 1, sharey=True, squeeze=False)[0]
    _draw_times(panels[0], rows, values)
    if with_memory:
        _draw_memory(panels[1], rows)
    panels[0].set_yticks(range(len(rows)), [row["name"] for row in rows])
    panels[0].invert_yaxis()
    figure.suptitle(_title(values))
    add_legend(figure)
    figure.savefig(path, dpi=150, metadata={"Title": values["command"], "Description": values["date"]})


def _draw_times(axes: Axes, rows: list[Values], values: Values) -> None:
    bars(axes, rows, [0.0] * len(rows), [row["ms_per_1e9_parameters"] for row in rows])
    axes.set_xlabel("ms per 10⁹ parameters (less is better)")
    link = values["link_gb_per_s"]
    if link is not None:
        floor = 10 / link["duplex"] * 1e3
        label = f"{floor:.0f} ms: 10 bytes per parameter each way at the link's rate"
        axes.axvline(floor, color="black", linestyle=":", linewidth=1.2, label=label)


def _draw_memory(axes: Axes, rows: list[Values]) -> None:
    """Peak bytes per parameter on the device: weights and gradients in grey, what lies beyond them in colour."""
    base = [row["weight_and_gradient_bytes_per_parameter"] for row in rows]
    beyond = [(row["peak_device_bytes_beyond"] or 0) / row["parameters_per_rank"] for row in rows]
    axes.barh(range(len(rows)), base, color=GREY, edgecolor="black", linewidth=0.6, label="weights and gradients")
    bars(axes, rows, base, beyond)
    axes.set_xlabel("peak device bytes per parameter (less is better)")


def bars(axes: Axes, rows: list[Values], left: list[float], lengths: list[float]) -> None:
    """A bar for each row from `left`, in the colour of its kind, with the number where it ends."""
    for kind, (color, hatch, label) in STYLE.items():
        places = [i for i, row in enumerate(rows) if row["kind"] == kind]
        if not places:
            continue
        starts, own = [left[i] for i in places], [lengths[i] for i in places]
        style: Values = {"edgecolor": "black", "linewidth": 0.6, "color": color, "hatch": hatch, "label": label}
        drawn = axes.barh(places, own, left=starts, **style)
        ends = [short(start + length) for start, length in zip(starts, own, strict=True)]
        axes.bar_label(drawn, labels=ends, padding=3)
    axes.margins(x=0.14)
    axes.spines[["top", "right"]].set_visible(False)


def short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def add_legend(figure: Figure) -> None:
    """One for all panels, below them, each label once."""
    entries = [entry for axes in figure.axes for entry in zip(*axes.get_legend_handles_labels(), strict=True)]
    unique = {label: handle for handle, label in reversed(entries)}
    if unique:
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=len(unique), frameon=False)


def _title(values: Values) -> str:
    ranks = f", {values['ranks']} ranks" if values["ranks"] > 1 else ""
    parameters = size(values["model"]["parameters"])
    torch_version = values["versions"]["torch"]
    return f"One optimizer step, {parameters} parameters, {values['hardware']['device']}{ranks}, torch {torch_version}"

"""Shows results: files in a new folder, tables, and a chart with a line of panels for each table."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lightstep.environment import cpu_name
from lightstep.paths import local_path
from lightstep.plan.timing import device_name
from lightstep.state import numa

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = dict[str, Any]

RUNS = Path("runs/bench")


def conditions(device: torch.device) -> Values:
    """The command, the date, the hardware and the versions."""
    return {
        "command": shlex.join(["lightstep", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {
            "device": device_name(device),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "numa": numa.describe(device),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": importlib.metadata.version("transformers"),
        },
    }


# -- files ------------------------------------------------------------------------------------------------------------


def result_folder(asked: Path | None, what: str, stem: str) -> Path:
    """Where this run's results go: a new folder, `runs/bench/<time>-<what>`, or the one that was asked for.

    Args:
        stem: how the results' names end.

    Raises:
        ValueError: the folder holds results of an earlier run, which are not replaced.
    """
    folder = asked and local_path(asked, "results are written to a local folder")
    folder = folder or RUNS / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{what}"
    earlier = next(folder.glob(f"*{stem}.*"), None)
    if earlier is not None:
        raise ValueError(f"{earlier} is there from an earlier run; give another --output, or none for a new folder")
    return folder


@contextlib.contextmanager
def progress(visible: bool) -> Iterator[Callable[[str], None]]:
    """A function that says on stderr what is being measured: a status line on a terminal, else one line each."""
    console = Console(stderr=True, quiet=not visible)
    with console.status("starting") as status:

        def show(sentence: str) -> None:
            status.update(f"measuring {sentence}")
            if not console.is_terminal:
                console.print(f"measuring {sentence}", highlight=False)

        yield show


def write_json(values: Values, path: Path) -> None:
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(values, indent=2) + "\n")
    temporary.replace(path)


def publish(values: Values, view: View, file: Path) -> None:
    """Write the result as JSON and as a chart, and print its tables."""
    write_json(values, file)
    draw(values, view, file.with_suffix(".png"))
    console = Console()
    print_table(values, view, console)
    console.print(f"{file} and {file.with_suffix('.png')} written", highlight=False)


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of figures. If the terminal is too narrow, columns of the lowest `priority` are left out first."""

    heading: str
    keys: str
    """The JSON key of the figure, or several keys separated by blanks."""
    format_spec: str = ".1f"
    priority: int = 0
    unit: float = 1
    optional: bool = False
    """Left out if no row has the figure."""

    def is_known(self, row: Values) -> bool:
        """Whether the row has all of its figures."""
        return None not in map(row.get, self.keys.split())

    def cell(self, row: Values) -> str:
        """The text of one cell: a dash for an unknown figure; a list is shown as a range."""
        return " / ".join(self._shown(row[key]) for key in self.keys.split()) if self.is_known(row) else "–"

    def _shown(self, value: Any) -> str:
        return (
            " – ".join(map(self._shown, value))
            if isinstance(value, list)
            else format(value / self.unit, self.format_spec)
        )


@dataclass(frozen=True)
class Panel:
    """One bar per row: grey up to the figure `base`, colored from there to the figure `key`.

    A whisker shows the range of the figure `spread`. `mark` returns the position and label of a vertical line.
    """

    label: str
    key: str
    base: str = ""
    base_label: str | None = None
    spread: str = ""
    unit: float = 1
    mark: Callable[[Values], tuple[float, str] | None] = lambda values: None


@dataclass(frozen=True)
class View:
    """How values are shown: one table and one line of chart panels for each case.

    Attributes:
        key: the figure that every measured row has.
        title: makes a title from all values and the case.
        footnotes: makes the sentences below the tables.
        case: the key of a row's size, for tasks that are measured at several.
    """

    key: str
    columns: tuple[Column, ...]
    panels: tuple[Panel, ...]
    title: Callable[[Values, Any], str]
    footnotes: Callable[[Values], list[str]]
    case: str | None = None

    def sections(self, values: Values) -> list[tuple[str, list[Values]]]:
        """Titles and rows."""
        rows = values["rows"]
        cases = dict.fromkeys(row.get(self.case) for row in rows) or {None: None}
        return [(self.title(values, case), [row for row in rows if row.get(self.case) == case]) for case in cases]


BY_HAND = Column("×\nby hand", "times_by_hand", ".3f", 8, optional=True)
"""With Muon, and of small models."""

WIDE = 140
_NAME = 24
"""Width that names keep when the terminal is narrow; longer names are folded."""


def print_table(values: Values, view: View, console: Console | None = None) -> None:
    """Print one table for each section, with as many columns as fit, then footnotes and notes."""
    console = console or Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:  # a file has room for every column
        console.width = WIDE
    left_out: list[str] = []
    for title, rows in view.sections(values):
        columns = [column for column in view.columns if not column.optional or any(map(column.is_known, rows))]
        wanted = list(columns)
        table = _table(title, rows, columns, view.key)
        while len(columns) > 1 and _required_width(table, rows, console) > console.width:
            columns.remove(min(columns, key=lambda column: column.priority))
            table = _table(title, rows, columns, view.key)
        left_out += [column.heading for column in wanted if column not in columns]
        console.print(table)
    if left_out:
        names = ", ".join(dict.fromkeys(heading.replace("\n", " ") for heading in left_out))
        console.print(f"Left out here for lack of room, see the JSON file: {names}.", highlight=False, markup=False)
    for sentence in view.footnotes(values):
        console.print(sentence, highlight=False, markup=False)
    noted = [(label(row), row["note"]) for row in values["rows"] if row.get("note")]
    for name, note in dict.fromkeys(noted):
        console.print(f"  {name}: {note.removeprefix(f'{name}: ')}", highlight=False, markup=False)


def _table(title: str, rows: list[Values], columns: list[Column], key: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", min_width=min(_NAME, _longest_name(rows)))
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in rows:
        state = "–" if row.get("note") is None else "skipped" if row["skipped"] else "failed"
        cells = [column.cell(row) for column in columns] if key in row else [state, *["–"] * (len(columns) - 1)]
        table.add_row(label(row), *cells, style="bold" if row["kind"] == "lightstep" else None)
    return table


def _required_width(table: Table, rows: list[Values], console: Console) -> int:
    """Width of the table when long names are folded; numbers and headings are never folded."""
    without_folding = console.measure(table, options=console.options.update_width(1000)).maximum
    return without_folding - max(0, _longest_name(rows) - _NAME)


def _longest_name(rows: list[Values]) -> int:
    return max((len(label(row)) for row in rows), default=0)


def label(row: Values) -> str:
    return str(row.get("label", row["name"]))


def size(parameters: int) -> str:
    """For example 1.24 B or 1.81 M."""
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def link_sentence(link: Values | None) -> str:
    if link is None:
        return "No GPU: nothing crosses a link here, so these times say nothing about one."
    pinned = "page-locked, exactly registered" if link["page_locked"] else "PAGEABLE: page-locking was refused"
    return (
        f"Link, {pinned}: {link['to_device']:.1f} GB/s ⇧ to the device alone, {link['to_host']:.1f} GB/s ⇩ to the host "
        f"alone, {link['duplex']:.1f} each way at once."
    )


# -- the chart --------------------------------------------------------------------------------------------------------

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

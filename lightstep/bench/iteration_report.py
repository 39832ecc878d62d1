"""Whole iterations as JSON, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightstep.bench.iteration import WITHOUT, IterationRow, Iterations, Seen
from lightstep.bench.report import circumstances, size

Values = dict[str, Any]

_COLUMNS = (
    "strategy or peer",
    "iteration\nms",
    "times\nthe first",
    "exposed\nms",
    "tokens/s",
    "peak\nGB",
    "host\nsyncs",
)
_COLOURS = {"lightstep": "#0072B2", "peer": "#E69F00", "none": "#D0D0D0"}


def as_json(run: Iterations) -> Values:
    """Everything that is known; the slowest rank's times and the largest memory. A collective: all ranks call it."""
    results = [[_figures(run, row, batch.tokens) for batch in run.batches] for row in run.rows]
    for place, batch in enumerate(run.batches):
        _compare(run, [result[place] for result in results], batch.tokens)
    rows = [
        {"name": row.name, "kind": row.kind, "about": row.about, "note": row.note, "skipped": row.skipped}
        | {"batches": [figures for figures in result if figures]}
        for row, result in zip(run.rows, results, strict=True)
    ]
    return {
        **circumstances(run.device, run.ranks.world_size),
        "model": {**run.sizes.as_json(), "parameters": run.parameters, "activation_checkpointing": True},
        "sequence": [batch.length for batch in run.batches],
        "tokens_per_rank": [batch.tokens for batch in run.batches],
        "steps": run.effort.steps,
        "warmup": run.effort.warmup,
        "rounds": run.rounds,
        "rows": rows,
    }


def _figures(run: Iterations, row: IterationRow, tokens: int) -> Values:
    seen = row.seen.get(tokens, Seen())
    known = row.note is None and bool(seen.iteration_ms)
    if run.ranks.minimum([float(known)])[0] == 0.0:
        return {}
    median, least, most = run.ranks.maximum([seen.median_ms, min(seen.iteration_ms), max(seen.iteration_ms)])
    peak, syncs = run.ranks.maximum([float(seen.peak_bytes or 0), float(seen.host_syncs or 0)])
    return {
        "tokens_per_rank": tokens,
        "iteration_ms": median,
        "iteration_ms_range": [least, most],
        "iteration_ms_all": seen.iteration_ms,
        "tokens_per_s": tokens * run.ranks.world_size / median * 1e3,
        "peak_device_bytes": None if seen.peak_bytes is None else int(peak),
        "host_syncs": None if seen.host_syncs is None else int(syncs),
        "first_sync": seen.first_sync,
    }


def _compare(run: Iterations, figures: list[Values], tokens: int) -> None:
    """What each has beyond forward and backward, and times what the first contender takes."""
    by_name = dict(zip((row.name for row in run.rows), figures, strict=True))
    without = by_name.get(WITHOUT) or {}
    first = next((by_name[row.name] for row in run.rows if row.name != WITHOUT), {})
    for found in figures:
        if found and without:
            found["exposed_ms"] = found["iteration_ms"] - without["iteration_ms"]
        if found and first:
            found["times_the_first"] = found["iteration_ms"] / first["iteration_ms"]


def print_table(values: Values, console: Console) -> None:
    if not console.is_terminal:
        console = Console(file=console.file, width=128)
    for tokens in values["tokens_per_rank"]:
        console.print(_table(values, tokens))
    for row in values["rows"]:
        if row["note"] is not None:
            console.print(f"  {row['name']}: {row['note']}", highlight=False, markup=False)


def _table(values: Values, tokens: int) -> Table:
    table = Table(title=_title(values, tokens), caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in values["rows"]:
        found = _of(row, tokens)
        table.add_row(row["name"], *_cells(row, found), style="bold" if row["kind"] == "lightstep" else None)
    return table


def _of(row: Values, tokens: int) -> Values:
    return next((figures for figures in row["batches"] if figures["tokens_per_rank"] == tokens), {})


def _cells(row: Values, found: Values) -> list[str]:
    if not found:
        return ["skipped" if row["skipped"] else "failed" if row["note"] else "–", *["–"] * (len(_COLUMNS) - 2)]
    peak, syncs = found["peak_device_bytes"], found["host_syncs"]
    return [
        f"{found['iteration_ms']:.1f}",
        f"{found['times_the_first']:.3f}" if "times_the_first" in found else "–",
        f"{found['exposed_ms']:.1f}" if "exposed_ms" in found else "–",
        f"{found['tokens_per_s']:.0f}",
        "–" if peak is None else f"{peak / 1e9:.2f}",
        "–" if syncs is None else str(syncs),
    ]


def _title(values: Values, tokens: int) -> str:
    ranks = f", {values['ranks']} ranks (the slowest counts)" if values["ranks"] > 1 else ""
    model = size(values["model"]["parameters"])
    return f"One iteration of {tokens} tokens per device: {model} parameters, {values['hardware']['device']}{ranks}"


def draw(values: Values, path: Path) -> None:
    """Write iteration times as a PNG, one panel for each batch; grey is forward and backward alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in values["rows"] if row["batches"] and row["name"] != WITHOUT]
    figure = Figure(figsize=(11, 2.2 + 0.5 * max(1, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(values["tokens_per_rank"]), sharey=True, squeeze=False)[0]
    for axes, tokens in zip(panels, values["tokens_per_rank"], strict=True):
        for place, row in enumerate(rows):
            found = _of(row, tokens)
            exposed = max(found.get("exposed_ms", 0.0), 0.0) if found else 0.0
            whole = found.get("iteration_ms", 0.0)
            axes.barh(place, whole - exposed, color=_COLOURS["none"], edgecolor="black", linewidth=0.6)
            style = {"color": _COLOURS[row["kind"]], "edgecolor": "black", "linewidth": 0.6}
            bars = axes.barh(place, exposed, left=whole - exposed, **style)
            axes.bar_label(bars, labels=[f"{whole:.0f}"], padding=3)
        axes.set_xlabel(f"ms per iteration of {tokens} tokens (grey: forward and backward alone)")
        axes.margins(x=0.14)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [row["name"] for row in rows])
    panels[0].invert_yaxis()
    parameters, versions = size(values["model"]["parameters"]), values["versions"]
    figure.suptitle(
        f"Whole iterations, {parameters} parameters, {values['hardware']['device']}, torch {versions['torch']}"
    )
    figure.savefig(path, dpi=150, metadata={"Title": values["command"], "Description": values["date"]})

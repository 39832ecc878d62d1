"""Whole iterations as plain values (`as_json`) and as a table for people."""

from __future__ import annotations

from dataclasses import asdict

import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from lightstep.bench.contender import ADAMW, MAX_NORM
from lightstep.bench.iteration.model import LOSS_CHUNK
from lightstep.bench.iteration.run import Row, Run
from lightstep.bench.iteration.window import Cell
from lightstep.bench.report import Values, conditions, for_tables, number, size


def as_json(run: Run) -> Values:
    """Everything that is known, the slowest rank's times and the largest memory. A collective: all ranks call it.

    One entry of `rows` per contender and number of tokens.
    """
    values = conditions(run.task.device)
    values["versions"]["transformers"] = transformers.__version__
    return {
        **values,
        "model": {
            **asdict(run.task.shape),
            "parameters": run.task.shape.parameters,
            "attention": "sdpa",
            "activation_checkpointing": True,
            "loss_chunk_tokens": LOSS_CHUNK,
        },
        "optimizer": {"class": "AdamW", **ADAMW, "max_norm": MAX_NORM},
        "sequence": run.task.sequence,
        "tokens_per_rank": list(run.task.tokens),
        "iterations": run.effort.steps,
        "warmup": run.effort.warmup,
        "rounds": run.rounds,
        "ranks": run.ranks.world_size,
        "link_gb_per_s": asdict(run.link) if run.link is not None else None,
        "rows": [row for tokens in run.task.tokens for row in _rows(run, tokens)],
    }


def _rows(run: Run, tokens: int) -> list[Values]:
    rows = [_row(run, row, tokens) for row in run.rows]
    without = next((row.get("iteration_ms") for row in rows if row["kind"] == "baseline"), None)
    resident = next((row["iteration_ms"] for row in rows if row["resident"] and "iteration_ms" in row), None)
    for row in rows:
        if "iteration_ms" in row:
            own = row["iteration_ms"]
            row["exposed_ms"] = None if without is None else own - without
            row["times_resident"] = None if resident is None else own / resident
    return rows


def _row(run: Run, row: Row, tokens: int) -> Values:
    entry, cell = row.entry, row.cells[tokens]
    head: Values = {
        "name": entry.name,
        "label": entry.label,
        "kind": entry.kind,
        "about": entry.about,
        "resident": entry.resident,
        "tokens": tokens,
        "note": row.note or cell.note,
        "skipped": row.skipped or cell.skipped,
    }
    return head if head["note"] is not None or not cell.windows else {**head, **_figures(run, cell, tokens)}


def _figures(run: Run, cell: Cell, tokens: int) -> Values:
    """Times are means over all iterations, of the slowest rank."""
    iterations = [time for window in cell.windows for time in window]
    own = [sum(iterations) / len(iterations), min(iterations), max(iterations)]
    mean, least, most = run.ranks.maximum(own)
    counts = [cell.peak_bytes or 0, cell.weight_bytes, cell.host_bytes, cell.host_syncs or 0]
    peak, weights, host, syncs = (int(value) for value in run.ranks.maximum([float(count) for count in counts]))
    return {
        "iteration_ms": mean,
        "iteration_ms_range": [least, most],
        "windows_ms": cell.windows,
        "tokens_per_s": tokens * run.ranks.world_size / mean * 1e3,
        "peak_device_bytes": None if cell.peak_bytes is None else peak,
        "peak_device_bytes_beyond_weights": None if cell.peak_bytes is None else peak - weights,
        "weight_bytes": weights,
        "host_bytes": host,
        "host_syncs": None if cell.host_syncs is None else syncs,
        "first_sync": cell.first_sync,
        "loss": cell.loss,
        "grad_norm": cell.grad_norm,
    }


# -- the table ---------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "strategy or peer",
    "iteration\nms",
    "from – to\nms",
    "×\nresident",
    "exposed\nms",
    "tokens/s",
    "peak\nGB",
    "beyond\nweights, GB",
    "host\nGB",
    "host\nwaits",
)


def print_table(values: Values, console: Console | None = None) -> None:
    """One table for each number of tokens."""
    console = for_tables(console or Console())
    for tokens in values["tokens_per_rank"]:
        console.print(_table(values, tokens))
    console.print(_legend(values), highlight=False, markup=False)
    for label, note in dict.fromkeys((row["label"], row["note"]) for row in values["rows"] if row["note"] is not None):
        console.print(f"  {label}: {note}", highlight=False, markup=False)


def _table(values: Values, tokens: int) -> Table:
    table = Table(title=title(values, tokens), box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if i else "left", no_wrap=i > 0)
    for row in values["rows"]:
        if row["tokens"] == tokens:
            table.add_row(*_cells(row), style="bold" if row["kind"] == "lightstep" else None)
    return table


def title(values: Values, tokens: int) -> str:
    """What was measured, in one line."""
    model = values["model"]
    ranks = f" on each of {values['ranks']} ranks (the slowest counts)" if values["ranks"] > 1 else ""
    what = f"{size(model['parameters'])} parameters ({model['name']}), {values['hardware']['device']}"
    return f"One iteration of {tokens} tokens{ranks}: {what}"


def _legend(values: Values) -> str:
    base = "resident" if values["ranks"] == 1 else "fsdp2"
    return (
        f"Mean of iterations that follow each other. exposed: beyond forward and backward of {base} with the gradients "
        "dropped.\nPeak: largest during an iteration, on one rank. Host waits: in one iteration, the model's own too."
    )


def _cells(row: Values) -> list[str]:
    if "iteration_ms" not in row:
        state = "–" if row["note"] is None else "skipped" if row["skipped"] else "failed"
        return [row["label"], state, *["–"] * (len(_COLUMNS) - 2)]
    least, most = row["iteration_ms_range"]
    return [
        row["label"],
        f"{row['iteration_ms']:.1f}",
        f"{least:.1f} – {most:.1f}",
        number(row["times_resident"], ".3f"),
        "–" if row["kind"] == "baseline" else number(row["exposed_ms"], ".1f"),
        f"{row['tokens_per_s']:.0f}",
        number(_gigabytes(row["peak_device_bytes"]), ".2f"),
        number(_gigabytes(row["peak_device_bytes_beyond_weights"]), ".2f"),
        f"{row['host_bytes'] / 1e9:.1f}",
        number(row["host_syncs"], "d"),
    ]


def _gigabytes(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 1e9

"""The result as plain values (`as_json`), as a file, and as a table for people."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lightstep.bench.disk import DiskTime
from lightstep.bench.run import Row, Run, device_name

Values = dict[str, Any]

_TRAFFIC = ("gb_to_device", "gb_to_host", "gb_per_s_to_device", "gb_per_s_to_host", "percent_of_duplex")


def as_json(run: Run) -> Values:
    """Everything that is known, the slowest rank's times and the largest memory. A collective: all ranks call it."""
    rows = [_row(run, row) for row in run.rows]
    _compare_weights(run.rows, rows)
    return {
        **conditions(run.setup.device),
        "model": {**asdict(run.setup.shape), "parameters": run.setup.shape.parameters, "weights": "bfloat16"},
        "steps": run.effort.steps,
        "warmup": run.effort.warmup,
        "rounds": run.rounds,
        "ranks": run.ranks.world_size,
        "link_gb_per_s": asdict(run.link) if run.link is not None else None,
        "rows": rows,
    }


def conditions(device: torch.device) -> Values:
    """What was asked for, when, on what and with what."""
    return {
        "command": shlex.join(["lightstep", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {
            "device": device_name(device),
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _row(run: Run, row: Row) -> Values:
    head = {"name": row.name, "kind": row.kind, "about": row.about, "note": row.note, "skipped": row.skipped}
    if not row.measured:
        return head
    return {**head, **_figures(run, row)}


def _figures(run: Run, row: Row) -> Values:
    seen = row.measurement
    own_times = [seen.median_ms, min(seen.step_ms), max(seen.step_ms), sum(seen.block_ms) / len(seen.block_ms)]
    median, least, most, block = run.ranks.maximum(own_times)
    memory = run.ranks.maximum([float(seen.peak_bytes or 0), float(seen.host_bytes), float(seen.host_syncs or 0)])
    return {
        "parameters_per_rank": seen.parameters,
        "step_ms": median,
        "step_ms_range": [least, most],
        "step_ms_all": seen.step_ms,
        "block_ms": block,
        "ms_per_1e9_parameters": median / seen.parameters * 1e9,
        **_traffic(run, row, median),
        "weight_and_gradient_bytes_per_parameter": seen.weight_and_gradient_bytes / seen.parameters,
        "peak_device_bytes_beyond": None if seen.peak_bytes is None else int(memory[0]),
        "host_bytes_per_parameter": memory[1] / seen.parameters,
        "host_syncs": None if seen.host_syncs is None else int(memory[2]),
        "first_sync": seen.first_sync,
        "allocations_per_step": seen.allocations,
        "driver_allocations": seen.driver_allocations,
        "checkpoint": None if seen.disk is None else _checkpoint(seen.disk),
    }


def _checkpoint(disk: DiskTime) -> Values:
    gigabytes = disk.nbytes / 1e9
    return {
        "gb": gigabytes,
        "save_s": disk.save_s,
        "gb_per_s": gigabytes / disk.save_s,
        "plain_files_gb_per_s": gigabytes / disk.plain_s,
    }


def _traffic(run: Run, row: Row, step_ms: float) -> Values:
    """Bytes over the link per step, the rates they make, and the busier way's share of the link's rate both ways."""
    seen = row.measurement
    if seen.to_device_bytes is None or seen.to_host_bytes is None:
        return dict.fromkeys(_TRAFFIC)
    to_device, to_host = seen.to_device_bytes / 1e9, seen.to_host_bytes / 1e9
    rates = to_device / step_ms * 1e3, to_host / step_ms * 1e3
    percent = 100 * max(rates) / run.link.duplex if run.link is not None else None
    return dict(zip(_TRAFFIC, (to_device, to_host, *rates, percent), strict=True))


def _compare_weights(rows: list[Row], values: list[Values]) -> None:
    """How far each one's weights are from the hand-written loop's after the same gradients: the same work?"""
    reference = next((row.measurement.sample for row in rows if row.name == "torch" and row.measured), None)
    for row, value in zip(rows, values, strict=True):
        sample = row.measurement.sample
        if reference is not None and row.measured and sample is not None and sample.shape == reference.shape:
            value["largest_weight_difference"] = float((sample - reference).abs().max())


def write_json(values: Values, path: Path) -> None:
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(values, indent=2) + "\n")
    temporary.replace(path)


# -- the table ---------------------------------------------------------------------------------------------------------

WIDE = 128
_WIDE_ONLY = ("GB moved\n⇧ / ⇩", "weights+grads\nB/param")  # left out where the terminal has no room for them
_COLUMNS = (
    "strategy or peer",
    "step\nms",
    "ms per 10⁹\nparameters",
    "GB moved\n⇧ / ⇩",
    "GB/s\n⇧ / ⇩",
    "% of\nlink",
    "weights+grads\nB/param",
    "peak\nbeyond, MB",
    "host\nB/param",
    "host\nsyncs",
)


def print_table(values: Values, console: Console | None = None) -> None:
    console = for_tables(console or Console())
    console.print(_table(values, wide=console.width >= WIDE))
    for row in values["rows"]:
        if row["note"] is not None:
            console.print(f"  {row['name']}: {row['note']}", highlight=False, markup=False)
        elif row["host_syncs"] and row["kind"] == "lightstep":
            where = row["first_sync"]
            console.print(f"  {row['name']}: the host waits for the device, first at {where}", highlight=False)
        if saved := row.get("checkpoint"):
            rates = f"{saved['gb_per_s']:.2f} GB/s; plain files: {saved['plain_files_gb_per_s']:.2f} GB/s"
            console.print(f"  {row['name']}: checkpoint of {saved['gb']:.2f} GB saved at {rates}", highlight=False)


def for_tables(console: Console) -> Console:
    """The console; outside of a terminal one that is wide enough for every column."""
    return console if console.is_terminal else Console(file=console.file, width=WIDE)


def size(parameters: int) -> str:
    """In words: 1.24 B, 1.81 M."""
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def _table(values: Values, wide: bool) -> Table:
    model, hardware = values["model"], values["hardware"]
    parameters = size(model["parameters"])
    title = f"One optimizer step: {parameters} parameters, {model['layers']} layers, {hardware['device']}"
    if values["ranks"] > 1:
        title += f", {values['ranks']} ranks (the slowest counts)"
    table = Table(title=title, caption=_caption(values), caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [i for i, column in enumerate(_COLUMNS) if wide or column not in _WIDE_ONLY]
    for i in shown:
        table.add_column(_COLUMNS[i], justify="right" if i else "left", no_wrap=True)
    for row in values["rows"]:
        cells = _cells(row)
        table.add_row(*(cells[i] for i in shown), style="bold" if row["kind"] == "lightstep" else None)
    return table


def _caption(values: Values) -> str:
    link = values["link_gb_per_s"]
    if link is None:
        return "No GPU: nothing crosses a link here, and these times say nothing about one."
    pinned = "page-locked, exactly registered" if link["page_locked"] else "PAGEABLE: page-locking was refused"
    return (
        f"Link, {pinned}: {link['to_device']:.1f} GB/s ⇧ alone, {link['to_host']:.1f} GB/s ⇩ alone, "
        f"{link['duplex']:.1f} each way at once. ⇧ to the device, ⇩ to the host. Back-to-back steps, median."
    )


def _cells(row: Values) -> list[str]:
    if row["note"] is not None:
        return [row["name"], "skipped" if row["skipped"] else "failed", *["–"] * (len(_COLUMNS) - 2)]
    peak = row["peak_device_bytes_beyond"]
    return [
        row["name"],
        f"{row['step_ms']:.1f}",
        f"{row['ms_per_1e9_parameters']:.1f}",
        _pair(row["gb_to_device"], row["gb_to_host"], ".2f"),
        _pair(row["gb_per_s_to_device"], row["gb_per_s_to_host"], ".1f"),
        number(row["percent_of_duplex"], ".0f"),
        f"{row['weight_and_gradient_bytes_per_parameter']:.0f}",
        number(None if peak is None else peak / 1e6, ".0f"),
        f"{row['host_bytes_per_parameter']:.1f}",
        number(row["host_syncs"], "d"),
    ]


def number(value: float | None, how: str) -> str:
    """Formatted; a dash for what is not known."""
    return "–" if value is None else format(value, how)


def _pair(first: float | None, second: float | None, how: str) -> str:
    return "–" if first is None or second is None else f"{first:{how}} / {second:{how}}"

"""`lightstep bench`: one optimizer step on a Llama-shaped stack, from given gradients."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightstep.bench.contender import Task
from lightstep.bench.disk import DiskTime, time_saving
from lightstep.bench.layer_stream import LayerStream
from lightstep.bench.libraries import DeepSpeedCpuAdam, Fsdp2OffloadStep, TorchaoOffload
from lightstep.bench.model import GradientSets, LlamaShape, LlamaStack
from lightstep.bench.peers import CpuAdamW, TorchFsdp2, TorchResident, TorchResidentFloatGradients
from lightstep.bench.probes import link_traffic
from lightstep.bench.report import Column, Panel, Values, View, link_sentence, number, size, spread
from lightstep.bench.run import Cell, Run, Visit
from lightstep.bench.strategies import StrategyContender

_SAMPLE = 2048  # weights per tensor that are compared between contenders
_TRAFFIC = ("gb_to_device", "gb_to_host", "gb_per_s_to_device", "gb_per_s_to_host", "percent_of_duplex")


@dataclass(frozen=True)
class StepTask(Task):
    """One optimizer step.

    The first step of a round starts on a quiet machine and is left out; the step time is the median of the others.
    `block_ms` is the plain average of the whole round, until everything has landed.
    """

    shape: LlamaShape

    stem = "bench"
    gives_gradients = True
    peers = (
        TorchResident,
        TorchResidentFloatGradients,
        TorchFsdp2,
        LayerStream,
        CpuAdamW,
        Fsdp2OffloadStep,
        TorchaoOffload,
        DeepSpeedCpuAdam,
    )

    def default_strategies(self, ranks: int) -> tuple[str, ...]:
        return ("resident", "bulk", "stream")

    def model(self, dtype: torch.dtype = torch.bfloat16) -> LlamaStack:
        return LlamaStack(self.shape, self.device, dtype, self.seed)

    def measure(self, visit: Visit, case: int, cell: Cell) -> None:
        contender = visit.contender
        assert contender is not None
        gradients = GradientSets(contender.gradient_weights(), contender.gradient_dtype, self.device)
        gradients.refresh(self.seed + visit.number + 1)
        visit.inputs[case] = gradients
        visit.time(contender.step, gradients, cell, visit.run.effort.warmup, settle=True)
        # fp32 weights are compared as what a forward in bf16 sees.
        weights = contender.weights()
        cell.sample = torch.cat([weight.flatten()[:_SAMPLE].bfloat16().float().cpu() for weight in weights])

    def probe(self, visit: Visit, case: int, cell: Cell) -> None:
        contender, gradients = visit.contender, visit.inputs[case]
        assert contender is not None
        visit.settle()
        visit.count_syncs(contender.step, gradients, cell)
        visit.settle()

        def step() -> None:
            contender.step(gradients[1])
            contender.finish()

        cell.traffic = link_traffic(step, self.device)
        if visit.run.checkpoints is not None and isinstance(contender, StrategyContender):
            cell.disk = time_saving(contender.save, visit.run.checkpoints, visit.run.ranks)

    def head(self, run: Run) -> Values:
        return {"model": {**self.shape.values(), "weights": "bfloat16"}, "steps": run.effort.steps}

    def figures(self, run: Run, case: int, cell: Cell) -> Values:
        steps = [time for window in cell.windows for time in window[1:] or window]
        blocks = [sum(window, landing) for window, landing in zip(cell.windows, cell.landing_ms, strict=True)]
        block_ms = sum(blocks) / sum(map(len, cell.windows))
        own_times = [statistics.median(steps), min(steps), max(steps), block_ms]
        median, least, most, block = run.ranks.maximum(own_times)
        beyond = max(0, (cell.peak_bytes or 0) - cell.weight_bytes)
        memory = run.ranks.maximum([float(beyond), float(cell.host_bytes), float(cell.host_syncs or 0)])
        return {
            "parameters_per_rank": cell.parameters,
            "step_ms": median,
            "step_ms_range": [least, most],
            "step_ms_all": steps,
            "block_ms": block,
            "ms_per_1e9_parameters": median / cell.parameters * 1e9,
            **_traffic(run, cell, median),
            "weight_and_gradient_bytes_per_parameter": (cell.weight_bytes + cell.input_bytes) / cell.parameters,
            "peak_device_bytes_beyond": None if cell.peak_bytes is None else int(memory[0]),
            "host_bytes_per_parameter": memory[1] / cell.parameters,
            "host_syncs": None if cell.host_syncs is None else int(memory[2]),
            "first_sync": cell.first_sync,
            "allocations_per_step": cell.allocations,
            "driver_allocations": cell.driver_allocations,
            "checkpoint": None if cell.disk is None else _checkpoint(cell.disk),
        }

    def compare(self, cells: Sequence[Cell], rows: Sequence[Values]) -> None:
        """How far each one's weights are from the hand-written loop's after the same gradients: the same work?"""
        names = [row["name"] for row in rows]
        reference = cells[names.index("torch")].sample if "torch" in names else None
        for cell, row in zip(cells, rows, strict=True):
            sample = cell.sample
            if "step_ms" in row and reference is not None and sample is not None and sample.shape == reference.shape:
                row["largest_weight_difference"] = float((sample - reference).abs().max())


def _checkpoint(disk: DiskTime) -> Values:
    gigabytes = disk.nbytes / 1e9
    return {
        "gb": gigabytes,
        "save_s": disk.save_s,
        "gb_per_s": gigabytes / disk.save_s,
        "plain_files_gb_per_s": gigabytes / disk.plain_s,
    }


def _traffic(run: Run, cell: Cell, step_ms: float) -> Values:
    """Bytes over the link per step, the rates they make, and the busier way's share of the link's rate both ways."""
    if cell.traffic is None:
        return dict.fromkeys(_TRAFFIC)
    moved = [count / 1e9 for count in cell.traffic]
    rates = [amount / step_ms * 1e3 for amount in moved]
    percent = 100 * max(rates) / run.link.duplex if run.link is not None else None
    return dict(zip(_TRAFFIC, (*moved, *rates, percent), strict=True))


# -- how it is shown --------------------------------------------------------------------------------------------------


def _sections(values: Values) -> list[tuple[str, list[Values]]]:
    model = values["model"]
    what = f"{size(model['parameters'])} parameters, {model['layers']} layers, {values['hardware']['device']}"
    ranks = f", {values['ranks']} ranks (the slowest counts)" if values["ranks"] > 1 else ""
    return [(f"One optimizer step: {what}{ranks}, torch {values['versions']['torch']}", values["rows"])]


def _below(values: Values) -> list[str]:
    said = [link_sentence(values["link_gb_per_s"]), "Median of back-to-back steps."]
    for row in values["rows"]:
        if row.get("host_syncs") and row["kind"] == "lightstep":
            said.append(f"  {row['name']}: the host waits for the device, first at {row['first_sync']}")
        if saved := row.get("checkpoint"):
            rates = f"{saved['gb_per_s']:.2f} GB/s; plain files: {saved['plain_files_gb_per_s']:.2f} GB/s"
            said.append(f"  {row['name']}: checkpoint of {saved['gb']:.2f} GB saved at {rates}")
    return said


def _pair(first: float | None, second: float | None, how: str) -> str:
    return "–" if first is None or second is None else f"{first:{how}} / {second:{how}}"


def _peak_megabytes(row: Values) -> float | None:
    peak = row["peak_device_bytes_beyond"]
    return None if peak is None else peak / 1e6


def _peak_per_parameter(row: Values) -> float | None:
    peak = row["peak_device_bytes_beyond"]
    return None if peak is None else _given_per_parameter(row) + peak / row["parameters_per_rank"]


def _given_per_parameter(row: Values, rows: Sequence[Values] = ()) -> float:
    return float(row["weight_and_gradient_bytes_per_parameter"])


def _range_per_parameter(row: Values) -> tuple[float, float]:
    least, most = (time / row["parameters_per_rank"] * 1e9 for time in row["step_ms_range"])
    return least, most


def _floor(values: Values) -> tuple[float, str] | None:
    link = values["link_gb_per_s"]
    if link is None:
        return None
    floor = 10 / link["duplex"] * 1e3
    return floor, f"{floor:.0f} ms: 10 bytes per parameter each way at the link's rate"


StepTask.view = View(
    key="step_ms",
    columns=(
        Column("step\nms", lambda row: f"{row['step_ms']:.1f}", 9),
        Column("from – to\nms", lambda row: spread(row["step_ms_range"]), 8),
        Column("ms per 10⁹\nparameters", lambda row: f"{row['ms_per_1e9_parameters']:.1f}", 5),
        Column("GB moved\n⇧ / ⇩", lambda row: _pair(row["gb_to_device"], row["gb_to_host"], ".2f"), 1),
        Column("GB/s\n⇧ / ⇩", lambda row: _pair(row["gb_per_s_to_device"], row["gb_per_s_to_host"], ".1f"), 2),
        Column("% of\nlink", lambda row: number(row["percent_of_duplex"], ".0f"), 4),
        Column("weights+\ngrads\nB/param", lambda row: f"{_given_per_parameter(row):.0f}", 0),
        Column("peak\nbeyond\nMB", lambda row: number(_peak_megabytes(row), ".0f"), 7),
        Column("host\nB/param", lambda row: f"{row['host_bytes_per_parameter']:.1f}", 6),
        Column("host\nwaits", lambda row: number(row["host_syncs"], "d"), 3),
    ),
    panels=(
        Panel(
            "ms per 10⁹ parameters",
            lambda row: float(row["ms_per_1e9_parameters"]),
            spread=_range_per_parameter,
            mark=_floor,
        ),
        Panel(
            "peak device bytes per parameter",
            _peak_per_parameter,
            base=_given_per_parameter,
            base_label="weights and gradients",
        ),
    ),
    sections=_sections,
    below=_below,
)

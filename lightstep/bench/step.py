"""`lightstep bench`: one optimizer step on a Llama-shaped stack, from given gradients.

With `--checkpoints` also how fast a strategy saves, and how long an asynchronous save blocks training, beside plain
files of the same size that all ranks write at once, and torch's ``async_save``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightstep.bench.machine import Ranks, elapsed
from lightstep.bench.models import Llama, LlamaShape
from lightstep.bench.peers import (
    CpuAdamW,
    DeepSpeedCpuAdam,
    Dion,
    DionTriton,
    Fsdp2OffloadStep,
    LayerStream,
    TorchaoOffload,
    TorchFsdp2,
    TorchResident,
    TorchResidentFloatGradients,
)
from lightstep.bench.report import BY_HAND, Column, Panel, Values, View, link_sentence, size
from lightstep.bench.run import OPTIMIZERS, Measurement, Row, Run, Spread, Task, add_times_by_hand
from lightstep.bench.strategies import StrategyContender

_SAMPLE = 2048  # weights per tensor that are compared between contenders
_GRADIENT_STD = 0.01
_TRAFFIC = ("gb_to_device", "gb_to_host", "gb_per_s_to_device", "gb_per_s_to_host", "percent_of_duplex")


@dataclass(frozen=True)
class StepTask(Task):
    """One optimizer step.

    The first step of a round starts on an idle machine and is left out; the step time is the median of the others.
    `block_ms` is the mean over the whole round, until all its work is done.
    """

    shape: LlamaShape

    stem = "bench"
    provides_gradients = True
    peers = (
        TorchResident,
        TorchResidentFloatGradients,
        TorchFsdp2,
        LayerStream,
        CpuAdamW,
        Fsdp2OffloadStep,
        TorchaoOffload,
        DeepSpeedCpuAdam,
        Dion,
        DionTriton,
    )

    def default_strategies(self, ranks: int) -> tuple[str, ...]:
        if self.optimizer == "adamw":
            return ("resident", "bulk", "stream")
        return ("resident", "stream", "stream-overlap") if ranks == 1 else ("fsdp2", "fsdp2-stream")

    def model(self, dtype: torch.dtype = torch.bfloat16) -> Llama:
        return self.shape.make(self.device, dtype, self.seed)

    def measure(self, measurement: Measurement) -> None:
        contender = measurement.contender
        seed = self.seed + measurement.number + 1
        drawn = random_gradients(contender.gradient_weights(), contender.gradient_dtype, self.device, seed)
        measurement.inputs = [contender.placed(gradients) for gradients in drawn]
        measurement.time(contender.step, measurement.run.effort.warmup, synchronize=True)
        # fp32 weights are rounded to bf16 first, as a forward in bf16 does.
        weights = contender.weights()
        measurement.row.sample = torch.cat([weight.flatten()[:_SAMPLE].bfloat16().float().cpu() for weight in weights])

    def probe(self, measurement: Measurement) -> None:
        contender = measurement.contender
        measurement.synchronize()
        measurement.profile(contender.step)
        folder = measurement.run.checkpoints
        if folder is not None and isinstance(contender, StrategyContender):

            def step() -> None:
                contender.step(measurement.inputs[0])
                contender.finish()

            measurement.row.extra["checkpoint"] = measure_saving(contender, step, folder, measurement.run.ranks)

    def head(self, run: Run) -> Values:
        values = {"model": {**self.shape.values(), "weights": "bfloat16"}, "steps": run.effort.steps}
        return {**values, "optimizer": {**OPTIMIZERS[self.optimizer], "max_norm": self.max_norm}}

    def figures(self, run: Run, row: Row) -> Values:
        steps = [time for window in row.windows for time in window[1:] or window]
        blocks = [sum(window, remaining) for window, remaining in zip(row.windows, row.remaining_ms, strict=True)]
        block_ms = sum(blocks) / sum(map(len, row.windows))
        times = Spread.of(steps, statistics.median, run.ranks)
        own_beyond = max(0, (row.peak_bytes or 0) - row.weight_bytes)
        block, beyond, host = run.ranks.maximum([block_ms, float(own_beyond), float(row.host_bytes)])
        given = (row.weight_bytes + row.input_bytes) / row.parameters
        return {
            "parameters_per_rank": row.parameters,
            **times.values("step_ms"),
            "step_ms_all": steps,
            "block_ms": block,
            **times.per_1e9(self.shape.parameters).values("ms_per_1e9_parameters"),
            **_traffic(run, row, times.middle),
            "weight_and_gradient_bytes_per_parameter": given,
            "peak_device_bytes_beyond": None if row.peak_bytes is None else int(beyond),
            "peak_device_bytes_per_parameter": None if row.peak_bytes is None else given + beyond / row.parameters,
            "host_bytes_per_parameter": host / row.parameters,
            **row.host_waits(run.ranks),
            "checkpoint": row.extra.get("checkpoint"),
        }

    def compare(self, run: Run, rows: Sequence[Row], values: Sequence[Values]) -> None:
        """Add how far the weights are from the hand-written loop's after the same gradients."""
        reference = next((row.sample for row in rows if row.entry.name == "torch"), None)
        for row, shown in zip(rows, values, strict=True):
            sample = row.sample
            if "step_ms" in shown and reference is not None and sample is not None and sample.shape == reference.shape:
                shown["largest_weight_difference"] = float((sample - reference).abs().max())
        add_times_by_hand(run, values, "step_ms")


def random_gradients(
    weights: Sequence[Tensor], dtype: torch.dtype, device: torch.device, seed: int
) -> list[list[Tensor]]:
    """Two sets of gradients from a normal distribution, with the same values in every dtype.

    Zeros would run faster than real data. With two sets, steps can run back to back.
    """
    generator = torch.Generator(device).manual_seed(seed)
    draws = ([torch.empty(w.shape, dtype=torch.bfloat16, device=device) for w in weights] for _ in range(2))
    return [[draw.normal_(0.0, _GRADIENT_STD, generator=generator).to(dtype) for draw in drawn] for drawn in draws]


def _traffic(run: Run, row: Row, step_ms: float) -> Values:
    """GB over the link per step, their rates, and the busier direction's share of the duplex rate."""
    if row.profile is None:
        return dict.fromkeys(_TRAFFIC)
    moved = [count / 1e9 for count in (row.profile.to_device, row.profile.to_host)]
    rates = [amount / step_ms * 1e3 for amount in moved]
    percent = 100 * max(rates) / run.link.duplex if run.link is not None else None
    return dict(zip(_TRAFFIC, (*moved, *rates, percent), strict=True))


# -- how it is shown --------------------------------------------------------------------------------------------------


def _title(values: Values, case: Any) -> str:
    model = values["model"]
    what = f"{size(model['parameters'])} parameters, {model['layers']} layers, {values['hardware']['device']}"
    ranks = f", {values['ranks']} ranks (the slowest counts)" if values["ranks"] > 1 else ""
    return f"One optimizer step: {what}{ranks}, torch {values['versions']['torch']}"


def _footnotes(values: Values) -> list[str]:
    said = [link_sentence(values["link_gb_per_s"]), "Median of back-to-back steps."]
    for row in values["rows"]:
        if row.get("host_syncs") and row["kind"] == "lightstep":
            said.append(f"  {row['name']}: the host waits for the device, first by {row['first_sync']}")
        if saved := row.get("checkpoint"):
            rates = f"{saved['gb_per_s']:.2f} GB/s; plain files: {saved['plain_files_gb_per_s']:.2f} GB/s"
            said.append(f"  {row['name']}: checkpoint of {saved['gb']:.2f} GB saved at {rates}")
            stall = f"{saved['stall_s']:.3f} s, {saved['stall_percent']:.1f} % of a synchronous save"
            said.append(f"    asynchronous: training continues after {stall}")
            for whose, prefix in (("", ""), ("torch's async_save: ", "torch_async_save_")):
                first, later, lost, first_lost, steps = (
                    saved[prefix + key]
                    for key in ("first_stall_s", "stall_s", "lost_s", "first_lost_s", "steps_meanwhile")
                )
                said.append(
                    f"    {whose}training is blocked for {first:.3f} s by the first save, then {later:.3f} s; with the "
                    f"slower steps during the write (× {steps:.2f}) it loses {first_lost:.3f} s, then {lost:.3f} s"
                )
    return said


def _floor(values: Values) -> tuple[float, str] | None:
    """The time that AdamW's state takes over the link."""
    link = values["link_gb_per_s"]
    if link is None or values["optimizer"]["class"] != "AdamW":
        return None
    floor = 10 / values["ranks"] / link["duplex"] * 1e3
    shared = f", shared by {values['ranks']} ranks" if values["ranks"] > 1 else ""
    return floor, f"{floor:.0f} ms: 10 bytes per parameter each way at the link's rate{shared}"


StepTask.view = View(
    key="step_ms",
    columns=(
        Column("step\nms", "step_ms", priority=9),
        Column("from – to\nms", "step_ms_range", priority=8),
        BY_HAND,
        Column("ms per 10⁹\nparameters", "ms_per_1e9_parameters", priority=5),
        Column("GB moved\n⇧ / ⇩", "gb_to_device gb_to_host", ".2f", 1),
        Column("GB/s\n⇧ / ⇩", "gb_per_s_to_device gb_per_s_to_host", priority=2),
        Column("% of\nlink", "percent_of_duplex", ".0f", 4),
        Column("weights+\ngrads\nB/param", "weight_and_gradient_bytes_per_parameter", ".0f"),
        Column("peak\nbeyond\nMB", "peak_device_bytes_beyond", ".0f", 7, unit=1e6),
        Column("host\nB/param", "host_bytes_per_parameter", priority=6),
        Column("host\nwaits", "host_syncs", ".0f", 3),
    ),
    panels=(
        Panel("ms per 10⁹ parameters", "ms_per_1e9_parameters", spread="ms_per_1e9_parameters_range", mark=_floor),
        Panel(
            "peak device bytes per parameter",
            "peak_device_bytes_per_parameter",
            base="weight_and_gradient_bytes_per_parameter",
            base_label="weights and gradients",
        ),
    ),
    title=_title,
    footnotes=_footnotes,
)


# -- saving ------------------------------------------------------------------------------------------------------------

_CHUNK = 64 * 2**20
_REPEATS = 3
_QUIET_STEPS = 5
"""Steps before each save, for comparison with those during it."""


def measure_saving(saver: StrategyContender, step: Callable[[], None], folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Save a checkpoint and write plain files in turn, three times; the fastest of each counts. Then save in threads.

    All ranks call it with a ``folder`` that they share; a new folder in it is used, and removed. Every write ends when
    all bytes are flushed to disk.

    Args:
        step: one training step; returns when it is finished.

    Returns:
        The JSON values: bytes over all ranks, seconds and rates, and what asynchronous saves cost (:func:`_stall`).
    """
    place = folder / f"bench-{ranks.maximum([time.time()])[0]:.6f}"
    checkpoint, plain = place / "checkpoint", place / f"plain-{ranks.rank}"
    saving, writing, nbytes = [], [], 0

    def write_plainly() -> None:
        _write(plain, nbytes // ranks.world_size)

    try:
        place.mkdir(exist_ok=True)
        for _ in range(_REPEATS):
            saving.append(elapsed(lambda: saver.save(checkpoint), ranks.barrier))
            nbytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
            ranks.barrier()
            _remove(checkpoint, ranks)
            writing.append(elapsed(write_plainly, ranks.barrier))
            plain.unlink()
        ours = _stall(step, saver.save_async, checkpoint, ranks)
        with _torch_saving(saver, ranks) as begin:
            torchs = _stall(step, begin, checkpoint, ranks)
    finally:
        _remove(place, ranks)
    gigabytes, save_s = nbytes / 1e9, min(saving)
    return {
        "gb": gigabytes,
        "save_s": save_s,
        "gb_per_s": gigabytes / save_s,
        "plain_files_gb_per_s": gigabytes / min(writing),
        "stall_percent": 100 * ours["stall_s"] / save_s,
        **ours,
        **{f"torch_async_save_{key}": value for key, value in torchs.items()},
    }


def _stall(step: Callable[[], None], begin: Callable[[Path], Any], path: Path, ranks: Ranks) -> dict[str, float]:
    """What asynchronous saves cost training, of the first save, which also allocates memory, and of later ones.

    Stall: the seconds for which the call blocks training; the shortest of all. Lost: those, and what the
    steps during the write take more than quiet ones; the median of the later ones. Steps meanwhile: their time relative
    to that of quiet ones.
    """
    quiet: list[float] = []
    blocked: list[float] = []
    during: list[list[float]] = []
    for _ in range(_REPEATS):
        quiet += [elapsed(step, ranks.barrier) for _ in range(_QUIET_STEPS)]
        pending: list[Any] = []
        blocked.append(elapsed(lambda pending=pending: pending.append(begin(path)), ranks.barrier))  # type: ignore[misc]
        steps: list[float] = []
        while ranks.maximum([0.0 if pending[0].done() else 1.0])[0]:
            steps.append(elapsed(step, ranks.barrier))
        during.append(steps)
        pending[0].result()
        ranks.barrier()
        _remove(path, ranks)
        ranks.barrier()
    usual = statistics.median(quiet)
    first_lost, *lost = (call + sum(steps) - len(steps) * usual for call, steps in zip(blocked, during, strict=True))
    slowdown = statistics.median(itertools.chain(*during) if any(during) else quiet) / usual
    return {
        "first_stall_s": blocked[0],
        "stall_s": min(blocked),
        "first_lost_s": first_lost,
        "lost_s": statistics.median(lost),
        "steps_meanwhile": slowdown,
    }


@contextmanager
def _torch_saving(saver: StrategyContender, ranks: Ranks) -> Iterator[Callable[[Path], Any]]:
    """``torch.distributed.checkpoint.async_save``. Its thread needs a process group of its own."""
    ranks.ensure_group()
    group = dist.new_group(backend="gloo")
    tensors: dict[str, Any] = dict(saver.saved_tensors())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield lambda path: dcp.async_save(tensors, checkpoint_id=path, process_group=group)
    finally:
        dist.destroy_process_group(group)


def _write(path: Path, nbytes: int) -> None:
    chunk = memoryview(os.urandom(min(_CHUNK, nbytes)))
    with path.open("wb", buffering=0) as file:
        while (left := nbytes - file.tell()) > 0:
            file.write(chunk[:left])
        os.fsync(file.fileno())


def _remove(folder: Path, ranks: Ranks) -> None:
    if ranks.is_main:
        shutil.rmtree(folder, ignore_errors=True)

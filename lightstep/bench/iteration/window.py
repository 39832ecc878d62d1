"""Measuring one contender at one number of tokens: warm-up, then a window of iterations that follow each other.

An iteration is timed from the end of the one before, in the order of the device's main stream, and nothing waits in
between. So what a step leaves to be done beside the next forward counts in the next iteration, as far as that has to
wait for it: the first one of a window waits for the last one of the warm-up, and what the last one leaves is not
counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from lightstep.bench.clock import Clock
from lightstep.bench.iteration.contender import Batch, Training
from lightstep.bench.measure import Baseline
from lightstep.bench.probes import HostSyncs


@dataclass
class Cell:
    """What was seen of one contender at one number of tokens on this rank, over all rounds.

    `windows`: one list of iterations in ms per round. None is: not measurable on this device. `note` says what failed.
    """

    windows: list[list[float]] = field(default_factory=list)
    peak_bytes: int | None = None
    weight_bytes: int = 0
    host_bytes: int = 0
    host_syncs: int | None = None
    first_sync: str | None = None
    loss: float = math.nan
    grad_norm: float | None = None
    note: str | None = None
    skipped: bool = False


def time_window(
    training: Training,
    batch: Batch,
    device: torch.device,
    warmup: int,
    iterations: int,
    baseline: Baseline,
    into: Cell,
) -> None:
    """`warmup` untimed iterations, then `iterations` timed ones, and their memory.

    Raises:
        FloatingPointError: the loss is not finite: such steps are skipped, and their times would mean nothing.
    """
    for _ in range(warmup):
        training.iterate(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock = Clock(device)
    clock.lap()
    for _ in range(iterations):
        training.iterate(batch)
        clock.lap()
    into.windows.append(clock.read())
    training.finish()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - baseline.device_bytes
        into.peak_bytes = max(peak, into.peak_bytes or 0)
    into.host_bytes = training.host_bytes()
    into.loss = float(training.loss)
    into.grad_norm = None if training.grad_norm is None else float(training.grad_norm)
    if not math.isfinite(into.loss):
        raise FloatingPointError(f"the loss is {into.loss}: its steps are skipped, and their times mean nothing")


def count_syncs(training: Training, batch: Batch, device: torch.device, into: Cell) -> None:
    """One more iteration, untimed, that counts the host's waits."""
    if device.type != "cuda":
        return
    with HostSyncs() as syncs:
        training.iterate(batch)
    into.host_syncs, into.first_sync = syncs.count, syncs.first

"""Measuring one contender: warm-up, back-to-back steps, then what else the steps did.

Steps follow each other without a gap, and each is timed from the end of the one before. So nothing a step leaves behind
(copies still under way, buffers filled ahead) is anybody's gain: it delays the next one. The first step of a block
starts on a quiet machine and is left out; the step time is the median of the others. `block_ms` is the plain average of
the whole block, until everything has landed.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lightstep.bench.clock import Clock
from lightstep.bench.contender import Contender
from lightstep.bench.disk import DiskTime
from lightstep.bench.model import GradientSets
from lightstep.bench.probes import HostSyncs, allocation_counts, link_traffic, pinned_bytes

_SAMPLE = 2048  # weights per tensor that are compared between contenders


@dataclass
class Measurement:
    """What was seen of one contender on this rank, over all rounds. None is: not measurable on this device."""

    parameters: int = 0
    step_ms: list[float] = field(default_factory=list)
    block_ms: list[float] = field(default_factory=list)
    to_device_bytes: int | None = None
    to_host_bytes: int | None = None
    weight_and_gradient_bytes: int = 0
    peak_bytes: int | None = None
    host_bytes: int = 0
    allocations: float | None = None
    driver_allocations: int | None = None
    host_syncs: int | None = None
    first_sync: str | None = None
    sample: torch.Tensor | None = None
    disk: DiskTime | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


@dataclass(frozen=True)
class Baseline:
    """What the device and the pinned allocator held before a contender was built."""

    device_bytes: int
    pinned_bytes: int

    @classmethod
    def now(cls, device: torch.device) -> Baseline:
        return cls(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0, pinned_bytes(device))


@dataclass(frozen=True)
class Effort:
    """How much is measured: untimed steps before, timed steps per block."""

    steps: int
    warmup: int


def time_steps(
    contender: Contender,
    gradients: GradientSets,
    device: torch.device,
    effort: Effort,
    baseline: Baseline,
    into: Measurement,
) -> None:
    """Warm up, then time one block of steps and its memory, into `into`."""
    for step in range(effort.warmup):
        contender.step(gradients[step])
    _settle(contender, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = allocation_counts(device)
    laps = _block(contender, gradients, device, effort.steps)
    into.step_ms += laps[1:-1] or [sum(laps)]
    into.block_ms.append(sum(laps) / effort.steps)
    _note_allocations(before, allocation_counts(device), effort.steps, into)
    _note_memory(contender, gradients, device, baseline, into)


def _block(contender: Contender, gradients: GradientSets, device: torch.device, steps: int) -> list[float]:
    """Milliseconds of each of `steps` steps, and last of what had to land after them."""
    clock = Clock(device)
    clock.lap()
    for step in range(steps):
        contender.step(gradients[step])
        clock.lap()
    contender.finish()
    clock.lap()
    return clock.read()


def _note_allocations(
    before: tuple[int, int] | None, after: tuple[int, int] | None, steps: int, into: Measurement
) -> None:
    if before is not None and after is not None:
        into.allocations = (after[0] - before[0]) / steps
        into.driver_allocations = after[1] - before[1]


def _note_memory(
    contender: Contender, gradients: GradientSets, device: torch.device, baseline: Baseline, into: Measurement
) -> None:
    weights = sum(weight.nbytes for weight in contender.device_weights())
    into.parameters = sum(weight.numel() for weight in contender.weights())
    # The gradients of one step count; that the bench holds a second set for the next step is its own affair.
    into.weight_and_gradient_bytes = weights + gradients.nbytes // len(gradients.sets)
    into.host_bytes = contender.host_bytes() + _not_listed(contender, pinned_bytes(device) - baseline.pinned_bytes)
    # fp32 weights are compared as what a forward in bf16 sees.
    into.sample = torch.cat([weight.flatten()[:_SAMPLE].bfloat16().float().cpu() for weight in contender.weights()])
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - baseline.device_bytes - weights - gradients.nbytes
        into.peak_bytes = max(0, peak, into.peak_bytes or 0)


def _not_listed(contender: Contender, pinned: int) -> int:
    """What torch's pinned allocator took beyond the contender's tensors: what it rounds up, what steps reuse."""
    listed = sum(tensor.nbytes for tensor in contender.host_tensors() if tensor.is_pinned())
    return max(0, pinned - listed)


def probe(contender: Contender, gradients: GradientSets, device: torch.device, into: Measurement) -> None:
    """Two more steps, untimed: one counts the host's waits, one the bytes over the link."""
    if device.type != "cuda":
        return
    _settle(contender, device)
    with HostSyncs() as syncs:
        contender.step(gradients[0])
    into.host_syncs, into.first_sync = syncs.count, syncs.first
    _settle(contender, device)
    traffic = link_traffic(_one_step(contender, gradients), device)
    if traffic is not None:
        into.to_device_bytes, into.to_host_bytes = traffic


def _one_step(contender: Contender, gradients: GradientSets) -> Callable[[], None]:
    def run() -> None:
        contender.step(gradients[1])
        contender.finish()

    return run


def _settle(contender: Contender, device: torch.device) -> None:
    contender.finish()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Give back what the last contender held, on the device and in torch's pinned allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()

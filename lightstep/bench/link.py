"""Measures the link between host and device: each direction alone, then both at once, with the same buffers.

The host buffers are page-locked and registered at their exact size, like lightstep's own. The rate with both directions
is what a streaming optimizer can reach: equal bytes each way, over the time until both are done. Under torchrun all
ranks copy at the same time, and the slowest counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightstep.bench.ranks import Ranks
from lightstep.state.host_memory import HostSlab

_BYTES = 256 << 20  # per buffer: much larger than any cache, small next to the model
_COPIES = 4  # per sample and direction
_SAMPLES = 7


@dataclass(frozen=True)
class Link:
    """Rates in GB/s (10⁹ bytes) per rank; `duplex` is each way's while both run."""

    to_device: float
    to_host: float
    duplex: float
    page_locked: bool

    def or_faster(self, other: Link) -> Link:
        """The faster of the two, figure by figure; percentages refer to the best rate measured."""
        return Link(
            max(self.to_device, other.to_device),
            max(self.to_host, other.to_host),
            max(self.duplex, other.duplex),
            self.page_locked and other.page_locked,
        )


def measure_link(device: torch.device, ranks: Ranks, nbytes: int = _BYTES) -> Link | None:
    """The link's rates; None on a CPU, which has no link."""
    if device.type != "cuda":
        return None
    slab = HostSlab(2 * nbytes, device=device, what="the link measurement")
    try:
        return _measure(slab, nbytes, device, ranks)
    finally:
        slab.close()


def _measure(slab: HostSlab, nbytes: int, device: torch.device, ranks: Ranks) -> Link:
    device_source, device_target = torch.empty(2, nbytes, dtype=torch.uint8, device=device).random_()
    host_source, host_target = slab.tensor(torch.uint8, (2, nbytes))
    host_source.copy_(device_source)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    both = ((device_target, host_source), (host_target, device_source))
    ways = (both[:1], both[1:], both)
    samples = [[_rate(copies, streams, nbytes, ranks) for copies in ways] for _ in range(_SAMPLES + 1)]
    medians = [statistics.median(column) for column in zip(*samples[1:], strict=True)]  # the first sample warms up
    to_device, to_host, duplex = ranks.minimum(medians)
    return Link(to_device, to_host, duplex, slab.page_locked)


def _rate(
    copies: Sequence[tuple[Tensor, Tensor]], streams: Sequence[torch.cuda.Stream], nbytes: int, ranks: Ranks
) -> float:
    """GB/s each way, from a common start until all directions are done."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    ranks.barrier()
    start.record()
    for (target, source), stream in zip(copies, streams, strict=False):
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            for _ in range(_COPIES):
                target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return _COPIES * nbytes / milliseconds / 1e6

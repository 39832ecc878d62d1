"""Measures this machine's rates for `lightstep plan`, in under a minute, and caches them.

The host buffers of the link are page-locked and registered at their exact size, like lightstep's own. Each direction is
measured alone, then both at once: that rate is what a streaming optimizer can reach.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.chunked_loss import ChunkedLoss
from lightstep.plan.model import LOSS_CHUNK, from_values, run_on_meta
from lightstep.plan.timing import Link, Profile
from lightstep.sharding.preparation import checkpoint_activations
from lightstep.state.host_memory import HostSlab

_REPEATS = 3
_MODEL = {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False}
_GPU_SIZES = {"vocab_size": 32_000, "hidden_size": 3072, "intermediate_size": 8192}
_GPU_SIZES |= {"num_attention_heads": 24, "num_key_value_heads": 8}
_CPU_SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384}
_CPU_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def cached_profile() -> Profile | None:
    """The cached profile of this device, if there is one."""
    try:
        values = json.loads(_cache_file(_own_device()).read_text(encoding="utf-8"))
        return Profile(**{**values, "link": Link(**values["link"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def measure_profile() -> Profile:
    """Measure a training pass of two transformer blocks, AdamW, and the link. Results for a GPU are cached."""
    device = _own_device()
    on_gpu = device.type == "cuda"
    said = f"measured here, {datetime.datetime.now():%Y-%m-%d %H:%M}"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # CPUs without bf16 instructions compute it ten times slower
    tflops = _training_tflops(device, dtype, *((_GPU_SIZES, 16_384, 4096) if on_gpu else (_CPU_SIZES, 512, 256)))
    update_ms = _update_ms(device, 10**8 if on_gpu else 10**6)
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if on_gpu else 0.0
    link = Link(1e9, 1e9, None, "a CPU has none")
    if (seen := measure_link(device)) is not None:
        link = Link(min(seen.to_device, seen.to_host), seen.duplex, None, f"{said}, one GPU alone")
    profile = Profile(device_name(device), tflops, update_ms, memory, link, said, str(dtype).removeprefix("torch."))
    if on_gpu:  # later plans are about GPUs
        file = _cache_file(device)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")
    return profile


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _cache_file(device: torch.device) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "lightstep" / f"rates-{device_name(device).lower().replace(' ', '-')}.json"


def _training_tflops(
    device: torch.device, dtype: torch.dtype, sizes: dict[str, int], tokens: int, sequence: int
) -> float:
    """TFLOP/s of forward and backward, with activation checkpointing and a loss in chunks."""
    model = from_values({**_MODEL, **sizes}, dtype, str(device)).train()
    seen = run_on_meta(model, tokens, sequence, True, LOSS_CHUNK)
    checkpoint_activations(model)
    loss_of = ChunkedLoss(model, LOSS_CHUNK)
    words = torch.zeros(tokens // sequence, sequence, dtype=torch.long, device=device)

    def train() -> None:
        loss_of(model, words).backward()
        model.zero_grad()

    blocks = seen.blocks * (seen.forward_flops + seen.backward_flops)
    return (blocks + seen.other_forward_flops + seen.other_backward_flops) / _fastest_ms(train, device) / 1e9


def _update_ms(device: torch.device, elements: int) -> float:
    """ms of AdamW per 10⁹ parameters."""
    weight = nn.Parameter(torch.zeros(elements, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return _fastest_ms(lambda: optimizer.step(), device) / elements * 1e9


def _fastest_ms(work: Callable[[], object], device: torch.device) -> float:
    """The shortest time, after one untimed run."""
    work()
    return min(lap_times([work] * _REPEATS, device))


def lap_times(works: Iterable[Callable[[], object]], device: torch.device) -> list[float]:
    """Run `works` back to back; the ms of each, from the end of the one before.

    Moments are marked in the current stream of a GPU, or on the host for a CPU.
    """
    mark = _event if device.type == "cuda" else time.perf_counter
    marks: list[Any] = [mark()]
    for work in works:
        work()
        marks.append(mark())
    if device.type != "cuda":
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# -- the link ---------------------------------------------------------------------------------------------------------

_BYTES = 256 << 20  # per buffer: much larger than any cache, small next to the model
_COPIES = 4  # per sample and direction
_SAMPLES = 7


@dataclass(frozen=True)
class MeasuredLink:
    """Rates in GB/s (10⁹ bytes) of one rank; `duplex` is each way's while both run."""

    to_device: float
    to_host: float
    duplex: float
    page_locked: bool

    def or_faster(self, other: MeasuredLink) -> MeasuredLink:
        """The faster of the two, figure by figure; percentages refer to the best rate measured."""
        return MeasuredLink(
            max(self.to_device, other.to_device),
            max(self.to_host, other.to_host),
            max(self.duplex, other.duplex),
            self.page_locked and other.page_locked,
        )


def measure_link(
    device: torch.device, nbytes: int = _BYTES, wait_for_others: Callable[[], object] = lambda: None
) -> MeasuredLink | None:
    """The link's rates; None on a CPU, which has no link.

    Args:
        nbytes: of each buffer.
        wait_for_others: called before each sample, so that several ranks copy at the same time.
    """
    if device.type != "cuda":
        return None
    slab = HostSlab(2 * nbytes, device=device, what="the link measurement")
    try:
        return _link_of(slab, nbytes, device, wait_for_others)
    finally:
        slab.close()


def _link_of(slab: HostSlab, nbytes: int, device: torch.device, wait_for_others: Callable[[], object]) -> MeasuredLink:
    device_source, device_target = torch.empty(2, nbytes, dtype=torch.uint8, device=device).random_()
    host_source, host_target = slab.tensor(torch.uint8, (2, nbytes))
    host_source.copy_(device_source)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    both = ((device_target, host_source), (host_target, device_source))
    ways = (both[:1], both[1:], both)
    samples: list[list[float]] = []
    for _ in range(_SAMPLES + 1):
        samples.append([])
        for copies in ways:
            torch.cuda.synchronize()
            wait_for_others()
            samples[-1].append(_rate(copies, streams, nbytes))
    medians = [statistics.median(column) for column in zip(*samples[1:], strict=True)]  # the first sample warms up
    to_device, to_host, duplex = medians
    return MeasuredLink(to_device, to_host, duplex, slab.page_locked)


def _rate(copies: Sequence[tuple[Tensor, Tensor]], streams: Sequence[torch.cuda.Stream], nbytes: int) -> float:
    """GB/s each way, from a common start until all directions are done."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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

"""Measures time and page-locked memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import torch


def elapsed(work: Callable[[], object], wait: Callable[[], object]) -> float:
    """Seconds that `work` takes on the host's clock, between two calls of `wait`."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle; a CPU always is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pinned_bytes(device: torch.device) -> int:
    """Bytes of host memory that torch's pinned allocator holds, in use or kept for reuse, as it rounds them.

    0 on a CPU. `active_bytes` would be those in use, but torch 2.11 counts up and never down when a block is freed
    (pytorch/pytorch#182404): buffers that every step frees and allocates again would count once per step.
    """
    if device.type != "cuda":
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Hide existing objects from Python's cyclic collector, whose full pass would slow down a single step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def free_memory(device: torch.device) -> None:
    """Free the last contender's memory on the device and in torch's pinned allocator."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()

"""What is seen of a step from outside: its time, host waits, allocations, bytes over the link."""

from __future__ import annotations

import functools
import gc
import json
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

_WAITS = frozenset({"synchronize", "_cuda_synchronize"})
_WAITS_IN_PYTHON: tuple[Any, ...] = (torch.cuda, torch.cuda.Event, torch.cuda.Stream)
"""Where `synchronize` is a Python function, which can be replaced for every thread."""


class Clock:
    """`lap()` marks a moment: in the current stream of a GPU, on a CPU by the host's clock; `read()`: ms between."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def lap(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter() * 1e3)

    def read(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._cuda:
            return [end - start for start, end in pairs]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


class HostSyncs:
    """Counts the times the host waits for the GPU in a `with` block.

    torch's own watch (`torch.cuda.set_sync_debug_mode`) sees `.item()`, blocking copies and the like, but not every
    explicit `synchronize()`: those are seen as calls into C. A thread's profile function is its own, so in other
    threads (autograd's, where FSDP2 waits for gradients on their way to the host) only `_WAITS_IN_PYTHON` are seen.
    `first` says where the first one was.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: str | None = None
        self._inside: set[int] = set()  # threads
        self._replaced: list[tuple[Any, Callable[..., Any]]] = []

    def __enter__(self) -> HostSyncs:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._warned  # type: ignore[assignment]
        self._mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        self._thread = threading.get_ident()
        self._replaced = [(owner, owner.synchronize) for owner in _WAITS_IN_PYTHON]
        for owner, wait in self._replaced:
            owner.synchronize = self._counted_elsewhere(wait)
        sys.setprofile(self._profile)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        for owner, wait in self._replaced:
            owner.synchronize = wait
        torch.cuda.set_sync_debug_mode(self._mode)
        self._warnings.__exit__(kind, error, trace)

    def _warned(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        of_the_watch_itself = "prototype" in str(message)
        if "synchroniz" in str(message) and threading.get_ident() not in self._inside and not of_the_watch_itself:
            self._seen(f"{Path(filename).name}:{lineno}")

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if getattr(argument, "__name__", "") not in _WAITS:
            return
        if event in ("c_return", "c_exception"):
            self._inside.discard(threading.get_ident())
        elif event == "c_call":
            self._wait_begins(frame)

    def _counted_elsewhere(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`wait`, which counts itself in the threads that `_profile` does not see."""

        @functools.wraps(wait)
        def counted(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == self._thread:
                return wait(*arguments, **options)
            self._wait_begins(sys._getframe(1))
            try:
                return wait(*arguments, **options)
            finally:
                self._inside.discard(threading.get_ident())

        return counted

    def _wait_begins(self, frame: FrameType) -> None:
        self._inside.add(threading.get_ident())
        self._seen(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    def _seen(self, where: str) -> None:
        self.count += 1
        self.first = self.first or where


def allocation_counts(device: torch.device) -> tuple[int, int] | None:
    """Blocks handed out by torch's allocator so far, and calls it made to the driver for more; None on a CPU."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return int(stats.get("allocation.all.allocated", 0)), int(stats.get("num_device_alloc", 0))


def pinned_bytes(device: torch.device) -> int:
    """Bytes of host memory that torch's pinned allocator holds, in use or kept for reuse, as it rounds them.

    0 on a CPU and where torch does not say. `active_bytes` would be those in use, but torch 2.11 counts up and never
    down when a block is freed (pytorch/pytorch#182404): buffers that every step frees and takes again would count
    once per step.
    """
    if device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def link_traffic(step: Callable[[], None], device: torch.device) -> tuple[int, int] | None:
    """Bytes (to the device, to the host) that the GPU's copy engines moved in `step`; None where nobody counts."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return traffic_of(json.loads(path.read_text())["traceEvents"])


def traffic_of(events: list[dict[str, Any]]) -> tuple[int, int] | None:
    """The bytes of a trace's copies; None when the trace holds nothing from the GPU at all."""
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    if not copies and not any(event.get("cat") == "kernel" for event in events):
        return None
    return _bytes(copies, "HtoD"), _bytes(copies, "DtoH")


def _bytes(copies: list[dict[str, Any]], direction: str) -> int:
    return sum(int(copy["args"].get("bytes", 0)) for copy in copies if direction in copy["name"])


def free_memory(device: torch.device) -> None:
    """Give back what the last contender held, on the device and in torch's pinned allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()

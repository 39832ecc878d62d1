"""The machine that is measured: its ranks, this rank's device, time and memory, and the profiler's traces.

Under torchrun all ranks measure at the same time, the slowest counts, and rank 0 reports.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lightstep.distributed import let_gloo_finish_at_exit
from lightstep.plan.timing import MeasuredLink, measure_link

FORWARD, STEP = "lightstep: forward", "lightstep: step"
"""Names of the ranges in traces. Backward lies between them."""

Event = dict[str, Any]

_COPY = "gpu_memcpy"
_WORK = ("kernel", "gpu_memset", _COPY)
_CALLS = ("cuda_runtime", "cuda_driver")
PROFILED_RANGE = "lightstep: profiled step"
"""Name of the range in which waits are counted."""


class Ranks:
    """The processes of this run; one without torchrun.

    Starts the default process group if there is none, and ends the one it started. A single process needs a group too
    if a contender shards: `ensure_group()` makes one without a network.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._device = device
        self._started = False
        if self.world_size > 1:
            self.ensure_group()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def ensure_group(self) -> None:
        """Start the default process group: gloo for CPU tensors, nccl for those on GPUs."""
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        if self.world_size > 1:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        self._started = True
        let_gloo_finish_at_exit()

    def maximum(self, values: list[float]) -> list[float]:
        """Elementwise maximum over the ranks."""
        if self.world_size == 1 or not values:
            return values
        # On the CPU group, because a collective on the GPU would disturb the memory and streams being measured.
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def barrier(self) -> None:
        self.maximum([0.0])

    def measure_link(self) -> MeasuredLink | None:
        """The link of the slowest rank, while all of them copy at the same time; None on a CPU."""
        seen = measure_link(self._device, wait_for_others=self.barrier)
        if seen is None:
            return None
        to_device, to_host, duplex = (-rate for rate in self.maximum([-seen.to_device, -seen.to_host, -seen.duplex]))
        return MeasuredLink(to_device, to_host, duplex, seen.page_locked)

    def first_error(self, error: str | None) -> str | None:
        """This rank's error, or a note if only another rank has one; None if no rank has an error."""
        if self.maximum([float(error is not None)])[0] == 0.0:
            return None
        return error or "failed on another rank"

    def close(self) -> None:
        if self._started and dist.is_initialized():
            dist.destroy_process_group()
        self._started = False


def share_cores(threads: int | None) -> None:
    """Set torch's CPU threads to `threads`, or to this rank's share of the machine's cores.

    torchrun sets `OMP_NUM_THREADS=1` for several ranks, which slows down contenders that compute on the CPU.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads is not None or ranks > 1:
        torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // ranks))


def local_device(requested: str | None) -> torch.device:
    """The device to measure: `requested`, else this rank's GPU, else the CPU.

    Raises:
        ValueError: the name is wrong, or the machine has no such device.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", requested or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found is None:
        raise ValueError(f"--device {requested}: allowed are cpu, cuda and cuda:N")
    if found[0] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(found[1] or os.environ.get("LOCAL_RANK", "0")))
    seen = torch.cuda.device_count()
    if device.index >= seen:
        raise ValueError(f"--device {device}: torch sees {seen or 'no'} GPU{'s' if seen > 1 else ''} here")
    torch.cuda.set_device(device)
    return device


# -- time and memory --------------------------------------------------------------------------------------------------


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


# -- the copies and waits of one step ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepProfile:
    """Bytes copied in each direction, the number of times the host waited for the device, and the first such call."""

    to_device: int
    to_host: int
    waits: int
    first_wait: str | None


def profile_step(work: Callable[[], object], finish: Callable[[], object], device: torch.device) -> StepProfile | None:
    """Profile `work` once: its copies until `finish` returns, and the waits of all threads. None on a CPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(PROFILED_RANGE):
            work()
        finish()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_step_profile(json.loads(path.read_text())["traceEvents"])


def read_step_profile(events: Sequence[Event]) -> StepProfile | None:
    """Read a trace's `traceEvents`; None if the trace has no GPU events."""
    if not any(event.get("cat") in _WORK or event.get("cat") in _CALLS for event in events):
        return None
    copies = [event for event in events if event.get("cat") == _COPY]
    to_device, to_host = (
        sum(int(copy["args"].get("bytes", 0)) for copy in copies if way in copy["name"]) for way in ("HtoD", "DtoH")
    )
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == PROFILED_RANGE]
    calls = [event for event in events if event.get("cat") in _CALLS and "Synchronize" in event["name"]]
    waits = [call for call in calls if any(_starts_within(call, outer) for outer in ranges)]
    first = min(waits, key=lambda call: call["ts"], default=None)
    return StepProfile(to_device, to_host, len(waits), None if first is None else _describe_call(first, events))


def _starts_within(event: Event, outer: Event) -> bool:
    return bool(outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"])


def _describe_call(wait: Event, events: Sequence[Event]) -> str:
    """The call, and the torch operator that made it."""
    around = [
        op for op in events if op.get("cat") == "cpu_op" and op["tid"] == wait["tid"] and _starts_within(wait, op)
    ]
    outermost = min(around, key=lambda op: float(op["ts"]), default=None)
    return str(wait["name"]) if outermost is None else f"{wait['name']} in {outermost['name']}"


# -- timelines --------------------------------------------------------------------------------------------------------


def write_timeline(iterate: Callable[[], object], iterations: int, path: Path) -> None:
    """Write the Chrome trace of some iterations, after an untraced one that starts the profiler."""
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=1, active=iterations, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(1 + iterations):
            iterate()
            profiler.step()


def read_timeline(events: Sequence[Event]) -> list[str]:
    """What a trace says of the main stream, the one whose kernels take longest: how much of the copies ran beside its
    kernels, and what it waited for.

    Raises:
        ValueError: the trace of these events holds no kernel.
    """
    kernels: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and not str(event["name"]).startswith("nccl"):
            kernels[event["args"]["stream"]].append(event)
    if not kernels:
        raise ValueError("the trace has no GPU kernel: the profiler recorded nothing on the device")
    computing = {stream: _merged(of_stream) for stream, of_stream in kernels.items()}
    main = max(computing, key=lambda stream: _length(computing[stream]))
    said = []
    for way, name in (("HtoD", "host → device"), ("DtoH", "device → host")):
        copies = _merged(event for event in events if event.get("cat") == _COPY and way in event["name"])
        hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in computing[main])
        if copies:
            said.append(f"{hidden:.1f} of {_length(copies):.1f} ms of copies {name} beside the main stream's kernels")
    launches, device = _idle_times(events, main)
    said.append(f"the main stream waited {launches:.1f} ms for launches and {device:.1f} ms for other work")
    return said


def _idle_times(events: Sequence[Event], stream: Any) -> tuple[float, float]:
    """How long (ms) a stream was empty: until its next work had been launched, and from then until it began."""
    called = [event for event in events if event.get("cat") in _CALLS and "correlation" in event["args"]]
    calls = {event["args"]["correlation"]: event for event in called}
    work = [event for event in events if event.get("cat") in _WORK and event["args"]["stream"] == stream]
    late = waited = 0.0
    for before, event in itertools.pairwise(sorted(work, key=lambda event: float(event["ts"]))):
        end, begin = before["ts"] + before["dur"], event["ts"]
        call = calls.get(event["args"].get("correlation"))
        if begin > end:
            launched = end if call is None else min(max(call["ts"] + call["dur"], end), begin)
            late, waited = late + launched - end, waited + begin - launched
    return late / 1e3, waited / 1e3


def _merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """When any of the events ran: ascending (start, end) in ms, which do not overlap."""
    spans: list[tuple[float, float]] = []
    for start, end in sorted((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)

"""Traces of torch.profiler: the copies and waits of one step, and timelines of iterations."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

FORWARD, STEP = "lightstep: forward", "lightstep: step"
"""Names of the ranges in traces. Backward lies between them."""

Event = dict[str, Any]

_COPY = "gpu_memcpy"
_WORK = ("kernel", "gpu_memset", _COPY)
_CALLS = ("cuda_runtime", "cuda_driver")
PROFILED_RANGE = "lightstep: profiled step"
"""Name of the range in which waits are counted."""


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
    waits = sorted(
        (call for call in calls if any(_starts_within(call, outer) for outer in ranges)), key=lambda call: call["ts"]
    )
    return StepProfile(to_device, to_host, len(waits), _describe_call(waits[0], events) if waits else None)


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


def hidden_copies(events: Sequence[Event]) -> list[str]:
    """For each direction, how much of the copies ran beside the kernels of the busiest stream.

    Raises:
        ValueError: the trace of these events holds no kernel.
    """
    kernels: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and not str(event["name"]).startswith("nccl"):
            kernels[event["args"]["stream"]].append(event)
    if not kernels:
        raise ValueError("the trace has no GPU kernel: the profiler recorded nothing on the device")
    computing = max((_merged(of_stream) for of_stream in kernels.values()), key=_length)
    said = []
    for way, name in (("HtoD", "host → device"), ("DtoH", "device → host")):
        copies = _merged(event for event in events if event.get("cat") == _COPY and way in event["name"])
        hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in computing)
        if copies:
            said.append(f"{hidden:.0f} of {_length(copies):.0f} ms of copies {name} beside the main stream's kernels")
    return said


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

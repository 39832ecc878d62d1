"""Reads Chrome traces of torch.profiler: the copies and waits of one step, and timelines of whole iterations."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightstep.bench.contender import FORWARD, STEP

MAIN, UPDATES, OTHERS = "main stream", "updates beside it", "other streams"
TO_DEVICE, TO_HOST, COLLECTIVES = "host → device", "device → host", "NCCL"
LANES = (MAIN, UPDATES, TO_DEVICE, TO_HOST, COLLECTIVES, OTHERS)
"""Top to bottom."""

Span = tuple[float, float]
"""Start and end, in ms after the first event of the trace."""
Event = dict[str, Any]

_COPY = "gpu_memcpy"
_WORK = ("kernel", "gpu_memset", _COPY)
_CALLS = ("cuda_runtime", "cuda_driver")
PROFILED_RANGE = "lightstep: profiled step"
"""Name of the range in which waits are counted."""


# -- one step ---------------------------------------------------------------------------------------------------------


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


# -- whole iterations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """Busy spans of each lane, ascending, without idle lanes; `forwards` and `steps` in device time."""

    lanes: dict[str, list[Span]]
    forwards: list[Span]
    steps: list[Span]

    @property
    def end(self) -> float:
        """ms."""
        return max(end for spans in self.lanes.values() for _, end in spans)

    def busy(self, lane: str) -> float:
        """ms."""
        return sum(end - start for start, end in merged(self.lanes.get(lane, []), 0.0))

    def overlap(self, lane: str, spans: Sequence[Span]) -> float:
        """ms in which `lane` was busy during `spans` (which do not overlap each other)."""
        own = merged(self.lanes.get(lane, []), 0.0)
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in own for b in spans)


def merged(spans: Iterable[Span], gap: float) -> list[Span]:
    """Merge ascending spans that overlap or are closer than `gap` ms."""
    whole: list[Span] = []
    for start, end in spans:
        if whole and start - whole[-1][1] < gap:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


def read_timeline(events: Sequence[Event]) -> Timeline:
    """Read a trace's `traceEvents`.

    The main stream is the one with the most busy time, without collectives. Other streams that run Adam kernels are
    update streams. Copies count by direction, whatever their stream. A phase spans the main stream's work that the host
    launched during that phase.

    Raises:
        ValueError: the trace holds no kernel.
    """
    work = [event for event in events if event.get("cat") in _WORK]
    own = [event for event in work if event["cat"] == "kernel" and not _is_collective(event)]
    if not own:
        raise ValueError("the trace has no GPU kernel: the profiler recorded nothing on the device")
    origin = min(float(event["ts"]) for event in work)
    main = _busiest(own)
    updating = {_stream(event) for event in own if "adam" in event["name"].lower()} - {main}
    lanes: dict[str, list[Span]] = defaultdict(list)
    for event in work:
        lanes[_lane(event, main, updating)].append(_span(event, origin))
    launched = _launched(events, [event for event in work if _stream(event) == main], origin)
    return Timeline(
        {lane: sorted(lanes[lane]) for lane in LANES if lane in lanes},
        _phase(FORWARD, events, launched),
        _phase(STEP, events, launched),
    )


def _launched(events: Sequence[Event], work: list[Event], origin: float) -> list[tuple[float, Span]]:
    """For each event of `work`: the launch time on the host (the trace's µs), and its span on the device."""
    times = {_correlation(event): float(event["ts"]) for event in events if event.get("cat") in _CALLS}
    return [(times[_correlation(event)], _span(event, origin)) for event in work if _correlation(event) in times]


def _phase(name: str, events: Sequence[Event], launched: list[tuple[float, Span]]) -> list[Span]:
    """For each range called `name`: the span from the first to the last event launched in it."""
    found = []
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] == name:
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            inside = [span for launch, span in launched if start <= launch <= end]
            if inside:
                found.append((min(inside)[0], max(span[1] for span in inside)))
    return sorted(found)


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _is_collective(event: Event) -> bool:
    return str(event["name"]).startswith("nccl")


def _stream(event: Event) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _busiest(kernels: list[Event]) -> Any:
    busy: dict[Any, float] = defaultdict(float)
    for event in kernels:
        busy[_stream(event)] += float(event["dur"])
    return max(busy, key=lambda stream: busy[stream])


def _lane(event: Event, main: Any, updating: set[Any]) -> str:
    name = event["name"]
    if event["cat"] == _COPY and "HtoD" in name:
        return TO_DEVICE
    if event["cat"] == _COPY and "DtoH" in name:
        return TO_HOST
    if _is_collective(event):
        return COLLECTIVES
    stream = _stream(event)
    return MAIN if stream == main else UPDATES if stream in updating else OTHERS


def _span(event: Event, origin: float) -> Span:
    start = (float(event["ts"]) - origin) / 1e3
    return start, start + float(event["dur"]) / 1e3

"""Chrome traces of torch.profiler: what one step did, and when each lane of the device was busy in which phase."""

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
"""Start and end in ms after the first thing in the trace."""
Event = dict[str, Any]

_COPY = "gpu_memcpy"
_WORK = ("kernel", "gpu_memset", _COPY)
_CALLS = ("cuda_runtime", "cuda_driver")
WATCHED = "lightstep: watched"
"""The range whose waits count."""


# -- one step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """Bytes that the GPU's copy engines moved, how often the host waited for the device, and in what first."""

    to_device: int
    to_host: int
    waits: int
    first_wait: str | None


def watch(work: Callable[[], object], finish: Callable[[], object], device: torch.device) -> Watched | None:
    """Do `work` once; all that it copies until `finish`, and every wait of any thread in it. None on a CPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(WATCHED):
            work()
        finish()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_watched(json.loads(path.read_text())["traceEvents"])


def read_watched(events: Sequence[Event]) -> Watched | None:
    """From the trace's `traceEvents`; None when the trace holds nothing from the GPU at all."""
    if not any(event.get("cat") in _WORK or event.get("cat") in _CALLS for event in events):
        return None
    copies = [event for event in events if event.get("cat") == _COPY]
    to_device, to_host = (
        sum(int(copy["args"].get("bytes", 0)) for copy in copies if way in copy["name"]) for way in ("HtoD", "DtoH")
    )
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == WATCHED]
    calls = [event for event in events if event.get("cat") in _CALLS and "Synchronize" in event["name"]]
    waits = sorted((call for call in calls if any(_in(call, outer) for outer in ranges)), key=lambda call: call["ts"])
    return Watched(to_device, to_host, len(waits), _place(waits[0], events) if waits else None)


def _in(event: Event, outer: Event) -> bool:
    return bool(outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"])


def _place(wait: Event, events: Sequence[Event]) -> str:
    """The call, and the operator of torch that made it."""
    around = [op for op in events if op.get("cat") == "cpu_op" and op["tid"] == wait["tid"] and _in(wait, op)]
    outermost = min(around, key=lambda op: float(op["ts"]), default=None)
    return str(wait["name"]) if outermost is None else f"{wait['name']} in {outermost['name']}"


# -- whole iterations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """Busy spans by lane, ascending, of lanes in which something ran; `forwards` and `steps` as the device ran them."""

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
    """Ascending spans; those that overlap or are closer than `gap` ms as one."""
    whole: list[Span] = []
    for start, end in spans:
        if whole and start - whole[-1][1] < gap:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


def read_timeline(events: Sequence[Event]) -> Timeline:
    """From the trace's `traceEvents`.

    The main stream is the one that was busy longest, collectives left out. A stream beside it that runs Adam's kernels
    is the one of the updates. Copies count by direction, whatever their stream. A phase is the time of what the host
    launched on the main stream while it was in that phase.

    Raises:
        ValueError: the trace holds no kernel.
    """
    work = [event for event in events if event.get("cat") in _WORK]
    own = [event for event in work if event["cat"] == "kernel" and not _is_collective(event)]
    if not own:
        raise ValueError("the trace holds no kernel of a GPU: the profiler saw nothing of the device")
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
    """When the host launched it (the trace's µs), and when the device did it."""
    times = {_correlation(event): float(event["ts"]) for event in events if event.get("cat") in _CALLS}
    return [(times[_correlation(event)], _span(event, origin)) for event in work if _correlation(event) in times]


def _phase(name: str, events: Sequence[Event], launched: list[tuple[float, Span]]) -> list[Span]:
    """From the first to the last thing launched in each range of that name."""
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

"""What the GPU does when, over a few iterations: a Chrome trace, and its lanes as a picture."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["LANES", "Spans", "draw", "lanes_of", "record"]

LANES = ("forward and backward", "updates beside them", "host → device", "device → host", "between ranks")

Spans = Mapping[str, Sequence[tuple[float, float]]]
Events = Sequence[Mapping[str, Any]]


def record(iterate: Callable[[], None], iterations: int, path: Path | None) -> Spans:
    """Profile ``iterations`` calls, write the trace to ``path`` and return its :func:`lanes_of`. Needs a GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(iterations):
            iterate()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = path or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return lanes_of(json.loads(trace.read_text())["traceEvents"])


def lanes_of(events: Events) -> dict[str, list[tuple[float, float]]]:
    """Spans (begin and end in ms from the first one) by lane, from a trace's events.

    The stream with the most kernels computes; kernels of others are updates, except for those of nccl. Copies within
    the device count as kernels.
    """
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = [event for event in on_gpu if event["cat"] == "kernel" and not _is_nccl(event)]
    streams = Counter(event["args"].get("stream") for event in kernels)
    main = streams.most_common(1)[0][0] if streams else None
    begin = min((event["ts"] for event in on_gpu), default=0.0)
    found: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANES}
    for event in on_gpu:
        start = (event["ts"] - begin) / 1e3
        found[_lane_of(event, main)].append((start, start + event.get("dur", 0.0) / 1e3))
    return {lane: _merged(sorted(spans)) for lane, spans in found.items()}


def _is_nccl(event: Mapping[str, Any]) -> bool:
    return "nccl" in event["name"].lower()


def _lane_of(event: Mapping[str, Any], main: Any) -> str:
    name = event["name"]
    if event["cat"] == "gpu_memcpy" and "HtoD" in name:
        return LANES[2]
    if event["cat"] == "gpu_memcpy" and "DtoH" in name:
        return LANES[3]
    if _is_nccl(event):
        return LANES[4]
    return LANES[0] if event["args"].get("stream") == main else LANES[1]


def _merged(spans: Sequence[tuple[float, float]], gap: float = 0.02) -> list[tuple[float, float]]:
    """Spans less than ``gap`` ms apart as one: thousands of kernels make no picture."""
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start - merged[-1][1] < gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def draw(timelines: Mapping[str, Spans], title: str, path: Path) -> None:
    """Write one panel for each contender as a PNG, all over the same time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 0.8 + 1.9 * max(1, len(timelines))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(1, len(timelines)), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, spans) in zip(panels, timelines.items(), strict=False):
        lanes = [lane for lane in LANES if spans[lane]]
        for place, lane in enumerate(lanes):
            bars = [(start, end - start) for start, end in spans[lane]]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=_COLOURS[LANES.index(lane)])
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#999999")

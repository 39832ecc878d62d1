"""The bench's instruments on a CUDA device: do they count what was done, and does every row come out measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightstep.bench.command import measure, plan
from lightstep.bench.machine import FORWARD, STEP, StepProfile, pinned_bytes, profile_step, read_timeline
from lightstep.plan.timing import measure_link

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    assert torch.cuda.is_available(), "tests/gpu needs a CUDA device"
    return torch.device("cuda", torch.cuda.current_device())


def test_the_link_is_measured_with_page_locked_buffers(device: torch.device) -> None:
    link = measure_link(device, nbytes=64 * MIB)
    assert link is not None and link.page_locked
    assert 1 < link.duplex <= 1.05 * max(link.to_device, link.to_host)


def profile(work: Callable[[], object], device: torch.device) -> StepProfile:
    seen = profile_step(work, lambda: None, device)
    assert seen is not None
    return seen


def test_host_waits_are_seen_one_by_one(device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    pinned = torch.empty(1000, pin_memory=True)
    event, stream = torch.cuda.Event(), torch.cuda.Stream()

    def quiet() -> None:
        pinned.copy_(x * 2, non_blocking=True)
        event.record()
        torch.cuda.current_stream().wait_event(event)

    assert profile(quiet, device).waits == 0
    for wait in (event.synchronize, stream.synchronize, torch.cuda.synchronize, x.sum().item, x.cpu):
        assert profile(wait, device).waits == 1, wait
    assert profile(x.sum().item, device).first_wait == "cudaStreamSynchronize in aten::item"


def test_host_waits_of_autograds_threads_are_seen(device: torch.device) -> None:
    """FSDP2 waits for offloaded gradients at the end of backward, in the thread that autograd has for the device."""
    event = torch.cuda.Event()
    x = torch.ones(10, device=device, requires_grad=True)
    x.register_hook(lambda gradient: event.synchronize())
    event.record()
    assert profile(x.sum().backward, device).waits == 1


def test_page_locked_memory_does_not_grow_with_buffers_that_steps_reuse(device: torch.device) -> None:
    before = pinned_bytes(device)
    for _ in range(5):
        torch.empty(4 * MIB, dtype=torch.uint8, pin_memory=True)
    assert pinned_bytes(device) - before <= 4 * MIB


def test_traffic_is_counted_to_the_byte(device: torch.device) -> None:
    source, target = torch.ones(3 * MIB, pin_memory=True), torch.empty(2 * MIB, pin_memory=True)
    there, back = torch.empty(3 * MIB, device=device), torch.ones(2 * MIB, device=device)

    def step() -> None:
        there.copy_(source, non_blocking=True)
        target.copy_(back, non_blocking=True)

    seen = profile(step, device)
    assert (seen.to_device, seen.to_host) == (12 * MIB, 8 * MIB)


def test_every_row_is_measured_and_moves_what_it_should(device: torch.device, tmp_path: Path) -> None:
    asked = {"params": 3e7, "layers": 4, "steps": 3, "warmup": 1, "rounds": 1, "device": str(device)}
    measure(plan("step", asked, tmp_path), tmp_path)
    values = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["name"]: row for row in values["rows"] if not row["skipped"]}
    assert all(row["note"] is None for row in rows.values()), {name: row["note"] for name, row in rows.items()}
    billions = values["model"]["parameters"] / 1e9
    for name, each_way in {"torch": 0, "resident": 0, "layer-stream": 8, "cpu-adamw": 2}.items():
        moved = rows[name]["gb_to_device"] / billions, rows[name]["gb_to_host"] / billions
        assert moved == pytest.approx((each_way, each_way), rel=0.01, abs=0.01), name
    for name, row in rows.items():
        assert row["largest_weight_difference"] <= 2**-11, name
        assert row["peak_device_bytes_beyond"] > 0, name
    assert rows["torch"]["host_syncs"] == 0 and rows["resident"]["host_syncs"] == 0
    assert rows["layer-stream"]["host_syncs"] >= 1  # it waits for its last copy
    assert rows["torch-offload"]["host_syncs"] >= 1  # it waits for its gradients


SMALL = {"params": 3e7, "layers": 4, "tokens": "8192,4096", "sequence": 1024, "steps": 2, "warmup": 1}


def test_whole_iterations_are_measured(device: torch.device, tmp_path: Path) -> None:
    small = "optimizer_state.ring_mib=32:optimizer_state.resident_gib=0"
    ours = f"resident,stream:optimizer_state.ring_mib=32,stream-overlap:{small}"
    asked = {**SMALL, "strategies": ours, "peers": "torch,cpu-adamw,torch-offload", "device": str(device)}
    values = measure(plan("iteration", asked, tmp_path), tmp_path)
    assert all(row["note"] is None for row in values["rows"]), [row["note"] for row in values["rows"]]
    assert (tmp_path / "iteration.png").stat().st_size > 10_000
    for tokens in (4096, 8192):
        rows = {row["label"]: row for row in values["rows"] if row["tokens"] == tokens}
        resident, stream, overlap = (
            rows["resident"],
            rows["stream ring_mib=32"],
            rows["stream-overlap ring_mib=32 resident_gib=0"],
        )
        assert resident["peak_device_bytes"] - stream["peak_device_bytes"] > 4 * values["model"]["parameters"]
        assert overlap["peak_device_bytes"] < resident["peak_device_bytes"]
        assert all(row["peak_device_bytes_beyond_weights"] > 0 for row in rows.values())
    waits = {row["label"]: row["host_syncs"] for row in values["rows"] if row["tokens"] == 4096}
    of_ours = {"resident": 0, "stream ring_mib=32": 0, "stream-overlap ring_mib=32 resident_gib=0": 1}  # its verdict
    for name, own in of_ours.items():
        assert waits[name] <= waits["no optimizer"] + own, f"{name} waits for the device itself: {waits}"
    assert waits["torch-offload"] > waits["no optimizer"]


def test_a_timeline_shows_copies_beside_the_computation(device: torch.device, tmp_path: Path) -> None:
    asked = {"params": 3e9, "tokens": "4096", "warmup": 3, "strategies": "stream-overlap", "device": str(device)}
    measure(plan("timeline", asked, tmp_path), tmp_path)
    (file,) = tmp_path.glob("*-timeline.json")
    events = json.loads(file.read_text())["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert ranges.count(FORWARD) == ranges.count(STEP) == 2
    *copies, waits = read_timeline(events)
    for said in copies:
        hidden, all_copies = map(float, re.findall(r"[\d.]+", said)[:2])
        assert 0 < hidden <= all_copies, said
    assert len(copies) == 2 and re.fullmatch(r"the main stream waited [\d.]+ ms for launches and .*", waits)

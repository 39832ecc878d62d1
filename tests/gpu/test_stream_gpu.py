"""The streaming backend on a CUDA device: resident's bits, races provoked by sleep kernels, no sync, no allocation."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.update import GradientStage, GroupValues
from lightstep.precision import split, split_triton
from lightstep.precision.split import Splitter, probe_masters
from lightstep.state.host_memory import HostSlab
from lightstep.state.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE, CallerStream, LaneError, Lanes, StreamLane
from lightstep.state.schema import Managed
from lightstep.state.spare_memory import GIB
from lightstep.state.store import Store
from tests import stores
from tests.unit.test_stream import random_sleeps

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTHS = (32, 131072, 64, 64, 128)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "AdamW-foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
}


def streamed(ring_mib: float = 40, slots: int | None = None, **settings: Any) -> Store:
    return stores.stream(ring_mib=ring_mib, slots=slots, **settings)


class Layers:
    """Linear layers that compute next to nothing for the state they have: copies and updates are all there is."""

    def __init__(
        self,
        backend: Store,
        name: str = "AdamW",
        dtype: torch.dtype = torch.bfloat16,
        shapes: list[tuple[int, ...]] | None = None,
    ) -> None:
        optimizer_class, hyperparameters = OPTIMIZERS[name]
        shapes = shapes or [s for a, b in itertools.pairwise(WIDTHS) for s in ((b, a), (b,))]
        generator = torch.Generator("cuda").manual_seed(0)
        self.params = [
            nn.Parameter(torch.randn(shape, generator=generator, device="cuda").mul_(0.02).to(dtype))
            for shape in shapes
        ]
        self.backend = backend
        self.optimizer = MixedPrecisionOptimizer(
            self.params, optimizer_class, hyperparameters, backend=backend, max_norm=1.0
        )

    def set_gradients(self, number: int) -> None:
        generator = torch.Generator("cuda").manual_seed(1000 + number)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype)

    def step(self, number: int) -> None:
        self.set_gradients(number)
        self.optimizer.step()


def assert_same(tested: Layers, expected: Layers, where: str = "") -> None:
    """Weights, masters and state, bit for bit; one parameter at a time."""
    tested.optimizer.synchronize()
    for index, (p, q) in enumerate(zip(tested.params, expected.params, strict=True)):
        assert torch.equal(p, q), f"{where} weight {index}"
        found, wanted = tested.optimizer.state[p], expected.optimizer.state[q]
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(torch.as_tensor(found[key]).cpu(), torch.as_tensor(value).cpu()), (
                f"{where} {index} {key}"
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_fifty_steps_equal_resident(name: str, dtype: torch.dtype) -> None:
    tested, expected = Layers(streamed(), name, dtype), Layers(stores.resident(), name, dtype)
    for number in range(50):
        tested.step(number)
        expected.step(number)
    assert len(tested.backend.units()) > 4, "nothing was cut"
    assert_same(tested, expected)


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 64])
def test_any_number_of_slots(slots: int) -> None:
    tested, expected = Layers(streamed(4 * slots, slots)), Layers(stores.resident())
    for number in range(8):
        tested.step(number)
        expected.step(number)
    assert_same(tested, expected)


def test_a_tensor_of_525_million_elements_needs_no_more_device_memory_than_the_ring() -> None:
    shapes = [(128256, 4096)]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    tested = Layers(streamed(512), shapes=shapes)
    elements = tested.params[0].numel()
    for number in range(3):
        tested.step(number)
    torch.cuda.synchronize()
    memory = tested.optimizer.memory_report()
    assert memory["host_bytes_per_parameter"] == pytest.approx(10, rel=0.01)
    assert memory["ring_bytes"] <= 600e6
    held = torch.cuda.memory_allocated() - before - 2 * elements
    assert held <= memory["ring_bytes"] + memory["gradient_stage_bytes"] + 8 * MIB
    expected = Layers(stores.resident(), shapes=shapes)
    for number in range(3):
        expected.step(number)
    assert_same(tested, expected)


def test_save_and_resume_across_backends() -> None:
    expected, first = Layers(stores.resident()), Layers(streamed())
    for number in range(4):
        expected.step(number)
        first.step(number)
    second, third = Layers(stores.resident()), Layers(streamed(16, 2))
    for source, target in ((first, second), (second, third)):
        with torch.no_grad():
            for p, q in zip(target.params, source.params, strict=True):
                p.copy_(q)
        target.optimizer.load_state_dict(source.optimizer.state_dict())
        assert_same(target, expected, "loaded")
    for number in range(4, 8):
        expected.step(number)
        third.step(number)
    assert_same(third, expected, "continued")


# ---- ordering
# -----------------------------------------------------------------------------------------------------------------

SMALL = [(300, 301), (301,), (70_000,), (257, 129), (1,), (40_000,)]


class Walk:
    """Units walked by hand, without the rest of a step, so that nothing but the backend orders anything."""

    def __init__(self, backend: Store) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.backend, self.stage = backend, GradientStage()
        self.arithmetic = BaseArithmetic(torch.optim.AdamW, {"lr": 1e-2})
        self.arithmetic.prepare(device)
        group = dict(self.arithmetic.defaults)
        generator = torch.Generator(device).manual_seed(0)
        local = [torch.randn(shape, generator=generator, device=device).bfloat16() for shape in SMALL]
        self.items = [Managed(w, w, group, f"p{i}", i) for i, w in enumerate(local)]
        schema = self.arithmetic.schema(device, [group])
        for item in self.items:
            item.schema = schema
        backend.register(self.items)
        self.no_overflow, self.values = torch.zeros((), device=device), GroupValues([group])
        self.gradients = [
            {item: torch.randn(item.local.shape, generator=generator, device=device) for item in self.items}
            for _ in range(4)
        ]

    def step(self, number: int) -> None:
        gradients = self.gradients[number]
        self.backend.begin(gradients.keys())
        for unit in self.backend.units():
            segments = self.backend.acquire(unit, gradients)
            own = [[part.slice(gradients[part.owner]) for part in segment.parts] for segment in segments]
            rows = self.stage.scaled(segments, own, None, None)
            rows = [row.view(segment.shape) for segment, row in zip(segments, rows, strict=True)]
            self.arithmetic.apply(segments, rows, self.no_overflow, self.values)
            self.backend.release(unit, segments)
        self.backend.finish()
        for item in self.items:
            item.updated = True

    def run(self) -> Walk:
        for number in range(4):
            self.step(number)
        self.backend.synchronize()
        torch.cuda.synchronize()
        return self

    def differs_from(self, other: Walk) -> bool:
        for item, twin in zip(self.items, other.items, strict=True):
            mine, its = self.backend.entries(item), other.backend.entries(twin)
            if not torch.equal(item.local, twin.local):
                return True
            if any(not torch.equal(mine[key].cpu(), its[key].cpu()) for key in ("master", "exp_avg", "exp_avg_sq")):
                return True
        return False


def test_sleep_kernels_in_every_lane_over_two_hundred_seeds() -> None:
    expected = Walk(stores.resident()).run()
    for seed in range(200):
        slots = (1, 2, 3, 4, 9)[seed % 5]
        tested = Walk(streamed(0.5 * slots, slots))
        random_sleeps(tested.backend.lanes, seed)
        assert not tested.run().differs_from(expected), f"seed {seed}"
        tested.backend.close()


def found_wrong(seeds: int = 30) -> bool:
    expected = Walk(stores.resident()).run()
    for seed in range(seeds):
        tested = Walk(streamed(1.0, 2))
        random_sleeps(tested.backend.lanes, seed, longest=3_000_000)
        if tested.run().differs_from(expected):
            return True
    return False


@pytest.mark.parametrize("lane", [HOST_TO_DEVICE, DEVICE_TO_HOST, "caller"])
def test_the_sleeps_find_a_missing_wait(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StreamLane.wait
    if lane == "caller":
        monkeypatch.setattr(CallerStream, "wait", lambda *_: None)
    else:
        monkeypatch.setattr(StreamLane, "wait", lambda self, event: None if self.name == lane else real(self, event))
    assert found_wrong()


@pytest.mark.parametrize("gib", [0.0, 0.5 * MIB / GIB])
def test_steps_may_come_from_different_streams(gib: float) -> None:
    expected, tested = Walk(stores.resident()).run(), Walk(streamed(1.0, 2, resident_gib=gib))
    random_sleeps(tested.backend.lanes, 0, longest=3_000_000)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for number in range(4):
        streams[number % 2].wait_stream(streams[1 - number % 2])
        with torch.cuda.stream(streams[number % 2]):
            tested.step(number)
    torch.cuda.synchronize()
    assert not gib or tested.backend.memory()["device_bytes"] > 0
    assert not tested.differs_from(expected)


def test_whole_steps_may_run_in_the_compute_lane() -> None:
    expected, tested = Walk(stores.resident()).run(), Walk(streamed(1.0, 2))
    lanes = tested.backend.lanes
    random_sleeps(lanes, 1)
    ready = lanes.event()
    lanes.compute.wait(lanes.caller().record(ready))
    for number in range(4):
        lanes.compute.run(lambda number=number: tested.step(number), f"step {number}")
    tested.backend.synchronize()
    torch.cuda.synchronize()
    assert not tested.differs_from(expected)


# ---- what a steady-state step does not do
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_steady_state_walk_neither_syncs_nor_allocates(dtype: torch.dtype) -> None:
    layers = Layers(streamed(), dtype=dtype)
    for number in range(3):
        layers.step(number)
    backend, items = layers.backend, layers.optimizer.managed()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            backend.begin(items)
            for unit in backend.units():
                backend.release(unit, backend.acquire(unit, items))
            backend.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_copies_of_both_directions_and_updates_run_at_the_same_time() -> None:
    """From the profiler's trace: while one unit is updated another one comes and a third one goes."""
    layers = Layers(streamed(512), shapes=[(64 * MIB,)] * 4)
    for number in range(3):
        layers.step(number)
    layers.set_gradients(3)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layers.optimizer.step()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"HtoD": [], "DtoH": []}
    for event in profile.events():
        for way, found in spans.items():
            if way in event.name and event.time_range.elapsed_us() > 200:
                found.append((event.time_range.start, event.time_range.end))
    assert spans["HtoD"]
    assert spans["DtoH"]
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans["HtoD"] for c, d in spans["DtoH"])
    assert both > 0.5 * sum(b - a for a, b in spans["DtoH"])


# ---- split and host memory
# ------------------------------------------------------------------------------------------------------


def fused_and_plain() -> tuple[Any, Splitter]:
    device = torch.device("cuda", torch.cuda.current_device())
    if not split_triton.available:
        pytest.skip("Triton is not installed")
    assert split._checked_kernels(device) is split_triton, "the fused kernels differ from the torch version"
    return split_triton, split._plain(device)


def test_checking_the_fused_kernels_draws_no_random_numbers() -> None:
    fused_and_plain()
    device = torch.device("cuda", torch.cuda.current_device())
    random_state = torch.cuda.get_rng_state()
    split._checked_kernels.cache_clear()
    Splitter(device)
    assert torch.equal(torch.cuda.get_rng_state(), random_state)


def test_the_fused_kernels_give_the_torch_versions_bits() -> None:
    fused, plain = fused_and_plain()
    masters = probe_masters(torch.device("cuda"))
    for n in (1, 7, 8, 9, 2047, 2048, 2049, masters.numel()):
        for start in (0, 1, 3):  # unaligned too: shards begin anywhere
            master = masters[start : start + n]
            n_real = master.numel()
            for extra in (
                torch.rand(n_real, device="cuda"),
                torch.zeros(-(-n_real // 8), dtype=torch.uint8, device="cuda"),
            ):
                found, wanted = (split._round_trip(one, master, extra.clone()) for one in (fused, plain))
                assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True)), (n, start)


@pytest.mark.parametrize("which", ["fused", "plain"])
def test_every_low_half_under_chosen_upper_halves(which: str) -> None:
    splitter = dict(zip(("fused", "plain"), fused_and_plain(), strict=True))[which]
    low = torch.arange(2**16, device="cuda")
    for upper in (
        0x0000,
        0x0001,
        0x0080,
        0x3F7F,
        0x3F80,
        0x7F7F,
        0x7F80,
        0x7FC0,
        0x7FFF,
        0x8000,
        0xBF81,
        0xFF7F,
        0xFF80,
    ):
        bits = (upper << 16) | low
        master = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
        for extra in (torch.rand(2**16, device="cuda"), torch.zeros(2**13, dtype=torch.uint8, device="cuda")):
            weight_bits, *_, back, _ = split._round_trip(splitter, master, extra)
            assert torch.equal(back, master.view(torch.int32))
            rounded, nan = master.bfloat16(), master.isnan()
            assert torch.equal(weight_bits[~nan], rounded.view(torch.int16)[~nan])


def test_slabs_are_page_locked_in_place_and_copied_without_a_sync() -> None:
    slab = HostSlab(33 * MIB + 5, device="cuda")
    assert slab.page_locked
    host = slab.tensor(torch.float32, 8 * MIB)
    assert host.is_pinned()
    device = torch.arange(8 * MIB, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        host.copy_(device, non_blocking=True)
        back = torch.empty_like(device).copy_(host, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(back, device)
    slab.close()
    assert not host.is_pinned()


def test_refused_page_locking_leaves_no_error_behind_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightstep.state import host_memory

    # Zero bytes cannot be registered: the runtime really refuses, and really remembers its last error.
    real = host_memory._register
    monkeypatch.setattr(host_memory, "_register", lambda pointer, _, device: real(pointer, 0, device))
    monkeypatch.setattr(host_memory, "_warned_pageable", False)
    tested = Layers(streamed())
    with pytest.warns(RuntimeWarning, match="it stays pageable"):
        tested.step(0)
    monkeypatch.undo()
    expected = Layers(stores.resident())
    expected.step(0)
    for number in range(1, 4):
        tested.step(number)
        expected.step(number)
    assert_same(tested, expected)


# ---- bad turns
# ------------------------------------------------------------------------------------------------------------------


def steps(layers: Layers, first: int, end: int) -> None:
    for number in range(first, end):
        layers.step(number)


def failing(layers: Layers, lane: str, at: int) -> Callable[[], None]:
    calls = iter(range(10_000))

    def fail(name: str) -> None:
        if name == lane and next(calls) == at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    layers.backend.lanes.delay = fail
    return lambda: setattr(layers.backend.lanes, "delay", None)


@pytest.mark.parametrize("lane", [HOST_TO_DEVICE, DEVICE_TO_HOST])
def test_a_failure_in_a_lane_stops_the_optimizer_until_a_load(lane: str) -> None:
    tested, expected = Layers(streamed()), Layers(stores.resident())
    for layers in (tested, expected):
        layers.step(0)
    saved = tested.optimizer.state_dict()
    weights = [p.detach().clone() for p in tested.params]
    heal = failing(tested, lane, at=4)
    with pytest.raises((RuntimeError, LaneError), match="an illegal memory access"):
        steps(tested, 1, 4)
    heal()
    with pytest.raises((RuntimeError, LaneError), match=r"[Ll]oad a checkpoint"):
        tested.step(4)
    with torch.no_grad():
        for p, weight in zip(tested.params, weights, strict=True):
            p.copy_(weight)
    tested.optimizer.load_state_dict(saved)
    for number in range(1, 4):
        tested.step(number)
        expected.step(number)
    assert_same(tested, expected)


def test_a_ring_that_does_not_fit_says_which_setting_lowers_it() -> None:
    layers = Layers(streamed(4096), shapes=[(256 * MIB,)])
    layers.set_gradients(0)
    layers.optimizer.managed()  # set up
    gc.collect()  # what earlier tests left must not be given back in the middle of the step
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 128 * MIB) / total)
    try:
        with pytest.raises((torch.OutOfMemoryError, RuntimeError), match=r"lower optimizer_state\.ring_mib"):
            layers.optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def entries_on_host(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in entries.items() if isinstance(value, Tensor) and value.dim() > 0}


def test_state_with_dimensions_is_on_the_host_and_counters_are_on_the_device() -> None:
    layers = Layers(streamed())
    layers.step(0)
    state = layers.optimizer.state[layers.params[0]]
    assert {value.device.type for value in entries_on_host(state).values()} == {"cpu"}
    assert state["step"].device.type == "cuda"


@pytest.mark.parametrize("direction", [HOST_TO_DEVICE, DEVICE_TO_HOST])
def test_small_copies_of_others_pass_between_the_large_ones_of_a_lane(direction: str) -> None:
    """The copy engine would stay with the lane until it has nothing left."""
    lanes = Lanes(torch.device("cuda"))
    lane = getattr(lanes, direction)
    buffers = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pages = [torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    sources, targets = (pages, buffers) if direction == HOST_TO_DEVICE else (buffers, pages)
    others = [torch.cuda.Stream() for _ in range(8)]  # one that shares a queue of the hardware with the lane does wait
    small = [(torch.zeros(40_000, pin_memory=True), torch.zeros(40_000, device="cuda")) for _ in others]
    begin, end, *ends = (torch.Event("cuda", enable_timing=True) for _ in range(2 + len(others)))
    torch.cuda.synchronize()
    lane.record(begin)
    for number in range(100):
        lane.copy(targets[number % 2], sources[number % 2])
    lane.record(end)
    for stream, (host, device), done in zip(others, small, ends, strict=True):
        target, source = (device, host) if direction == HOST_TO_DEVICE else (host, device)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done.record()
    torch.cuda.synchronize()
    before = [done.elapsed_time(end) > 0 for done in ends]
    assert sum(before) >= len(others) // 2, [begin.elapsed_time(done) for done in (*ends, end)]

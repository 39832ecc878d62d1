"""The streaming backend against the resident one: equal bits under every order of the lanes, and every bad turn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.update import GradientStage, GroupValues
from lightstep.state import host_memory
from lightstep.state import lanes as lanes_module
from lightstep.state import record as record_module
from lightstep.state.host_memory import CHECK_VARIABLE, HostMemoryError
from lightstep.state.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE, CallerLane, LaneError
from lightstep.state.schema import Managed, Unit
from lightstep.state.store import Store
from lightstep.state.units import RingError
from tests import stores
from tests.covering import every_value
from tests.reference.own_classes import EachParameter
from tests.training import random_delays, random_sleeps

__all__ = ["random_delays", "random_sleeps"]

CPU = torch.device("cpu")
SHAPES: list[tuple[int, ...]] = [(9, 30), (30,), (513,), (17, 33), (), (0, 4), (260,), (5, 5)]
LAYERS = [None, 0, 0, 1, 1, 1, 2, None]
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1})


pytestmark = pytest.mark.usefixtures("small_cuts")


def streamed(slots: int | None = None, *, slot_bytes: int = 3000, **settings: Any) -> Store:
    """A ring of so many slots, each with room for so many bytes of Adam's state and its scratch."""
    count = 4 if slots is None else slots
    return stores.stream(slots=slots, ring_mib=(count + 0.4) * slot_bytes / 2**20, **settings)


class Run:
    """Parameters with a backend and a base optimizer, walked as ``step()`` walks them, on made-up gradients."""

    turns = False
    """Every second step walks backwards, so that what was written back last is fetched first."""

    def __init__(
        self,
        backend: Store,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        hyperparameters: Mapping[str, Any] = ADAMW[1],
        *,
        dtype: torch.dtype = torch.bfloat16,
        shapes: list[tuple[int, ...]] = SHAPES,
        layers: list[Any] | None = None,
        whole_tensors: bool = False,
    ) -> None:
        self.backend, self.dtype, self.whole_tensors = backend, dtype, whole_tensors
        self.stage, self.walks = GradientStage(), 0
        self.arithmetic = BaseArithmetic(optimizer_class, dict(hyperparameters))
        self.arithmetic.prepare(CPU)
        self.group = {**self.arithmetic.defaults}
        layers = LAYERS if layers is None else layers
        generator = torch.Generator().manual_seed(0)
        self.items: list[Managed] = []
        for i, (shape, layer) in enumerate(zip(shapes, layers, strict=True)):
            local = torch.randn(shape, generator=generator).to(dtype)
            own = dtype == torch.float32
            self.items.append(Managed(local, local, self.group, f"p{i}", layer, own))
        self.register(self.items)

    def register(self, items: list[Managed]) -> None:
        self.items = items
        schema = self.arithmetic.schema(CPU, [self.group])
        for item in items:
            item.schema, item.whole_tensors = schema, self.whole_tensors
        self.backend.register(items)

    def step(self, number: int, *, without: Collection[int] = (), overflow: float = 0.0) -> None:
        """One step; the parameters ``without`` a gradient stay as they are."""
        self.walk(self.gradients(number, without), overflow)

    def steps(self, first: int, end: int) -> None:
        for number in range(first, end):
            self.step(number)

    def look(self, gradients: Mapping[Managed, Tensor]) -> None:
        """A step that updates nothing; what has ``gradients`` is split and written back all the same."""
        self.backend.begin(gradients.keys())
        for unit in self.backend.units():
            self.backend.release(unit, self.backend.acquire(unit, gradients))
        self.backend.finish()

    def gradients(self, number: int, without: Collection[int] = ()) -> dict[Managed, Tensor]:
        generator = torch.Generator().manual_seed(1000 + number)
        made = {item: torch.randn(item.local.shape, generator=generator) for item in self.items}
        return {item: made[item] for i, item in enumerate(self.items) if i not in without}

    def walk(self, gradients: Mapping[Managed, Tensor], overflow: float = 0.0) -> None:
        order = list(self.backend.units())[:: -1 if self.turns and self.walks % 2 else 1]
        self.walks += 1
        self.backend.begin(gradients.keys(), order)
        for unit in order:
            self.update(unit, gradients, overflow)
        self.backend.finish(order[::-1] if self.turns else None)

    def update(self, unit: Unit, gradients: Mapping[Managed, Tensor], overflow: float = 0.0) -> None:
        segments = self.backend.acquire(unit, gradients)
        if segments:
            parts = [[part.slice(gradients[part.owner]) for part in segment.parts] for segment in segments]
            rows = self.stage.scaled(segments, parts, None, None)
            scaled = [row.view(one.shape).to(one.master.dtype) for one, row in zip(segments, rows, strict=True)]
            groups = list({id(segment.group): segment.group for segment in segments}.values())
            self.arithmetic.apply(segments, scaled, torch.tensor(overflow), GroupValues(groups))
        self.backend.release(unit, segments)
        for part in (part for segment in segments for part in segment.parts):
            if part.stop == part.owner.local.numel():
                part.owner.updated = True

    def entries(self) -> list[dict[str, Any]]:
        """A snapshot of all state."""
        self.backend.synchronize()
        found = [self.backend.entries(item) for item in self.items]
        return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in one.items()} for one in found]

    def weights(self) -> list[Tensor]:
        return [item.local.clone() for item in self.items]

    def saved(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Weights and state, for :meth:`load`."""
        return list(zip(self.weights(), self.entries(), strict=True))

    def load(self, saved: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        for item, (weight, entries) in zip(self.items, saved, strict=True):
            item.local.copy_(weight)
            self.backend.load(item, entries)
            item.updated = bool(entries)


def same_bits(tested: Tensor, expected: Tensor) -> bool:
    if tested.dtype != expected.dtype or tested.shape != expected.shape:
        return False
    return torch.equal(
        tested.reshape(-1).contiguous().view(torch.uint8), expected.reshape(-1).contiguous().view(torch.uint8)
    )


def assert_same(tested: Run, expected: Run, where: str = "") -> None:
    """Weights, masters and state, bit for bit."""
    for item, other in zip(tested.items, expected.items, strict=True):
        assert same_bits(item.local, other.local), f"{where} {item.name}: weight"
    for item, found, wanted in zip(tested.items, tested.entries(), expected.entries(), strict=True):
        assert found.keys() == wanted.keys(), f"{where} {item.name}: {sorted(found)}, expected {sorted(wanted)}"
        for key, value in wanted.items():
            same = same_bits(found[key], value) if isinstance(value, Tensor) else found[key] == value
            assert same, f"{where} {item.name}: {key}"


# ---- the same bits as the resident backend
# ------------------------------------------------------------------------------------


def test_random_delays_in_every_lane() -> None:
    reference: dict[tuple[int, ...], Run] = {}
    for seed in range(25):
        generator = random.Random(seed)
        late = tuple(sorted(generator.sample(range(len(SHAPES)), generator.choice([0, 0, 2]))))
        tested = Run(streamed(generator.choice([1, 2, 3, 4, 20]), slot_bytes=generator.choice([1200, 3000, 9000])))
        random_delays(tested.backend.lanes, seed)
        tested.turns = seed % 2 == 0
        for run in (tested, reference.setdefault(late, Run(stores.resident()))):
            for number in range(4 if run.walks < 4 else 0):
                run.step(number, without=late if number in (0, 2) else ())
        assert_same(tested, reference[late], where=f"seed {seed}")
        tested.backend.close()


def test_masters_of_every_kind_survive_a_trip() -> None:
    """±0, denormals, numbers that round to infinity, infinities and NaN with its payload, in masters at rest."""
    from lightstep.precision.split import probe_masters

    bits = probe_masters(CPU)[:9000]
    run = Run(streamed(2, slot_bytes=30_000), shapes=[(9000,), (40,)], layers=[0, 0])
    run.step(0)
    state = run.entries()[0]
    with torch.no_grad():
        run.items[0].local.copy_(bits)
    run.backend.load(run.items[0], {**state, "master": bits})
    for number in range(3):
        run.step(number, without={0})  # in the same unit as a parameter that is updated
    assert same_bits(run.entries()[0]["master"], bits)
    assert same_bits(run.entries()[0]["exp_avg_sq"], state["exp_avg_sq"])
    zero = {item: torch.zeros_like(item.local, dtype=torch.float32) for item in run.items}
    run.walk(zero, overflow=1.0)  # joined and split again, changed by nothing
    assert same_bits(run.entries()[0]["master"], bits)
    assert same_bits(run.entries()[0]["exp_avg_sq"], state["exp_avg_sq"])


class Summed(EachParameter):
    """Keeps three numbers for each tensor."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["three"] = torch.ones(3)


def test_an_optimizer_that_does_not_say_so_is_told() -> None:
    run = Run(streamed(2, slot_bytes=1500), Summed, {}, shapes=[(50, 33)], layers=[0])
    assert len(run.backend.units()) > 1
    with pytest.raises(ValueError, match=r"state 'three' of p0 .* needs whole tensors; .*whole_tensors = True"):
        run.step(0)


# ---- bytes, allocations, order of work
# -----------------------------------------------------------------------------------------

BIG = [(512, 512), (512,), (512, 300), (40_000,)]


ADAM, SGD = torch.optim.Adam, torch.optim.SGD


@pytest.mark.parametrize(
    ("optimizer_class", "settings", "dtype", "expected"),
    [
        (*ADAMW, torch.bfloat16, 10),
        (*ADAMW, torch.float16, 12),
        (*ADAMW, torch.float32, 8),
        (ADAM, {"lr": 1e-2, "amsgrad": True}, torch.bfloat16, 14),
        (SGD, {"lr": 1e-2, "momentum": 0.9}, torch.bfloat16, 2 + 1 / 8 + 4),
        (SGD, {"lr": 1e-2, "momentum": 0.9}, torch.float32, 4),
        (SGD, {"lr": 1e-2}, torch.bfloat16, 2 + 1 / 8),
        (SGD, {"lr": 1e-2}, torch.float32, 0),
    ],
)
def test_host_bytes_for_each_parameter(
    optimizer_class: Any, settings: dict[str, Any], dtype: torch.dtype, expected: float
) -> None:
    run = Run(stores.stream(ring_mib=4), optimizer_class, settings, dtype=dtype, shapes=BIG, layers=[0, 0, 0, 1])
    run.steps(0, 2)
    elements = sum(item.local.numel() for item in run.items)
    memory = run.backend.memory()
    assert memory["host_bytes"] == pytest.approx(expected * elements, rel=0.01)
    assert memory["device_bytes"] == 0
    used = memory["ring_bytes"] - run.backend._splitters.nbytes()  # whose scratch is none of the ring
    assert used <= 4 * 2**20 + 4 * len(run.backend._records.of_part)
    assert used > 0.7 * 4 * 2**20 or settings is not ADAMW[1]


class Allocations(TorchDispatchMode):
    """Names of the operations that make new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if (
            name in {"clone", "_to_copy", "zeros", "ones", "zeros_like", "empty_like", "cat", "arange"}
            or "empty" in name
        ):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@every_value(dtype=[torch.bfloat16, torch.float16, torch.float32], resident_kib=[0, 6])
def test_a_steady_state_step_allocates_nothing_and_makes_no_stream_or_event(
    dtype: torch.dtype, resident_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(streamed(3, resident_gib=resident_kib / 2**20), dtype=dtype)
    run.steps(0, 3)
    assert bool(run.backend.memory()["device_bytes"]) == bool(resident_kib)
    monkeypatch.setattr(run.backend.lanes, "event", lambda: pytest.fail("a new event inside a step"))
    monkeypatch.setattr(lanes_module, "Lanes", lambda *_: pytest.fail("new lanes inside a step"))
    gradients = run.gradients(2)
    before = {id(slot.buffer) for slot in run.backend._ring.slots}
    run.backend.synchronize()
    with Allocations() as allocations:
        run.backend.prepare()
        run.look(gradients)
    assert allocations.found == []
    assert {id(slot.buffer) for slot in run.backend._ring.slots} == before


@contextmanager
def labels_of(*lanes: Any) -> Iterator[list[str]]:
    """Of the jobs that these lanes get in the body."""
    found: list[str] = []
    for lane in lanes:
        real = lane.run
        lane.run = lambda job, label="", real=real: (found.append(label), real(job, label))
    yield found
    for lane in lanes:
        del lane.run


def test_a_step_starts_with_warm_slots_and_copies_each_record_once_each_way() -> None:
    run = Run(streamed(3))
    run.step(0)
    lanes = run.backend.lanes
    assert len(run.backend._ring.staged()) == 3
    with labels_of(lanes.host_to_device, lanes.device_to_host) as copies:
        run.steps(1, 3)
    expected = [f"{way} {unit.label}" for unit in run.backend.units() for way in ("fetching", "writing back")] * 2
    assert sorted(copies) == sorted(expected)


def test_units_without_a_gradient_do_not_travel() -> None:
    run = Run(streamed(4))
    run.step(0)
    run.step(1, without={6})
    run.step(2, without={6})
    run.backend.synchronize()
    with labels_of(run.backend.lanes.host_to_device) as labels:
        run.step(3, without={6})
    assert labels
    assert not any("p6" in label for label in labels)


# ---- bad turns
# ------------------------------------------------------------------------------------------------------------------


def test_a_ring_smaller_than_the_smallest_piece_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        RingError,
        match=r"ring_mib is 0\.001, which allows slots of \d+ bytes, and p\d needs 640 bytes in one piece\. Set",
    ) as refused:
        Run(stores.stream(ring_mib=0.001))
    enough = float(str(refused.value).split("Set ring_mib to ")[1].split()[0])
    Run(stores.stream(ring_mib=enough)).step(0)
    with pytest.raises(RingError, match=r"p3 needs 5760 bytes in one piece \(its optimizer needs whole tensors\)"):
        Run(stores.stream(ring_mib=0.015), whole_tensors=True)


def test_a_matrix_that_is_larger_than_a_slot_gets_larger_slots_and_fewer() -> None:
    backend = stores.stream(prefetch_layers=9, ring_mib=0.025)  # 26,214 bytes: 11 slots of about 2,300
    Run(backend, whole_tensors=True).step(0)
    assert backend._ring is not None
    assert backend._ring.sizes == [5760] * 3


def failing(lane: str, at: int = 0) -> Callable[[str], None]:
    """A delay for lanes: the job of this number fails in one of them."""
    calls = itertools.count()

    def fail(name: str) -> None:
        if name == lane and next(calls) == at:
            raise OSError("a page went missing")

    return fail


@pytest.mark.parametrize("lane", [HOST_TO_DEVICE, DEVICE_TO_HOST])
def test_a_failed_copy_is_raised_once_with_its_unit_and_stops_the_backend_until_a_load(lane: str) -> None:
    tested, expected = Run(streamed(2)), Run(stores.resident())
    for run in (tested, expected):
        run.step(0)
    saved = expected.saved()
    tested.backend.synchronize()
    tested.backend.lanes.delay = failing(lane, 2)
    with pytest.raises(
        LaneError, match=rf"(fetching|writing back) p\d.* failed in the {lane} lane: OSError: a page went missing"
    ):
        tested.steps(1, 4)
    assert tested.backend.failed
    with pytest.raises(LaneError, match="load a checkpoint to go on"):
        tested.step(4)
    for run in (tested, expected):
        run.load(saved)
        assert run is expected or not tested.backend.failed
        run.steps(1, 4)
    assert_same(tested, expected)


def test_closing_gives_everything_back() -> None:
    run = Run(streamed(3))
    run.step(0)
    threads = [lane._thread for lane in run.backend.lanes._all()]
    slabs = [record.slab for record in run.backend._records if record.slab is not None]
    run.backend.close()
    assert slabs
    assert all(slab.closed for slab in slabs)
    assert not any(thread.is_alive() for thread in threads)
    assert run.backend.memory() == {"device_bytes": 0, "host_bytes": 0, "ring_bytes": run.backend._splitters.nbytes()}
    run.backend.close()
    run.register(run.items)
    run.step(1)


def test_a_nan_in_a_master_costs_its_neighbours_nothing() -> None:
    runs = [Run(streamed(3)), Run(stores.resident())]
    for run in runs:
        run.step(0)
    broken = runs[1].entries()
    broken[0]["master"].view(-1)[5] = float("nan")
    for run in runs:
        for item, entries in zip(run.items, broken, strict=True):
            run.backend.load(item, entries)
            item.local.copy_(entries["master"])
        assert not run.backend.changed(run.items)
        run.step(1)
    for found, wanted in zip(runs[0].entries(), runs[1].entries(), strict=True):
        assert all(torch.equal(found[key].nan_to_num(7), wanted[key].nan_to_num(7)) for key in ("master", "exp_avg"))


def test_an_interrupt_while_waiting_for_a_slot_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tested, expected = Run(streamed(2)), Run(stores.resident())
    for run in (tested, expected):
        run.step(0)
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(CallerLane, "wait", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                tested.step(1)
        tested.load(expected.saved())
    for run in (tested, expected):
        run.step(1)
    assert_same(tested, expected)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_loading_takes_each_records_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, tested = Run(stores.resident()), Run(streamed(3))
    trained.step(0)
    made = []
    slab = record_module.HostSlab
    monkeypatch.setattr(record_module, "HostSlab", lambda *a, **k: made.append(a) or slab(*a, **k))
    for _ in range(2):
        tested.load(trained.saved())
        assert 0 < len(made) <= len(tested.backend.units())
    tested.step(1)
    trained.step(1)
    assert_same(tested, trained)


def test_every_rank_of_a_host_needs_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "ranks_on_this_host", lambda: 8)
    monkeypatch.setenv(CHECK_VARIABLE, "100")
    host_memory.require(12 << 30, "state")
    with pytest.raises(HostMemoryError, match=r"480\.00 GiB .* needed \(60\.00 GiB for each of the 8 ranks"):
        host_memory.require(60 << 30, "state")


# ---- segments: many parameters as one for element-wise classes, with step counts for each


MAKERS: dict[str, Callable[[], Store]] = {"resident": stores.resident, "stream": lambda: stores.stream(ring_mib=1)}
every_home = pytest.mark.parametrize("backend", list(MAKERS))


def acquired(run: Run, without: Collection[int] = ()) -> list[int]:
    """Parts of each segment of a step that changes nothing."""
    gradients, found = run.gradients(0, without), []
    run.backend.begin(gradients.keys())
    for unit in run.backend.units():
        segments = run.backend.acquire(unit, gradients)
        found += [len(segment.parts) for segment in segments]
        run.backend.release(unit, [])
    run.backend.finish()
    return found


def even(backend: str) -> Run:
    """Twelve parameters of one layer."""
    return Run(MAKERS[backend](), shapes=[(16,)] * 12, layers=[None] * 12)


@every_home
def test_histories_part_where_updates_differ_and_meet_again_when_they_are_loaded(backend: str) -> None:
    run = even(backend)
    run.step(0)
    assert acquired(run) == [12]
    run.step(1, without={3, 4})
    assert acquired(run) == [3, 2, 7]
    steps = [float(entries["step"]) for entries in run.entries()]
    assert steps == [2, 2, 2, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    for item, entries in zip(run.items, run.entries(), strict=True):
        run.backend.load(item, {**entries, "step": torch.tensor(2.0)})
    assert acquired(run) == [12]
    run.step(2, without={0})
    assert [float(entries["step"]) for entries in run.entries()] == [2.0] + [3.0] * 11


@every_home
def test_a_weight_that_is_loaded_later_is_what_the_master_starts_from(backend: str) -> None:
    run = even(backend)
    item = run.items[0]
    run.backend.set_initial_master(item, item.local.float())
    item.local.fill_(0.5)
    assert run.backend.changed(run.items) == [item]
    run.backend.refresh(item)
    run.walk({other: torch.zeros_like(other.local, dtype=torch.float32) for other in run.items}, overflow=1.0)
    assert torch.equal(item.local, torch.full((16,), 0.5, dtype=torch.bfloat16))

"""State that stays on the device, as much of it as is wanted: the same bits, fewer bytes through the lanes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightstep.config import ConfigError
from lightstep.state import residency
from lightstep.state.host_memory import CHECK_VARIABLE, HostMemoryError
from lightstep.state.lanes import HOST_TO_DEVICE, LaneError
from lightstep.state.spare_memory import GIB, AutoBudget
from lightstep.state.store import Store
from lightstep.strategy.base import Strategy
from tests import stores
from tests.covering import every_value
from tests.reference.own_classes import Growing
from tests.training import Training, assert_same
from tests.unit.test_next_forward import save_and_load
from tests.unit.test_stream import Run, failing, labels_of
from tests.unit.test_stream import assert_same as assert_same_run

pytestmark = pytest.mark.usefixtures("small_cuts")

STREAM = {"backend": "stream", "ring_mib": 0.02}
TIMES = {"at_step": STREAM, "next_forward": {**STREAM, "update": "next_forward"}}
KIB = 1024 / GIB
SIZES = [4 * KIB, 9 * KIB, 1.0]
"""GiB: some records, more of them, all (a tiny model has about 15 KiB of state)."""


def held(training: Training) -> int:
    return training.optimizer.memory_report()["device_bytes"]


def resident_buffers(training: Training) -> dict[Any, int]:
    records = training.optimizer._backend._records
    return {record: record.slot.buffer.data_ptr() for record in records if record.slot is not None}


def copied_bytes(training: Training, steps: int) -> int:
    """Bytes that cross the link in both directions."""
    backend = training.optimizer._backend
    sizes = {record.unit.label: record.nbytes for record in backend._records}
    with labels_of(backend.lanes.host_to_device, backend.lanes.device_to_host) as labels:
        training.train(steps)
        training.optimizer.synchronize()
    return sum(next(size for unit, size in sizes.items() if unit in label) for label in labels)


def test_what_stays_does_not_travel() -> None:
    everything = None
    for gib in (0, *SIZES):
        training = Training({**STREAM, "resident_gib": gib})
        training.train(3)
        state = sum(record.nbytes for record in training.optimizer._backend._records)
        travelled = copied_bytes(training, 4)
        everything = everything or travelled
        assert travelled == 2 * 4 * (state - held(training))
        assert travelled == everything - 2 * 4 * held(training)


def test_over_the_budget_leaves_at_once() -> None:
    training = Training({**STREAM, "resident_gib": 1.0})
    training.train(3)
    everything = held(training)
    training.optimizer.set_residency(5 * KIB)
    assert 0 < held(training) <= 5 * 1024 < everything
    training.optimizer.set_residency(0)
    assert held(training) == 0
    training.optimizer.release_device_memory()
    report = training.optimizer.memory_report()
    assert report["ring_bytes"] == 4 * sum(len(r.parts) for r in training.optimizer._backend._records)
    assert report["device_bytes"] == report["gradient_stage_bytes"] == 0


def test_neither_a_steady_step_nor_an_edit_changes_a_buffer() -> None:
    training = Training({**STREAM, "resident_gib": 6 * KIB})
    training.train(3)
    buffers = resident_buffers(training)
    training.train(3)
    save_and_load(training)
    training.train(2)
    assert resident_buffers(training) == buffers and buffers


# -- auto


class Allocator:
    """A device with a caching allocator: what others ask for stays reserved; what records gave back is given back."""

    def __init__(self, total: int, margin: int) -> None:
        self.total, self.margin = total, margin
        self.others = self.elsewhere = self.highest = 0
        self.held: Callable[[], int] = lambda: 0

    def reserved(self) -> tuple[int, int]:
        now = self.others + self.held()
        self.highest = max(self.highest, now)
        return now, self.highest

    def available(self) -> int:
        return self.total - self.elsewhere

    def iteration(self, others: int) -> None:
        """Forward and backward, in which everything but the resident records needs ``others`` bytes."""
        self.others = max(self.others, others)
        now, _ = self.reserved()
        assert now <= self.available(), "out of memory"


class Steps:
    """A budget that is obeyed, on a device of 80 bytes with a margin of 4."""

    def __init__(self, state: int = 1 << 40, total: int = 80, margin: int = 4) -> None:
        self.allocator, self.state, self.held = Allocator(total, margin), state, 0
        self.budget = AutoBudget(self.allocator)
        self.allocator.held = lambda: self.held

    def run(self, others: int, steps: int = 1) -> list[int]:
        found = []
        for _ in range(steps):
            self.allocator.iteration(others)
            allowed = min(self.budget.before_step(self.held), self.state)
            if allowed != self.held:
                self.held = allowed
                self.allocator.reserved()
                self.budget.changed()
            found.append(self.held)
        return found

    def set_the_peak_back(self) -> None:
        self.allocator.highest = 0

    def others_give_back(self) -> None:
        self.allocator.others = 0

    def release(self) -> None:
        """And the engine that got the memory keeps some of it."""
        self.held = 0
        self.budget.remeasure()
        self.allocator.elsewhere = 10


BUDGETS: dict[str, tuple[int, list[Any]]] = {
    "what others leave less the margin": (1 << 40, [(40, [0, 0, 36, 36, 36, 36])]),
    "a peak that grows once takes its share once": (
        1 << 40,
        [
            (40, [0, 0, 36, 36]),
            (41, [36] * 3),  # half of the margin is still there
            (43, [33] * 5),
            Steps.set_the_peak_back,
            (43, [33] * 2),
            (46, [30] * 3),
        ],
    ),
    "a state that fits as a whole stays": (20, [(40, [0, 0, 20, 20]), (55, [20] * 3), (59, [17] * 3)]),
    "others need everything": (1 << 40, [(77, [0] * 5)]),
    "others need it again": (1 << 40, [(40, [0, 0, 36, 36]), Steps.others_give_back, (44, [32])]),
    "measured again after a release": (1 << 40, [(40, [0, 0, 36, 36]), Steps.release, (40, [26] * 3)]),
}
"""The bytes of state, what others need in steps that follow each other, and what then stays."""


@pytest.mark.parametrize("name", BUDGETS)
def test_the_budget(name: str) -> None:
    state, moves = BUDGETS[name]
    steps = Steps(state)
    for move in moves:
        if callable(move):
            move(steps)
        else:
            assert steps.run(move[0], len(move[1])) == move[1], move


def auto(monkeypatch: pytest.MonkeyPatch, allocator: Allocator | None, time: str = "at_step") -> Training:
    monkeypatch.setattr("lightstep.state.store.device_memory", lambda device: allocator)
    training = Training({**TIMES[time], "resident_gib": "auto"})
    if allocator is not None:
        allocator.held = lambda: held(training)
    return training


@pytest.mark.parametrize("time", TIMES)
def test_auto_takes_what_is_spare_and_gives_back_what_is_needed(time: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(20_000, 3000)
    allocator.others = 8000
    training = auto(monkeypatch, allocator, time)
    wanted = Training({"backend": "resident"})
    for _ in range(AutoBudget.first_steps):
        training.train(1)
        assert held(training) == 0, "the first iterations are watched"
    training.delays(0)
    training.train(1)
    first = held(training)
    assert 0 < first <= 9000
    training.train(2)
    assert held(training) == first
    allocator.others += 9000 - first + 2000
    training.train(1)
    second = held(training)
    assert 0 < second <= 9000 - (9000 - first + 2000)
    training.optimizer.release_device_memory()
    assert held(training) == 0
    training.train(2)
    assert held(training) == second, "it comes back by itself"
    training.optimizer.set_residency(0)
    training.train(1)
    training.optimizer.set_residency("auto")
    training.train(3)
    assert held(training) == second
    wanted.train(training.steps)
    assert_same(training.snapshot(), wanted.snapshot())


def test_auto_is_nothing_where_nothing_is_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    training = auto(monkeypatch, Allocator(1000, 1001))
    training.train(6)
    assert held(training) == 0
    plain = Training({**STREAM, "resident_gib": "auto"})
    plain.train(6)
    assert held(plain) == 0, "a CPU has no device memory of its own"


class Room:
    """Device buffers for so many records, and then no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, records: int, allocator: Allocator) -> None:
        self.real, self.left, self.refused, self.allocator = residency.Slot, records, 0, allocator
        monkeypatch.setattr(residency, "Slot", self)

    def __call__(self, nbytes: int, lanes: Any) -> Any:
        self.allocator.reserved()
        if self.left == 0:
            self.refused += 1
            raise torch.OutOfMemoryError("no room")
        self.left -= 1
        return self.real(nbytes, lanes)


@every_value(gib=[1.0, "auto"], time=TIMES)
def test_no_room_after_all(
    time: str, gib: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = Allocator(1 << 30, 1)
    room = Room(monkeypatch, 3, allocator)
    training = auto(monkeypatch, allocator, time)
    training.optimizer.set_residency(gib)
    wanted = Training({"backend": "resident"})
    assert training.train(7) == wanted.train(7)
    assert len(resident_buffers(training)) == 2, "the margin is free again"
    assert room.refused == 1, "it is not tried again in every step"
    budget = training.optimizer._backend._residency._budget
    assert gib == 1.0 or budget._other_bytes == allocator.others, "what was tried and given back is not counted"
    (said,) = [record.message for record in caplog.records if "resident_gib" in record.message]
    assert said.endswith(f"cpu has no room for more than {held(training) / GIB:.2f} GiB; that much stays on it")
    assert_same(training.snapshot(), wanted.snapshot())


# -- records at the backend


def resident(**settings: Any) -> Store:
    return stores.stream(ring_mib=0.02, **{"resident_gib": 1.0, **settings})


@every_value(gib=[4 * KIB, 1.0], which=[1, 3, 6])
def test_the_neighbours_of_what_is_edited_keep_what_only_the_device_has(which: int, gib: float) -> None:
    """Nothing is read before: the edit itself has to bring the record down. Other edits: ``test_programs.py``."""

    def remove(run: Run) -> None:
        run.backend.load(run.items[which], {})
        run.items[which].updated = False

    def negative(run: Run) -> None:
        """Its signs cannot carry the masters' bits: the record gets larger."""
        ones = torch.ones(run.items[which].local.shape)
        run.backend.load(run.items[which], {"step": torch.tensor(4.0), "exp_avg": ones, "exp_avg_sq": -ones})
        run.items[which].local.fill_(0.5)
        run.backend.refresh(run.items[which])

    for edit, left_out in ((remove, ()), (negative, {which})):
        tested, expected = Run(resident(resident_gib=gib)), Run(stores.resident())
        for run in (tested, expected):
            run.steps(0, 2)
            edit(run)
            run.step(2, without=left_out)
            run.step(3, without=left_out)
        assert_same_run(tested, expected, edit.__name__)


def test_a_failure_while_records_come_up_leaves_the_others_whole() -> None:
    tested, expected = Run(resident()), Run(stores.resident())
    for run in (tested, expected):
        run.steps(0, 3)
    state, weight = expected.entries()[3], expected.items[3].local
    tested.backend.release_device_memory()
    tested.backend.lanes.delay = failing(HOST_TO_DEVICE)
    tested.backend.prepare()
    with pytest.raises(LaneError, match=r"fetching .* failed"):
        tested.backend.synchronize()
    tested.backend.lanes.delay = None
    tested.items[3].local.copy_(weight)
    tested.backend.load(tested.items[3], state)
    for run in (tested, expected):
        run.steps(3, 6)
    assert_same_run(tested, expected)


@pytest.mark.parametrize("gib", SIZES[1:])
def test_resident_state_that_grows_in_a_step(gib: float) -> None:
    tested, expected = (
        Run(backend, Growing, {"lr": 1e-2}) for backend in (resident(resident_gib=gib), stores.resident())
    )
    for number in range(7):
        without = {2, 4} if number in (0, 3) else {1} if number == 4 else ()
        tested.step(number, without=without)
        expected.step(number, without=without)
        assert_same_run(tested, expected, f"step {number}")
    assert 0 < tested.backend.memory()["device_bytes"] <= gib * GIB


def test_the_ring_is_for_those_that_travel() -> None:
    run, expected = Run(resident(resident_gib=0)), Run(stores.resident())
    run.steps(0, 2)
    slots = len(run.backend._ring.slots)
    run.backend.set_residency(1.0)
    run.step(2)
    assert slots > 0
    assert run.backend._ring.slots == []
    run.backend.set_residency(0)
    run.step(3)
    assert len(run.backend._ring.slots) == slots
    expected.steps(0, 4)
    assert_same_run(run, expected)


def test_a_copy_of_the_optimizer_keeps_the_size() -> None:
    training = Training(STREAM)
    training.train(2)
    training.optimizer.set_residency(5 * KIB)
    assert copy.deepcopy(training.optimizer)._backend._settings["resident_gib"] == 5 * KIB


# -- device memory that is lent


@pytest.mark.parametrize(
    ("state", "where", "message"),
    [
        ({"backend": "resident"}, "lightstep.optimizer.update.GradientStage.reserve", "the engine has it"),
        (STREAM, "lightstep.optimizer.update.GradientStage.reserve", "the engine has it"),
        (TIMES["next_forward"], "lightstep.optimizer.update.GradientStage.reserve", "the engine has it"),
        ({**STREAM, "update": "overlap"}, "lightstep.optimizer.update.Norms.norm", "the engine has it"),
        ({"backend": "resident"}, "lightstep.optimizer.update.Norms.norm", "the engine has it"),
        ({**STREAM, "resident_gib": 5 * KIB}, "lightstep.state.ring.Slot", "no room on cpu for a ring"),
        ({"backend": "bulk"}, "lightstep.state.ring.Ring._allocate", "no room on cpu for all optimizer state"),
    ],
)
def test_a_device_that_is_still_full_leaves_the_step_undone(
    state: dict[str, Any], where: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, expected = Training(state), Training(state)
    training.train(3)
    expected.train(3)
    training.optimizer.release_device_memory()
    for one in (training, expected):
        one.optimizer.backward(one.loss(0))

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("the engine has it")

    with monkeypatch.context() as patch:
        patch.setattr(where, full)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match=message):
                training.optimizer.step()
    for one in (training, expected):
        one.optimizer.step()
        one.train(1)
    assert_same(training.snapshot(), expected.snapshot())


@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
def test_state_of_resident_is_read_on_the_host(parameters: str) -> None:
    training, expected = (Training({"backend": "resident"}, parameters) for _ in range(2))
    training.train(3)
    expected.train(3)
    before = training.optimizer.memory_report()
    training.optimizer.release_device_memory()
    training.optimizer.release_device_memory()
    report = training.optimizer.memory_report()
    assert report["device_bytes"] == 0
    assert report["host_bytes"] >= before["device_bytes"]
    assert_same(training.snapshot(), expected.snapshot())
    copy.deepcopy(training.optimizer)
    assert training.optimizer.memory_report()["device_bytes"] == 0, "nobody has brought it back"
    assert training.train(3) == expected.train(3)
    training.optimizer.release_device_memory()
    assert training.optimizer.memory_report()["host_bytes"] == report["host_bytes"], "the same host memory"


def test_too_little_host_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    training, expected = (Training({"backend": "resident"}) for _ in range(2))
    training.train(2)
    monkeypatch.setenv(CHECK_VARIABLE, "0.000001")
    with pytest.raises(HostMemoryError, match="releasing device memory: the optimizer state on the host: "):
        training.optimizer.release_device_memory()
    assert training.train(2) == expected.train(4)[2:]
    assert_same(training.snapshot(), expected.snapshot())


@pytest.mark.parametrize("backend", ["resident", "bulk", "stream"])
def test_nobody_holds_on_to_staging_memory_that_was_released(backend: str) -> None:
    training = Training({"backend": backend})
    training.train(2)
    (staging,) = training.optimizer._backend._staging.values()
    buffers = [
        StorageWeakRef(one.untyped_storage()) for one in (staging.masters, *staging._rows.values()) if one.numel()
    ]
    assert buffers
    training.optimizer.release_device_memory()
    assert all(buffer.expired() for buffer in buffers)


# -- bad input


@pytest.mark.parametrize("gib", [-1, float("nan"), float("inf"), "all", None, True])
def test_sizes_that_are_none(gib: Any) -> None:
    training = Training(STREAM)
    with pytest.raises(ValueError, match="a number of GiB of at least 0 is needed, or 'auto'"):
        training.optimizer.set_residency(gib)


def test_other_backends_have_no_choice() -> None:
    training = Training({"backend": "resident"})
    training.train(1)
    with pytest.raises(ValueError, match=r"backend is resident.*backend stream does"):
        training.optimizer.set_residency(1)
    with pytest.raises(ConfigError, match=r"resident_gib 2\.0 is the part of backend stream's state"):
        Strategy.load("bulk", overrides={"optimizer_state.resident_gib": 2})
    with pytest.raises(ConfigError, match="resident_gib"):
        Strategy.load("stream", overrides={"optimizer_state.resident_gib": "most"})

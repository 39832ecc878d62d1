"""State that stays on the GPU, and GPU memory that is given back for a while: the same bits, and the memory is free."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightstep.state import spare_memory
from lightstep.state.spare_memory import GIB, AutoBudget
from tests import stores
from tests.gpu import test_stream_gpu as layers_module
from tests.gpu.test_next_forward_gpu import Training, llama, train
from tests.gpu.test_stream_gpu import Layers, streamed
from tests.unit import test_next_forward as on_cpu
from tests.unit.test_next_forward import assert_same

pytestmark = pytest.mark.gpu

MIB = 1 << 20
TIMES = {"at_step": {}, "next_forward": {"update": "next_forward"}}
ALL = 8.0  # GiB; the Llama has 240 MiB of state


@pytest.fixture(autouse=True)
def clean_allocator() -> Iterator[None]:
    """What earlier tests left is neither in the way nor counted; a limit that a test sets ends with it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def limit_to(nbytes: int) -> None:
    """The process can have no more device memory than this."""
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)


def on_resident(steps: int) -> list[float]:
    _, model, optimizer = llama({"backend": "resident"})
    losses = torch.stack(train(model, optimizer, range(steps))).tolist()
    optimizer.close()
    del model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return losses


# ---- the same bits
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", [20 * MIB / GIB, 60 * MIB / GIB, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_twenty_steps_equal_resident(dtype: torch.dtype, gib: float) -> None:
    tested, expected = Layers(streamed(resident_gib=gib), dtype=dtype), Layers(stores.resident(), dtype=dtype)
    for number in range(20):
        tested.step(number)
        expected.step(number)
        if number % 7 == 0:
            layers_module.assert_same(tested, expected, f"step {number}")
    assert 0 < tested.optimizer.memory_report()["device_bytes"] <= gib * GIB
    layers_module.assert_same(tested, expected)


@pytest.mark.parametrize("kib", [4, 9, 1000])
@pytest.mark.parametrize("time", TIMES)
def test_sleep_kernels_in_every_lane(time: str, kib: int) -> None:
    expected = Training({"backend": "resident"})
    losses, wanted = expected.train(6), expected.snapshot()
    state = {"backend": "stream", "ring_mib": 0.02, "resident_gib": kib * 1024 / GIB, **TIMES[time]}
    for seed in range(10):
        Training(state).assert_bits(losses, wanted, seed, before=2)


@pytest.mark.parametrize("time", TIMES)
def test_sizes_that_change_and_memory_that_is_released(time: str) -> None:
    def between(training: Any) -> None:
        if training.optimizer._backend.name == "stream":
            training.optimizer.set_residency([0, 4, 1000][training.steps % 3] * 1024 / GIB)
        if training.steps % 2:
            training.optimizer.release_device_memory()

    expected = Training({"backend": "resident"})
    wanted = on_cpu.run(expected, None, 6, between)
    for seed in range(4):
        tested = Training({"backend": "stream", "ring_mib": 0.02, **TIMES[time]})
        assert on_cpu.run(tested, seed, 6, between) == wanted
        assert_same(tested.snapshot(), expected.snapshot())
        tested.optimizer.close()


# ---- what a steady step does not do
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", [128 * MIB / GIB, ALL, "auto"])
@pytest.mark.parametrize("time", TIMES)
def test_a_steady_step_neither_waits_nor_takes_memory(time: str, gib: Any) -> None:
    expected = on_resident(14)
    state = {"backend": "stream", "ring_mib": 64, "resident_gib": gib, **TIMES[time]}
    _, model, optimizer = llama(state)
    losses = train(model, optimizer, range(6))
    assert optimizer.memory_report()["device_bytes"] > 64 * MIB
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    losses += train(model, optimizer, range(6, 14), watch=True)
    optimizer.synchronize()
    assert torch.stack(losses).tolist() == expected
    assert torch.cuda.memory_allocated() - before <= 8 * 1024  # the losses
    optimizer.close()


# ---- memory that is lent
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"backend": "resident"},
        {"backend": "stream", "ring_mib": 64},
        {"backend": "stream", "ring_mib": 64, "resident_gib": ALL, "update": "next_forward"},
    ],
    ids=str,
)
def test_released_memory_is_free_and_comes_back(state: dict[str, Any]) -> None:
    expected = on_resident(8)
    at_first = torch.cuda.memory_allocated()
    _, model, optimizer = llama(state)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    losses = train(model, optimizer, range(5))
    for first, last in ((5, 6), (6, 8)):
        held = torch.cuda.memory_reserved()
        optimizer.release_device_memory()
        others = torch.cuda.memory_allocated() - at_first - weights
        assert others < 4 * MIB, "no state, no masters, no ring, no stage"
        assert torch.cuda.memory_reserved() < held
        state_dict = optimizer.state_dict()
        assert torch.cuda.memory_allocated() - at_first - weights < 4 * MIB, "reading does not bring it back"
        assert len(state_dict["state"]) == len(list(model.parameters()))
        losses += train(model, optimizer, range(first, last))
    assert torch.stack(losses).tolist() == expected
    optimizer.close()


def test_copies_of_state_stay_where_they_were_read() -> None:
    tested, expected = Layers(stores.resident()), Layers(stores.resident())
    for number in range(3):
        tested.step(number)
        expected.step(number)
    taken = dict(tested.optimizer.state[tested.params[0]])
    wanted = {key: value.clone() for key, value in taken.items()}
    tested.optimizer.release_device_memory()
    assert {value.device.type for value in taken.values()} == {"cuda"}
    assert all(torch.equal(value, wanted[key]) for key, value in taken.items())
    for number in range(3, 6):
        tested.step(number)
        expected.step(number)
    layers_module.assert_same(tested, expected)


@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_a_device_that_is_still_full_leaves_the_step_undone(backend: str) -> None:
    def build() -> Layers:
        return Layers(stores.resident() if backend == "resident" else streamed(resident_gib=60 * MIB / GIB))

    tested, expected = build(), Layers(stores.resident())
    for number in range(4):
        expected.step(number)
    for number in range(3):
        tested.step(number)
    tested.optimizer.release_device_memory()
    tested.set_gradients(3)
    limit_to(torch.cuda.memory_reserved() + 4 * MIB)
    others = []
    with contextlib.suppress(torch.OutOfMemoryError):  # what is cached and free
        while True:
            others.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            tested.optimizer.step()
        assert all(p.grad is not None for p in tested.params)
    torch.cuda.set_per_process_memory_fraction(1.0)
    others.clear()
    tested.optimizer.step()
    layers_module.assert_same(tested, expected)


# ---- auto
# ----------------------------------------------------------------------------------------------------------------------


def small_margin(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    real = spare_memory._CudaMemory.__init__

    def init(self: Any, device: torch.device) -> None:
        real(self, device)
        self.margin = nbytes

    monkeypatch.setattr(spare_memory._CudaMemory, "__init__", init)


def test_auto_takes_what_is_spare() -> None:
    expected = on_resident(8)
    _, model, optimizer = llama({"backend": "stream", "ring_mib": 64, "resident_gib": "auto"})
    losses = train(model, optimizer, range(8))
    assert torch.stack(losses).tolist() == expected
    report = optimizer.memory_report()
    assert report["device_bytes"] == pytest.approx(report["host_bytes"], rel=0.05), "there is room for all of it here"
    optimizer.close()


@pytest.mark.parametrize("time", TIMES)
def test_auto_fits_into_what_there_is_and_follows_what_others_need(time: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_resident(20)
    small_margin(monkeypatch, 128 * MIB)
    _, model, optimizer = llama({"backend": "stream", "ring_mib": 64, "resident_gib": "auto", **TIMES[time]})
    losses = train(model, optimizer, range(AutoBudget.first_steps))
    assert optimizer.memory_report()["device_bytes"] == 0
    limit_to(torch.cuda.max_memory_reserved() + 128 * MIB + 200 * MIB)
    losses += train(model, optimizer, range(3, 8))
    first = optimizer.memory_report()["device_bytes"]
    assert 0 < first <= 200 * MIB
    hog = torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
    losses += train(model, optimizer, range(8, 14))
    second = optimizer.memory_report()["device_bytes"]
    assert 0 < second < first
    torch.cuda.reset_peak_memory_stats()
    losses += train(model, optimizer, range(14, 20))
    assert optimizer.memory_report()["device_bytes"] == second, "once"
    assert torch.stack(losses).tolist() == expected
    del hog
    optimizer.close()


@pytest.mark.parametrize("gib", [ALL, "auto"])
def test_a_device_that_proves_too_small_raises_nothing(
    gib: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = on_resident(12)
    small_margin(monkeypatch, 48 * MIB)
    monkeypatch.setattr(spare_memory._CudaMemory, "available", lambda self: 64 * GIB)  # it is mistaken
    _, model, optimizer = llama({"backend": "stream", "ring_mib": 64})
    losses = train(model, optimizer, range(3))
    limit_to(torch.cuda.max_memory_reserved() + 160 * MIB)
    optimizer.set_residency(gib)
    losses += train(model, optimizer, range(3, 12))
    assert torch.stack(losses).tolist() == expected
    assert 0 < optimizer.memory_report()["device_bytes"] <= 160 * MIB
    assert len([one for one in caplog.records if "has no room for more than" in one.message]) == 1
    torch.cuda.synchronize()  # no error is left behind
    optimizer.close()


def test_asking_how_much_is_in_use_waits_for_nothing() -> None:
    memory = spare_memory.device_memory(torch.device("cuda", 0))
    assert memory is not None
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    done.record()
    now, peak = memory.reserved()
    assert not done.query()
    assert 0 <= now <= peak
    assert now == torch.cuda.memory_reserved()
    assert peak == torch.cuda.max_memory_reserved()
    assert memory.available() <= torch.cuda.get_device_properties(0).total_memory
    assert memory.margin >= GIB
    torch.cuda.synchronize()

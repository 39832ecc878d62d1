"""State that stays on the GPU, and GPU memory that is given back for a while: the same bits, and the memory is free."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightstep.state.residency import GIB
from tests.gpu.test_next_forward_gpu import Training, llama, train
from tests.unit import test_next_forward as on_cpu
from tests.unit.test_next_forward import assert_same

pytestmark = pytest.mark.gpu

MIB = 1 << 20
TIMES = {"at_step": {}, "next_forward": {"update": "next_forward"}}


@pytest.mark.parametrize("kib", [4, 9, 1000])
@pytest.mark.parametrize("time", TIMES)
def test_sleep_kernels_in_every_lane(time: str, kib: int) -> None:
    expected = Training({"backend": "resident"})
    losses, wanted = expected.train(6), expected.snapshot()
    state = {"backend": "stream", "ring_mib": 0.02, "resident_gib": kib * 1024 / GIB, **TIMES[time]}
    for seed in range(10):
        tested = Training(state)
        found = tested.train(2)
        tested.delays(seed)
        assert found + tested.train(4) == losses, seed
        assert_same(tested.snapshot(), wanted)
        tested.optimizer.close()


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


@pytest.mark.parametrize("time", TIMES)
def test_a_steady_step_neither_waits_nor_takes_memory(time: str) -> None:
    _, model, resident = llama({"backend": "resident"})
    expected = torch.stack(train(model, resident, range(12))).tolist()
    state = {"backend": "stream", "ring_mib": 64, "resident_gib": 128 * MIB / GIB, **TIMES[time]}
    _, model, optimizer = llama(state)
    losses = train(model, optimizer, range(4))
    assert 64 * MIB < optimizer.memory_report()["device_bytes"] <= 128 * MIB
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    losses += train(model, optimizer, range(4, 12), watch=True)
    optimizer.synchronize()
    assert torch.stack(losses).tolist() == expected
    assert torch.cuda.memory_allocated() - before <= 8 * 1024  # the losses
    optimizer.close()


@pytest.mark.parametrize(
    "state",
    [
        {"backend": "resident"},
        {"backend": "stream", "ring_mib": 64},
        {"backend": "stream", "ring_mib": 64, "resident_gib": 1.0, "update": "next_forward"},
    ],
)
def test_released_memory_is_free_and_comes_back(state: dict[str, Any]) -> None:
    _, model, untouched = llama({"backend": "resident"})
    expected = torch.stack(train(model, untouched, range(8))).tolist()
    untouched.close()
    del untouched, model
    gc.collect()
    before = torch.cuda.memory_allocated()
    _, model, optimizer = llama(state)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    losses = train(model, optimizer, range(5))
    held = torch.cuda.memory_reserved()
    optimizer.release_device_memory()
    assert torch.cuda.memory_reserved() < held
    assert torch.cuda.memory_allocated() - before < weights + 2 * MIB, "no state, no masters, no ring, no stage"
    losses += train(model, optimizer, range(5, 8))
    assert torch.stack(losses).tolist() == expected
    optimizer.close()


def test_auto_takes_what_is_spare() -> None:
    _, model, resident = llama({"backend": "resident"})
    expected = torch.stack(train(model, resident, range(8))).tolist()
    _, model, optimizer = llama({"backend": "stream", "ring_mib": 64, "resident_gib": "auto"})
    losses = train(model, optimizer, range(8))
    assert torch.stack(losses).tolist() == expected
    report = optimizer.memory_report()
    assert report["device_bytes"] == pytest.approx(report["host_bytes"], rel=0.05), "there is room for all of it here"


def test_auto_never_takes_the_last_gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, optimizer = llama({"backend": "stream", "ring_mib": 64, "resident_gib": "auto"})
    real: Callable[..., tuple[int, int]] = torch.cuda.mem_get_info
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (GIB + 40 * MIB, 16 * GIB))
    train(model, optimizer, range(8))
    assert 0 < optimizer.memory_report()["device_bytes"] <= 40 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (GIB - 30 * MIB, 16 * GIB))
    train(model, optimizer, range(8, 11))
    assert optimizer.memory_report()["device_bytes"] <= 10 * MIB
    assert real(0)[0] > 0

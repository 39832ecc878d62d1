"""State that stays on the device, as much of it as is wanted: the same bits, fewer bytes through the lanes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightstep.config import ConfigError
from lightstep.state import residency
from lightstep.state import units as units_module
from lightstep.state.residency import GIB, AutoBudget
from lightstep.strategy.base import Strategy
from tests.unit.test_next_forward import Skipping, Training, assert_same, look, run, skip_layers

STREAM = {"backend": "stream", "ring_mib": 0.02}
TIMES = {"at_step": STREAM, "next_forward": {**STREAM, "update": "next_forward"}}
KIB = 1024 / GIB
SIZES = [4 * KIB, 9 * KIB, 1.0]
"""GiB: some records, more of them, all (a tiny model has about 15 KiB of state)."""


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tiny tensors as large ones are cut."""
    monkeypatch.setattr(units_module, "CUT_ELEMENTS", 64)


def held(training: Training) -> int:
    return training.optimizer.memory_report()["device_bytes"]


@pytest.mark.parametrize("gib", SIZES)
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("parameters", ["bfloat16", "float16", "float32"])
def test_the_same_bits_whatever_stays(parameters: str, time: str, gib: float) -> None:
    expected = Training({"backend": "resident"}, parameters)
    losses, wanted = expected.train(6), expected.snapshot()
    for seed in range(12):
        tested = Training({**TIMES[time], "resident_gib": gib}, parameters)
        found = tested.train(2)
        tested.delays(seed)
        assert found + tested.train(4) == losses, seed
        assert 0 < held(tested) <= gib * GIB
        assert_same(tested.snapshot(), wanted)
        tested.optimizer.close()


@pytest.mark.parametrize("name", ["Adam-amsgrad", "SGD-momentum", "Adagrad", "NAdam"])
def test_state_of_all_kinds(name: str) -> None:
    classes: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "Adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}),
        "SGD-momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "Adagrad": (torch.optim.Adagrad, {}),
        "NAdam": (torch.optim.NAdam, {}),
    }
    optimizer_class, settings = classes[name]
    kind = type(name, (optimizer_class,), {"__init__": _with(optimizer_class, settings)})
    found = []
    for state in ({"backend": "resident"}, {**STREAM, "resident_gib": 5 * KIB}):
        training = Training(state, make=Skipping, optimizer_class=kind)
        found.append((run(training, None, 5, skip_layers), training.snapshot()))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


def _with(optimizer_class: type[torch.optim.Optimizer], settings: dict[str, Any]) -> Callable[..., None]:
    def __init__(self: Any, params: Any, lr: Any = 1e-2, betas: Any = None, weight_decay: float = 0.0) -> None:
        optimizer_class.__init__(self, params, lr=lr, weight_decay=weight_decay, **settings)

    return __init__


def copied_bytes(training: Training, steps: int) -> int:
    """Bytes that cross the link in both directions."""
    total = 0
    lanes = training.optimizer._backend.lanes
    real = {lane: lane.run for lane in (lanes.host_to_device, lanes.device_to_host)}
    for lane in real:

        def counting(job: Callable[[], object], label: str = "", lane: Any = lane) -> None:
            nonlocal total
            total += next(r.nbytes for r in training.optimizer._backend._records.values() if r.unit.label in label)
            real[lane](job, label)

        lane.run = counting
    training.train(steps)
    training.optimizer.synchronize()
    for lane in real:
        del lane.run
    return total


def test_what_stays_does_not_travel() -> None:
    everything = None
    for gib in (0, *SIZES):
        training = Training({**STREAM, "resident_gib": gib})
        training.train(3)
        state = sum(record.nbytes for record in training.optimizer._backend._records.values())
        travelled = copied_bytes(training, 4)
        everything = everything or travelled
        assert travelled == 2 * 4 * (state - held(training))
        assert travelled == everything - 2 * 4 * held(training)


def resize(training: Training) -> Any:
    training.optimizer.set_residency(SIZES[training.steps % 3] if training.steps % 4 else 0)
    return None


def release(training: Training) -> Any:
    training.optimizer.release_device_memory()
    report = training.optimizer.memory_report()
    if training.optimizer._backend.name == "stream":
        assert report["device_bytes"] == 0
        assert report["ring_bytes"] == 8 * sum(len(r.parts) for r in training.optimizer._backend._records.values())
        assert report["gradient_stage_bytes"] == 0
    return None


def save_and_load(training: Training) -> None:
    weights, state = copy.deepcopy(training.model.state_dict()), training.optimizer.state_dict()
    training.step()
    training.steps -= 1
    training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(state)


def edit(training: Training) -> None:
    """Weights and one entry of the state."""
    training.optimizer.synchronize()
    parameter = training.model.head.weight
    with torch.no_grad():
        parameter.add_(0.125)
    entries = training.optimizer.state[parameter]
    entries["exp_avg"] = torch.as_tensor(entries["exp_avg"]) * 0.5


def read(training: Training) -> dict[str, Tensor]:
    return training.snapshot()


def copies(training: Training) -> Any:
    state = copy.deepcopy(training.optimizer).state_dict()["state"]
    return {f"{k}/{key}": torch.as_tensor(v).tolist() for k, entries in state.items() for key, v in entries.items()}


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("between", [resize, release, look, save_and_load, edit, read, copies])
def test_whatever_happens_between_steps(between: Callable[[Training], Any], time: str) -> None:
    def on_resident(training: Training) -> Any:
        return None if between is resize else between(training)

    expected = Training({"backend": "resident"})
    wanted = run(expected, None, 6, on_resident)
    for seed in range(4):
        tested = Training({**TIMES[time], "resident_gib": SIZES[seed % 2]})
        found = run(tested, seed, 6, between)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            if isinstance(one, dict) and isinstance(next(iter(one.values())), Tensor):
                assert_same(one, other)
            else:
                assert one == other, seed
        assert_same(tested.snapshot(), expected.snapshot())
        tested.optimizer.close()


def test_resuming_with_other_sizes(tmp_path: Path) -> None:
    expected = Training({"backend": "resident"})
    expected.train(6)
    first = Training({**STREAM, "resident_gib": 6 * KIB})
    first.train(3)
    first.strategy.save_checkpoint(tmp_path / "checkpoint", first.model, first.optimizer)
    second = Training({**TIMES["next_forward"], "resident_gib": 1.0})
    second.strategy.load_checkpoint(tmp_path / "checkpoint", second.model, second.optimizer)
    second.steps = 3
    second.train(3)
    assert held(second) > 0
    assert_same(second.snapshot(), expected.snapshot())


def test_over_the_budget_leaves_at_once() -> None:
    training = Training({**STREAM, "resident_gib": 1.0})
    training.train(3)
    everything = held(training)
    training.optimizer.set_residency(5 * KIB)
    assert 0 < held(training) <= 5 * 1024 < everything
    training.optimizer.set_residency(0)
    assert held(training) == 0


def test_a_steady_step_changes_no_buffer() -> None:
    training = Training({**STREAM, "resident_gib": 6 * KIB})
    training.train(3)
    slots = dict(training.optimizer._backend._residency._slots)
    buffers = {record: slot.buffer.data_ptr() for record, slot in slots.items()}
    training.train(3)
    now = training.optimizer._backend._residency._slots
    assert {record: slot.buffer.data_ptr() for record, slot in now.items()} == buffers and buffers


# -- auto


def auto(monkeypatch: pytest.MonkeyPatch, spare: Callable[[], int]) -> Training:
    monkeypatch.setattr("lightstep.state.stream.AutoBudget", lambda: AutoBudget(lambda device: spare()))
    return Training({**STREAM, "resident_gib": "auto"})


def test_auto_takes_what_is_spare_and_gives_back_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = [9 * 1024]
    training = auto(monkeypatch, lambda: spare[0])
    wanted = Training({"backend": "resident"})
    for _ in range(AutoBudget.first_steps):
        training.train(1)
        assert held(training) == 0, "the first iterations are measured"
    training.train(1)
    first = held(training)
    assert 0 < first <= 9 * 1024
    spare[0] = 100
    training.train(2)
    assert held(training) == first, "steady while the margin holds, and no larger"
    spare[0] = -2000
    training.train(1)
    spare[0] = 0
    training.train(1)
    assert 0 < held(training) <= first - 2000
    wanted.train(training.steps)
    assert_same(training.snapshot(), wanted.snapshot())


def test_auto_is_nothing_where_nothing_is_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    training = auto(monkeypatch, lambda: -1)
    training.train(5)
    assert held(training) == 0
    plain = Training({**STREAM, "resident_gib": "auto"})
    plain.train(5)
    assert held(plain) == 0, "a CPU has no device memory of its own"


def test_no_room_after_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real, left = residency.Slot, [2]

    def slot(nbytes: int, lanes: Any) -> Any:
        if left[0] == 0:
            raise torch.OutOfMemoryError("no room")
        left[0] -= 1
        return real(nbytes, lanes)

    monkeypatch.setattr(residency, "Slot", slot)
    training = Training({**STREAM, "resident_gib": 1.0})
    wanted = Training({"backend": "resident"})
    assert training.train(5) == wanted.train(5)
    assert len(training.optimizer._backend._residency._slots) == 2
    (said,) = [record.message for record in caplog.records if "resident_gib" in record.message]
    assert said.endswith(f"no room on cpu for more than {held(training) / GIB:.2f} GiB; that much stays on it")
    assert_same(training.snapshot(), wanted.snapshot())


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


def test_a_closed_optimizer() -> None:
    training = Training(STREAM)
    training.train(1)
    training.optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        training.optimizer.release_device_memory()
    with pytest.raises(RuntimeError, match="closed"):
        training.optimizer.set_residency(1)

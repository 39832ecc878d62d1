"""Flat units: many parameters as one for element-wise classes, with torch's own bits and step counts for each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from lightstep.state import segment as segment_module
from lightstep.state.store import Store
from tests import stores
from tests.covering import every_pair, every_value
from tests.reference.lion import Lion
from tests.unit.test_stream import Run


class Adding(torch.optim.Optimizer):
    """Every element gets a number, also those between the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                total: Tensor = self.state[p].setdefault("total", torch.zeros_like(p))
                total.add_(p.grad).add_(1)
                p.add_(total, alpha=0.01)


SHAPES: list[tuple[int, ...]] = [(16, 8), (32,), (5, 7), (64, 3), (), (0, 4), (48,), (33,), (16,), (4, 4, 4)]
MAKERS: dict[str, Callable[[], Store]] = {
    "resident": stores.resident,
    "bulk": stores.bulk,
    "stream": lambda: stores.stream(ring_mib=1),
}
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW-tensor-lr": (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
    "Adam-amsgrad-maximize": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "SGD-momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "Lion": (Lion, {"lr": 1e-3}),
    "padding is written to": (Adding, {}),
}
WAYS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
LATE: dict[int, set[int]] = {0: {1, 6}, 1: {1}, 3: {0, 8}, 5: set(range(10))}


class Textbook:
    """torch's class on fp32 masters, one by one."""

    def __init__(self, run: Run, optimizer_class: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> None:
        self.run, self.weights = run, [item.local.clone() for item in run.items]
        self.masters = [weight.float().requires_grad_() for weight in self.weights]
        asked = {"fused", "foreach"} & hyperparameters.keys()
        fused = run.arithmetic._default_fused[torch.device("cpu")] and not asked
        self.optimizer = optimizer_class(self.masters, **hyperparameters, **({"fused": True} if fused else {}))

    def step(self, number: int, without: Collection[int]) -> None:
        gradients = self.run.gradients(number, without)
        for item, master in zip(self.run.items, self.masters, strict=True):
            master.grad = gradients[item].clone() if item in gradients else None
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

    def assert_same(self, where: str) -> None:
        entries = self.run.entries()
        for number, (item, weight, master) in enumerate(zip(self.run.items, self.weights, self.masters, strict=True)):
            assert torch.equal(item.local, weight), f"{where}: weight {number}"
            state = self.optimizer.state.get(master, {}) if item.updated else {}
            for key, value in state.items():
                found = entries[number][key]
                assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), f"{where}: {key} of {number}"
            if state and not item.own_master:
                assert torch.equal(entries[number]["master"], master), f"{where}: master {number}"


@every_pair(name=CLASSES, way=WAYS, backend=MAKERS, dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_every_class_gives_torchs_bits(
    name: str, way: str, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parameters that have no gradient in some steps; gaps between parameters where no kernel is fused."""
    optimizer_class, hyperparameters = CLASSES[name]
    if name not in ("Lion", "AdamW-tensor-lr", "padding is written to"):  # they have no choice
        hyperparameters = {**hyperparameters, **WAYS[way]}
    if way != "default":
        monkeypatch.setattr(segment_module, "CPU_VECTOR", 1)
    made = MAKERS[backend]()
    run = Run(made, optimizer_class, hyperparameters, dtype=dtype, shapes=SHAPES, layers=[0] * len(SHAPES))
    textbook = Textbook(run, optimizer_class, hyperparameters)
    for number in range(8):
        without = LATE.get(number, set()) if optimizer_class is not torch.optim.SGD else set()  # torch's fails
        assert run.backend.changed(run.items) == []
        run.step(number, without=without)
        textbook.step(number, without)
        textbook.assert_same(f"step {number}")
    made.close()


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


@pytest.mark.parametrize("backend", list(MAKERS))
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


@pytest.mark.parametrize("backend", list(MAKERS))
def test_a_count_that_is_handed_out_is_nobody_elses(backend: str) -> None:
    run = even(backend)
    run.step(0)
    run.backend.entries(run.items[2])["step"].fill_(100)
    run.backend.gather(run.items[3])["step"].fill_(100)
    assert [float(entries["step"]) for entries in run.entries()] == [1.0] * 12


@pytest.mark.parametrize("backend", list(MAKERS))
def test_only_what_was_written_to_has_changed(backend: str) -> None:
    run = even(backend)
    run.step(0)
    run.items[5].local[3] += 1
    run.items[9].local[0] += 1
    assert run.backend.changed(run.items) == [run.items[5], run.items[9]]
    assert run.backend.changed(run.items[6:]) == [run.items[9]]
    assert run.backend.changed([]) == []


@every_value(backend=MAKERS, dtype=[torch.bfloat16, torch.float16])
def test_masters_start_from_what_is_given(dtype: torch.dtype, backend: str) -> None:
    run = Run(MAKERS[backend](), shapes=SHAPES, layers=[0] * len(SHAPES), dtype=dtype)
    exact = [item.local.float() for item in run.items]
    for number, (item, master) in enumerate(zip(run.items, exact, strict=True)):
        if number % 2:
            master.add_(torch.where(master == 0, 0, master.abs() * 2**-12))
            assert torch.equal(master.to(dtype), item.local)
            run.backend.set_initial_master(item, master)
    assert run.backend.changed(run.items) == []
    textbook = Textbook(run, torch.optim.AdamW, CLASSES["AdamW"][1])
    with torch.no_grad():
        for master, start in zip(textbook.masters, exact, strict=True):
            master.copy_(start)
    for number in range(3):
        run.step(number, without={1} if number == 0 else ())
        textbook.step(number, {1} if number == 0 else ())
        textbook.assert_same(f"step {number}")


@pytest.mark.parametrize("backend", list(MAKERS))
def test_a_weight_that_is_loaded_later_is_what_the_master_starts_from(backend: str) -> None:
    run = even(backend)
    item = run.items[0]
    run.backend.set_initial_master(item, item.local.float())
    item.local.fill_(0.5)
    assert run.backend.changed(run.items) == [item]
    run.backend.refresh(item)
    run.walk({other: torch.zeros_like(other.local, dtype=torch.float32) for other in run.items}, overflow=1.0)
    assert torch.equal(item.local, torch.full((16,), 0.5, dtype=torch.bfloat16))

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
from tests.covering import every_value
from tests.reference.lion import Lion
from tests.reference.pair import BACKENDS, DTYPES, Pair
from tests.unit.test_stream import Run


class Adding(torch.optim.Optimizer):
    """Every element gets a number, also those between the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            total: Tensor = self.state[p].setdefault("total", torch.zeros_like(p))
            total.add_(p.grad).add_(1)
            p.add_(total, alpha=0.01)


MAKERS: dict[str, Callable[[], Store]] = {"resident": stores.resident, "stream": lambda: stores.stream(ring_mib=1)}
every_home = pytest.mark.parametrize("backend", list(MAKERS))
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW-tensor-lr": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
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


@every_value(name=CLASSES, way=WAYS, backend=BACKENDS, parameters=DTYPES)
def test_every_class_gives_torchs_bits(
    name: str, way: str, backend: str, parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parameters that have no gradient in some steps; gaps between parameters where no kernel is fused."""
    optimizer_class, hyperparameters = CLASSES[name]
    common = {"AdamW-tensor-lr": {"foreach": False}, "Lion": {}, "padding is written to": {}}.get(name, WAYS[way])
    if way != "default":
        monkeypatch.setattr(segment_module, "CPU_VECTOR", 1)
    pair = Pair(
        optimizer_class,
        hyperparameters,
        hyperparameters,  # equal groups are updated together
        common=common,
        parameters=parameters,
        backend=backend,
        late_from=0 if optimizer_class is torch.optim.SGD else 3,  # torch's fails
        intermittent=optimizer_class is not torch.optim.SGD,
    )
    pair.train(8)


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
def test_a_count_that_is_handed_out_is_nobody_elses(backend: str) -> None:
    run = even(backend)
    run.step(0)
    run.backend.entries(run.items[2])["step"].fill_(100)
    run.backend.gather(run.items[3])["step"].fill_(100)
    assert [float(entries["step"]) for entries in run.entries()] == [1.0] * 12


@every_home
def test_only_what_was_written_to_has_changed(backend: str) -> None:
    run = even(backend)
    run.step(0)
    run.items[5].local[3] += 1
    run.items[9].local[0] += 1
    assert run.backend.changed(run.items) == [run.items[5], run.items[9]]
    assert run.backend.changed(run.items[6:]) == [run.items[9]]
    assert run.backend.changed([]) == []


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

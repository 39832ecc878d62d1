"""Which parameters are staged together, and where large tensors are cut."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest
import torch

from lightstep.state import units as units_module
from lightstep.state.schema import Managed, Unit
from lightstep.state.units import CUT_ELEMENTS, RingError, plan_units


@pytest.fixture(autouse=True)
def every_layer_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "SMALL_UNIT", 0)


def managed(name: str, elements: int, layer: Hashable = None, *, shape: tuple[int, ...] | None = None) -> Managed:
    """A parameter without memory of its own: planning looks at sizes only."""
    local = torch.empty(1, dtype=torch.bfloat16).expand(elements) if shape is None else torch.empty(shape)
    if shape is None:
        local = torch.empty(elements, dtype=torch.bfloat16, device="meta")
    return Managed(local, local, {}, name, layer)


def whole(name: str, elements: int, layer: Hashable = None) -> Managed:
    item = managed(name, elements, layer)
    item.whole_tensors = True
    return item


def ten(owner: Managed, elements: int) -> int:
    """Ten bytes for each element, as Adam on bf16 takes."""
    return 10 * elements


def names(units: list[Unit]) -> list[list[str]]:
    return [[owner.name for owner, _, _ in unit.parts] for unit in units]


def assert_a_partition(units: list[Unit], items: list[Managed], capacity: int) -> None:
    """Every element of every parameter once, in order; aligned cuts; nothing larger than a slot."""
    covered = dict.fromkeys(items, 0)
    for index, unit in enumerate(units):
        assert unit.index == index
        assert unit.parts
        assert sum(ten(owner, stop - start) for owner, start, stop in unit.parts) <= capacity
        for owner, start, stop in unit.parts:
            assert start == covered[owner]
            assert start % CUT_ELEMENTS == 0
            assert stop > start or owner.local.numel() == 0
            covered[owner] = stop
    assert all(covered[item] == item.local.numel() for item in items)


def test_small_layers_that_follow_each_other_are_staged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "SMALL_UNIT", 50_000)
    sizes = [1000, 2000, 1500, 2000, 9000, 100, 100]
    items = [managed(f"p{number}", size, number) for number, size in enumerate(sizes)]
    assert names(plan_units(items, ten, 1 << 20)) == [["p0", "p1", "p2"], ["p3"], ["p4"], ["p5", "p6"]]
    assert names(plan_units(items, ten, 100_000))[0] == ["p0"], "at most a quarter of a slot"


def test_tied_parameters_come_once() -> None:
    embed = managed("embed", 100)
    head = Managed(embed.param, embed.local, {}, "head")
    assert names(plan_units([embed, managed("w", 100, 0), head], ten, 1 << 20)) == [["embed"], ["w"]]


def test_no_unit_is_left_almost_empty() -> None:
    """A step in a stream changes copies at each unit, so a few KiB in a slot of their own cost as much as a slot."""
    hidden, wide = 2048, 7168
    sizes = [hidden * hidden, 512 * hidden, 512 * hidden, hidden * hidden, *3 * [wide * hidden], hidden, hidden]
    items = [managed(f"p{number}", size, "layer") for number, size in enumerate(sizes)]
    capacity = 111 << 20
    units = plan_units(items, ten, capacity)
    assert_a_partition(units, items, capacity)
    assert len(units) == -(-10 * sum(sizes) // capacity)


def test_tensors_that_are_not_contiguous_are_not_cut() -> None:
    window = managed("window", 0, 0, shape=(50, 40))
    window.local = window.local[:, :30]
    units = plan_units([managed("w", 4000, 0), window], ten, 16_000)
    assert [(start, stop) for unit in units for owner, start, stop in unit.parts if owner is window] == [(0, 1500)]


def test_a_slot_too_small_for_a_piece_is_refused_with_the_numbers() -> None:
    with pytest.raises(RingError, match="big needs 1280 bytes in one piece, and a slot of the ring has 1279"):
        plan_units([managed("big", 1000)], ten, 1279)
    assert len(plan_units([managed("big", 1000)], ten, 1280)) == 8
    assert len(plan_units([managed("small", 100)], ten, 1279)) == 1
    with pytest.raises(RingError, match="big needs 10000 bytes"):
        plan_units([whole("big", 1000)], ten, 9999)


def test_any_model_is_partitioned() -> None:
    for seed in range(20):
        generator = random.Random(seed)
        sizes = [generator.choice([0, 1, 7, 128, 129, 1000, 4096, 40_000]) for _ in range(generator.randint(1, 12))]
        items = [managed(f"p{i}", size, generator.choice([None, 0, 1, 2])) for i, size in enumerate(sizes)]
        capacity = generator.choice([1280, 1500, 5000, 100_000])
        units = plan_units(items, ten, capacity)
        assert_a_partition(units, items, capacity)
        assert all(len({owner.layer for owner, _, _ in unit.parts}) == 1 for unit in units), seed

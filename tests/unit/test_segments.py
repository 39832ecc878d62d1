"""Flat units: many parameters as one for element-wise classes, with torch's own bits and step counts for each."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch

from lightstep.state.store import Store
from tests import stores
from tests.unit.test_stream import Run

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

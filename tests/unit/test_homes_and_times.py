"""Every home of the state with every update time: the bits of state on the device, updated in ``step()``."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lightstep.optimizer import queue
from lightstep.state.schema import Managed
from tests import stores
from tests.covering import every_pair, every_value
from tests.patience import PATIENCE
from tests.unit.test_next_forward import Training, assert_same

KIB = 1 / 2**20
HOMES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": {"backend": "stream", "ring_mib": 0.02},
    "stream, some resident": {"backend": "stream", "ring_mib": 0.02, "resident_gib": 6 * KIB},
}
TIMES = ["at_step", "next_forward", "overlap", "in_backward"]
LIMITS = {"clipped": 0.3, "not clipped": 1e3}
SUBMITTED = [(queue.SUBMIT_IN_STEP, queue.SUBMIT_AHEAD), (0, 0), (1, 1), (3, 2)]
"""Units in a deferred ``step()``, and ahead of what is waited for."""


pytestmark = pytest.mark.usefixtures("small_units")


def make(home: str, time: str, limit: str, parameters: str, kind: type[Training] = Training) -> Training:
    clipping = {"max_norm": LIMITS[limit], "scope": "unit"} if time == "in_backward" else {"max_norm": LIMITS[limit]}
    scale = {"kind": "constant", "scale": 64.0} if time == "in_backward" and parameters == "float16" else None
    return kind({**HOMES[home], "update": time}, parameters, clipping=clipping, loss_scale=scale)


def expected_of(time: str, limit: str, parameters: str, kind: type[Training] = Training) -> Training:
    """Layers are clipped by themselves, or all by one norm, as in the run that is held against it."""
    return make("resident", time if time == "in_backward" else "at_step", limit, parameters, kind)


@functools.cache
def expected_bits(in_backward: bool, limit: str, parameters: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    expected = expected_of("in_backward" if in_backward else "at_step", limit, parameters)
    return expected.train(6), expected.snapshot()


@every_pair(home=HOMES, time=TIMES, limit=LIMITS, parameters=["bfloat16", "float16", "float32"], submitted=SUBMITTED)
def test_the_same_bits(
    home: str, time: str, limit: str, parameters: str, submitted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random delays in every lane. ``test_exactness.py`` has the same table for classes, beside a plain loop."""
    losses, wanted = expected_bits(time == "in_backward", limit, parameters)
    monkeypatch.setattr(queue, "SUBMIT_IN_STEP", submitted[0])
    monkeypatch.setattr(queue, "SUBMIT_AHEAD", submitted[1])
    tested = make(home, time, limit, parameters)
    found = tested.train(2)
    tested.delays(zlib.crc32(f"{home} {time} {limit} {parameters}".encode()))
    assert found + tested.train(4) == losses
    assert_same(tested.snapshot(), wanted)
    store = tested.optimizer._backend
    assert len(store.units()) > 3
    if time == "overlap" and home != "resident" and limit == "not clipped":
        assert store._versions.host_bytes() > 0, "nothing was updated before the norm was known"
    tested.optimizer.close()


@every_value(home=HOMES, time=TIMES)
def test_saves_loads_and_released_memory_in_between(home: str, time: str, tmp_path: Path) -> None:
    expected, tested = expected_of(time, "clipped", "bfloat16"), make(home, time, "clipped", "bfloat16")
    losses = expected.train(8)
    assert tested.train(2) == losses[:2]
    tested.delays(1)
    saved = tested.strategy.save_checkpoint(tmp_path / "a", tested.model, tested.optimizer, asynchronous=True)
    assert tested.train(2) == losses[2:4]
    saved.result(PATIENCE)
    tested.optimizer.release_device_memory()
    assert tested.optimizer.memory_report()["device_bytes"] == 0
    assert tested.train(4) == losses[4:]
    assert_same(tested.snapshot(), expected.snapshot())
    again = make(home, time, "clipped", "bfloat16")
    again.strategy.load_checkpoint(tmp_path / "a", again.model, again.optimizer)
    again.steps = 2
    assert again.train(6) == losses[2:]
    assert_same(again.snapshot(), expected.snapshot())


def test_bulk_keeps_nothing_on_the_device_between_steps() -> None:
    tested = make("bulk", "next_forward", "clipped", "bfloat16")
    tested.train(2)
    tested.optimizer.synchronize()
    assert tested.optimizer._backend._ring is None
    assert tested.optimizer.memory_report()["device_bytes"] == 0


def test_deferred_updates_of_parameters_on_several_devices_are_refused() -> None:
    store = stores.resident()
    items = [
        Managed(weight, weight, {}, name, own_master=True)
        for name, weight in (("here", torch.zeros(4)), ("there", torch.zeros(4, device="meta")))
    ]
    store.register(items)
    with pytest.raises(ValueError, match=r"parameters are on cpu, meta; .*set optimizer_state\.update: at_step"):
        store.lanes.event()

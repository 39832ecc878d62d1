"""Every home of the state with every update time. That the bits are those of a plain loop: ``test_exactness.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightstep.state.schema import Managed
from tests import stores
from tests.training import Training

KIB = 1 / 2**20
HOMES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": {"backend": "stream", "ring_mib": 0.02},
    "stream, some resident": {"backend": "stream", "ring_mib": 0.02, "resident_gib": 6 * KIB},
}
TIMES = ["at_step", "next_forward", "overlap", "in_backward"]
LIMITS = {"clipped": 0.3, "not clipped": 1e3}

pytestmark = pytest.mark.usefixtures("small_units")


def make(home: str, time: str, limit: str, parameters: str, kind: type[Training] = Training, **more: Any) -> Training:
    clipping = {"max_norm": LIMITS[limit], "scope": "unit"} if time == "in_backward" else {"max_norm": LIMITS[limit]}
    scale = {"kind": "constant", "scale": 64.0} if time == "in_backward" and parameters == "float16" else None
    return kind({**HOMES[home], "update": time}, parameters, clipping=clipping, loss_scale=scale, **more)


def expected_of(time: str, limit: str, parameters: str, kind: type[Training] = Training) -> Training:
    """Layers are clipped by themselves, or all by one norm, as in the run that is held against it."""
    return make("resident", time if time == "in_backward" else "at_step", limit, parameters, kind)


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

"""Updates in backward on several ranks: after each unit's reduction, the bits of updates in ``step()``."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightstep.optimizer.in_backward import InBackward
from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import Pool
from tests.distributed.test_next_forward import LAYOUTS, PRECISIONS, Skipping, Training, check_same_bits

STATES: dict[str, dict[str, Any]] = {
    "stream": {"backend": "stream", "update": "in_backward", "ring_mib": 0.01},
    "resident": {"backend": "resident", "update": "in_backward"},
}
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {"max_norm": None},
    "unit": {"max_norm": 0.05, "scope": "unit"},
    "unit-inf": {"max_norm": 0.01, "norm_type": "inf", "scope": "unit"},
}
SCALED = {"parameters": "float16", "loss_scale": {"kind": "constant", "scale": 1024.0}}


@pytest.mark.parametrize(
    ("layout", "clipping", "state"),
    [*((layout, "unit", "stream") for layout in LAYOUTS), ("fsdp2", "none", "resident"), ("hsdp", "unit", "resident")],
)
def test_slow_lanes(pool: Pool, layout: str, clipping: str, state: str) -> None:
    world_size, sharding = LAYOUTS[layout]
    settings = {"sharding": sharding, "precision": PRECISIONS["bf16"], "compute": "parameters", "seeds": [1, 2]}
    pool.run(check_same_bits, world_size, **settings, state=STATES[state], clipping=CLIPPING[clipping])


@pytest.mark.parametrize("precision", [PRECISIONS["bf16-reduced-in-bf16"], PRECISIONS["fp32"], SCALED])
def test_other_precisions(pool: Pool, precision: dict[str, Any]) -> None:
    settings = {"sharding": LAYOUTS["fsdp2"][1], "precision": precision, "compute": "parameters", "seeds": [1, 2]}
    pool.run(check_same_bits, 2, **settings, state=STATES["stream"], clipping=CLIPPING["unit-inf"])


def test_shards_that_are_cast_and_blocks_that_are_left_out(pool: Pool) -> None:
    common = {"sharding": LAYOUTS["fsdp2"][1], "state": STATES["stream"], "clipping": CLIPPING["none"], "seeds": [1, 2]}
    pool.run(check_same_bits, 2, **common, precision=PRECISIONS["fp32"], compute="bfloat16")
    pool.run(check_same_bits, 2, **common, precision=PRECISIONS["bf16"], compute="parameters", make=Skipping)


def check_memory(rank: int, world_size: int, state: dict[str, Any]) -> None:
    """Whenever a unit's gradients arrive, those of the unit before the last one are gone."""
    alive: list[tuple[str, weakref.ref[Tensor]]] = []
    layers: list[int] = []
    arrived = InBackward.arrived

    def counting(self: InBackward, item: Any, gradient: Tensor) -> None:
        alive.append((str(item.layer), weakref.ref(gradient)))
        arrived(self, item, gradient)
        del gradient
        layers.append(len({layer for layer, reference in alive if reference() is not None and "blocks" in layer}))

    InBackward.arrived = counting  # type: ignore[method-assign]
    try:
        values = {"sharding": LAYOUTS["fsdp2"][1], "clipping": {"max_norm": None}, "optimizer_state": state}
        training = Training(rank, world_size, values, TinyTransformer)
        for _ in range(3):
            training.step()
            gc.collect()
            alive.clear()
    finally:
        InBackward.arrived = arrived  # type: ignore[method-assign]
    assert layers and max(layers) <= 2
    assert torch.distributed.is_initialized()


@pytest.mark.parametrize("state", STATES)
def test_gradients_of_two_blocks_at_a_time(pool: Pool, state: str) -> None:
    pool.run(check_memory, 2, state=STATES[state])

"""Every update time under every way of sharding, in slow lanes: the bits of updates in ``step()``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import Pool
from tests.distributed.test_next_forward import LAYOUTS, PRECISIONS, Skipping, check_same_bits

STREAM = {"backend": "stream", "ring_mib": 0.01}
HOMES: dict[str, dict[str, Any]] = {
    "stream": STREAM,
    "stream, some resident": {**STREAM, "resident_gib": 3 / 2**20},
    "bulk": {"backend": "bulk"},
    "resident": {"backend": "resident"},
}
LIMITS = {"clipped": 0.05, "not clipped": 1e6}
SCALED = {"parameters": "float16", "loss_scale": {"kind": "constant", "scale": 1024.0}}
CASES = [
    ("fsdp2-kept-gathered", "next_forward", "stream, some resident", "bf16", "clipped", TinyTransformer),
    ("fsdp2-checkpointed", "overlap", "bulk", "fp32", "clipped", Skipping),
    ("fsdp2-named-units", "in_backward", "stream", "fp16", "clipped", Skipping),
    ("ddp", "next_forward", "resident", "fp32", "not clipped", Skipping),
    ("ddp", "overlap", "stream", "bf16-reduced-in-bf16", "clipped", TinyTransformer),
    ("ddp", "in_backward", "stream, some resident", "fp32", "not clipped", TinyTransformer),
    ("copies", "in_backward", "resident", "bf16-reduced-in-bf16", "not clipped", TinyTransformer),
    ("copies", "next_forward", "bulk", "fp16", "clipped", Skipping),
    ("hsdp", "overlap", "stream, some resident", "fp16", "not clipped", TinyTransformer),
]
"""Every way of sharding, and every time with shards, with replicas and with both. The homes have met the times on one
device (``tests/unit/test_homes_and_times.py``)."""


@pytest.mark.parametrize(("layout", "time", "home", "precision", "limit", "make"), CASES)
def test_the_same_bits(
    pool: Pool, layout: str, time: str, home: str, precision: str, limit: str, make: type[TinyTransformer]
) -> None:
    """Shards in fp32 are cast when they are gathered."""
    world_size, sharding = LAYOUTS[layout]
    in_backward = time == "in_backward"
    pool.run(
        check_same_bits,
        world_size,
        sharding=sharding,
        precision=SCALED if in_backward and precision == "fp16" else PRECISIONS[precision],
        compute="bfloat16" if precision == "fp32" and sharding["kind"] == "fsdp2" else "parameters",
        seed=2,
        make=make,
        state={**HOMES[home], "update": time},
        clipping={"max_norm": LIMITS[limit], "scope": "unit" if in_backward else "global"},
    )


@pytest.mark.parametrize("previous_weights", ["device", "auto"])
def test_what_comes_to_stay_on_the_device_is_not_tried(pool: Pool, previous_weights: str) -> None:
    """Replicas that share the state choose it when the step begins, and a state on the device has one version."""
    world_size, sharding = LAYOUTS["copies"]
    pool.run(
        check_same_bits,
        world_size,
        sharding=sharding,
        precision=PRECISIONS["bf16"],
        compute="parameters",
        seed=2,
        state={**HOMES["stream, some resident"], "update": "overlap", "previous_weights": previous_weights},
        clipping={"max_norm": 0.3},
    )

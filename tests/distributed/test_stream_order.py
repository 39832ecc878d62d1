"""What several ranks do on streams is ordered by events: FSDP2's gathering, replicas' broadcasts, and the lanes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightstep
from tests.covering import every_value
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool
from tests.distributed.training import DDP, FSDP2, HSDP
from tests.stream_order import ordered_streams, wait_on_host

HOST = {"placement": "host", "device_mib": 0.001}
STAYING = {**HOST, "gradients_gib": 1}
"""Gradients do not leave the device, unless they must."""
UNITS = {**FSDP2, "wrap": ["Block", "embed", "head"]}
COPIES = {**FSDP2, "mesh": {"replicate": 2, "shard": 1}}


def check_order(
    rank: int,
    sharding: dict[str, Any],
    update: str,
    backend: str = "stream",
    weights: dict[str, Any] | None = None,
    evaluates: bool = False,
    evicts: bool = False,
) -> None:
    """No conflict.

    Args:
        evaluates: between backward and step: updates that have begun are rolled back.
        evicts: gradients that stay, between micro-batches and after ``step()``.
    """
    state = {"backend": backend, "update": update, **({"ring_mib": 0.01} if backend == "stream" else {})}
    clipping = {"max_norm": 0.5, "scope": "unit" if update == "in_backward" else "global"}
    sections: dict[str, Any] = {"optimizer_state": state, "clipping": clipping, "weights": weights or {}}
    with ordered_streams() as accesses:
        strategy = lightstep.Strategy.load({"sharding": sharding, **sections})
        torch.manual_seed(0)
        model = strategy.prepare_model(TinyTransformer())
        optimizer: Any = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
        wait_on_host()
        for step in range(3):
            for micro in range(1 + step % 2):
                with strategy.accumulate(model, last=micro == step % 2):
                    optimizer.backward(loss_of(model, step, micro, rank, strategy.device) / 2)
                if evicts:
                    optimizer.engine._host_weights.free()
            if evaluates and step > 1:
                with torch.no_grad():
                    loss_of(model, 9, 0, rank, strategy.device)
            optimizer.step()
            if evicts:
                optimizer.engine._host_weights.free()
        optimizer.synchronize()
        strategy.close()
    assert accesses.count > 1000
    assert not accesses.conflicts, "\n".join(accesses.conflicts)


CASES = {"units": (2, UNITS), "ddp": (2, DDP), "copies": (2, COPIES), "hsdp": (4, HSDP)}
TIMES = ["at_step", "next_forward", "overlap", "in_backward"]


@pytest.mark.parametrize(
    ("layout", "update"),
    [
        ("units", "next_forward"),
        *(("ddp", update) for update in ("at_step", "next_forward", "in_backward")),
        *(("copies", update) for update in ("next_forward", "in_backward")),
        ("hsdp", "overlap"),
    ],
)
def test_everything_is_ordered(pool: Pool, layout: str, update: str) -> None:
    """Other updates of units are below. DDP tries none."""
    world_size, sharding = CASES[layout]
    pool.run(check_order, world_size, cpu=True, sharding=sharding, update=update)


@pytest.mark.parametrize("layout", ["units", "copies"])
def test_an_evaluation_before_step_is_behind_what_it_rolls_back(pool: Pool, layout: str) -> None:
    world_size, sharding = CASES[layout]
    pool.run(check_order, world_size, cpu=True, sharding=sharding, update="overlap", evaluates=True)


@every_value(
    update=TIMES,
    home=["resident", "bulk", "host", "staying", "evicted"],
)
def test_every_home_of_state_and_weights_is_ordered(pool: Pool, home: str, update: str) -> None:
    """All pairs are ordered on one device (``tests/unit/test_stream_order.py``)."""
    weights = HOST if home == "host" else STAYING
    places: dict[str, Any] = {"backend": home} if home in ("resident", "bulk") else {"weights": weights}
    pool.run(check_order, 2, cpu=True, sharding=UNITS, update=update, **places, evicts=home == "evicted")

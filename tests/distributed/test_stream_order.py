"""What several ranks do on streams is ordered by events: FSDP2's gathering, replicas' broadcasts, and the lanes."""

from __future__ import annotations

from typing import Any

import torch

import lightstep
from tests.covering import every_value
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.training import LAYOUTS, UNITS
from tests.stream_order import ordered_streams, wait_on_host

HOST = {"placement": "host", "device_mib": 0.001}
STAYING = {**HOST, "gradients_gib": 1}
"""Gradients do not leave the device, unless they must."""


def check_order(
    rank: int,
    world_size: int,
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


@on_ranks(
    LAYOUTS,
    ("layout", "update", "evaluates"),
    [
        ("fsdp2-named-units", "next_forward", False),
        ("fsdp2-named-units", "overlap", True),
        *(("ddp", update, False) for update in ("at_step", "next_forward", "in_backward")),
        *(("copies", update, False) for update in ("next_forward", "in_backward")),
        ("copies", "overlap", True),
        ("hsdp", "overlap", False),
    ],
    cpu=True,
)
def test_everything_is_ordered(
    rank: int, world_size: int, sharding: dict[str, Any], update: str, evaluates: bool
) -> None:
    """Other updates of units are below. DDP tries none.

    An evaluation before the step is behind what it rolls back.
    """
    check_order(rank, world_size, sharding, update, evaluates=evaluates)


@every_value(
    update=["at_step", "next_forward", "overlap", "in_backward"],
    home=["resident", "bulk", "host", "staying", "evicted"],
)
@on_ranks(2, cpu=True)
def test_every_home_of_state_and_weights_is_ordered(rank: int, world_size: int, home: str, update: str) -> None:
    """All pairs are ordered on one device (``tests/unit/test_stream_order.py``)."""
    weights = HOST if home == "host" else STAYING
    places: dict[str, Any] = {"backend": home} if home in ("resident", "bulk") else {"weights": weights}
    check_order(rank, world_size, UNITS, update, **places, evicts=home == "evicted")

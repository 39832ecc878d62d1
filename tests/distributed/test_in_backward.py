"""Updates in backward on several ranks: after each unit's reduction, the bits of updates in ``step()``."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.in_backward import FinalUpdates
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.test_next_forward import LAYOUTS, Training

STATES: dict[str, dict[str, Any]] = {
    "stream": {"backend": "stream", "update": "in_backward", "ring_mib": 0.01},
    "resident": {"backend": "resident", "update": "in_backward"},
}
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {"max_norm": None},
    "unit": {"max_norm": 0.05, "scope": "unit"},
    "unit-inf": {"max_norm": 0.01, "norm_type": "inf", "scope": "unit"},
}


@on_ranks(2, "state", [*STATES.values()])
def test_gradients_of_two_blocks_at_a_time(rank: int, world_size: int, state: dict[str, Any]) -> None:
    """Whenever a unit's gradients arrive, those of the unit before the last one are gone."""
    alive: list[tuple[str, weakref.ref[Tensor]]] = []
    layers: list[int] = []
    add_gradient = FinalUpdates.add_gradient

    def counting(self: FinalUpdates, item: Any, gradient: Tensor) -> None:
        alive.append((str(item.layer), weakref.ref(gradient)))
        add_gradient(self, item, gradient)
        del gradient
        layers.append(len({layer for layer, reference in alive if reference() is not None and "blocks" in layer}))

    FinalUpdates.add_gradient = counting  # type: ignore[method-assign]
    try:
        values = {"sharding": LAYOUTS["fsdp2"][1], "clipping": {"max_norm": None}, "optimizer_state": state}
        training = Training(rank, world_size, values, TinyTransformer)
        for _ in range(3):
            training.step()
            gc.collect()
            alive.clear()
    finally:
        FinalUpdates.add_gradient = add_gradient  # type: ignore[method-assign]
    assert layers and max(layers) <= 2
    assert torch.distributed.is_initialized()


@on_ranks(
    None,
    ("ranks", "layout", "clipping", "value", "home"),
    [
        (2, "fsdp2", "none", "nan", "resident"),
        (2, "fsdp2", "unit-inf", "nan", "stream"),
        (4, "hsdp", "unit", "inf", "stream"),
    ],
)
def test_a_shard_that_is_not_finite_leaves_its_whole_layer_alone(
    rank: int, world_size: int, layout: str, clipping: str, value: str, home: str
) -> None:
    """Of an embedding one row, on one rank, has a gradient that is not finite."""

    def spoiled(_: Any, gradients: tuple[Tensor]) -> tuple[Tensor]:
        gradient = gradients[0].clone()
        gradient[0, 0, 0] = float(value)
        return (gradient,)

    values = {"sharding": LAYOUTS[layout][1], "clipping": CLIPPING[clipping], "optimizer_state": STATES[home]}
    training = Training(rank, world_size, values, TinyTransformer)
    training.step()
    before = training.snapshot()
    with training.strategy.accumulate(training.model, last=False):
        handle = training.inner.embed.register_full_backward_pre_hook(spoiled) if rank == 0 else None
        training.optimizer.backward(loss_of(training.model, 0, 0, rank, training.device))
    if handle is not None:
        handle.remove()
    training.step()
    after = training.snapshot()
    assert all(tensor.isfinite().all() for tensor in after.values())
    left = {name for name in after if torch.equal(before[name], after[name])}
    assert {name for name in left if name.startswith("embed.")} == {n for n in after if n.startswith("embed.")}
    assert not any(name.startswith("head.") for name in left)
    training.optimizer.close()

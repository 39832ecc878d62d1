"""Records are fetched in the order in which backward completes gradients. With FSDP2 it is not the model's reversed."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
from torch import nn

from lightstep.state.record import Record
from lightstep.state.ring import Ring, Slot
from tests.distributed.models import CLASSES, TinyTransformer
from tests.distributed.ranks import on_ranks
from tests.distributed.test_next_forward import Training


class LargeHead(TinyTransformer):
    """What is used behind the blocks, and reduced with the outermost module, fills the ring."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, CLASSES, bias=False)
        self.head = nn.Sequential(*layers)  # type: ignore[assignment]


@pytest.mark.parametrize(("update", "max_norm"), [("in_backward", None), ("overlap", 1e6)])
@on_ranks(2, cpu=True)
def test_each_record_is_fetched_once_in_a_step(rank: int, world_size: int, update: str, max_norm: float | None) -> None:
    """Once the order is known, each record is fetched once in a step, before somebody waits for it."""
    fetched: Counter[str] = Counter()
    missed: list[str] = []
    stage, take = Ring._fetch, Ring.acquire

    def staged(self: Ring, record: Record) -> None:
        fetched[record.unit.label] += 1
        stage(self, record)

    def taken(self: Ring, record: Record) -> Slot:
        missed.extend([] if record in self.staged() else [record.unit.label])
        return take(self, record)

    state: dict[str, Any] = {"backend": "stream", "update": update, "ring_mib": 0.01, "prefetch_layers": 0}
    values = {"sharding": {"kind": "fsdp2"}, "clipping": {"max_norm": max_norm}, "optimizer_state": state}
    training = Training(rank, world_size, values, LargeHead)
    with mock.patch.multiple(Ring, _fetch=staged, acquire=taken):
        for steps in (2, 2):  # the first two show the order: with overlap nothing is tried in the very first one
            fetched.clear()
            missed.clear()
            for _ in range(steps):
                training.step()
            training.optimizer.synchronize()
    assert len(fetched) >= 6
    assert set(fetched.values()) == {2}, fetched
    assert not missed

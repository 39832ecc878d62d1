"""Saves that read the host's records while training goes on, on several ranks."""

from __future__ import annotations

import random
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightstep.state.snapshot import Snapshot
from tests.distributed.ranks import Pool
from tests.distributed.test_next_forward import LAYOUTS, PRECISIONS, Training
from tests.patience import PATIENCE
from tests.unit.test_snapshots import ask_twice, check_saved


def check_snapshots(rank: int, world_size: int, folder: str, values: dict[str, Any]) -> None:
    """Two saves, with slow lanes and a slow writer, held against synchronous ones, and the run against one without."""
    state = values["optimizer_state"]
    streamed = {"backend": "stream", "ring_mib": 0.01}
    expected = Training(rank, world_size, {**values, "optimizer_state": streamed})
    tested = Training(rank, world_size, {**values, "optimizer_state": {**streamed, **state}})
    kind: Any = Snapshot
    take, chance = kind.take, random.Random(rank)
    taken: list[int] = []

    def slowly(snapshot: Any, parameter: Tensor, key: str) -> Tensor:
        time.sleep(chance.random() * 2e-3)
        taken.append(id(parameter))
        return take(snapshot, parameter, key)

    kind.take = slowly
    try:
        tested.step()
        tested.delay(rank)
        for number in range(2):
            pending = ask_twice(tested, Path(folder, str(number)))
            losses = [tested.step() for _ in range(2)]
            pending.result(PATIENCE)
            check_saved(Path(folder, str(number)))
            assert taken and len([*groupby(taken)]) == len({*taken})  # each is read, and its master joined, once
            taken.clear()
    finally:
        kind.take = take
    assert [expected.step() for _ in range(5)][3:] == losses
    found, wanted = tested.snapshot(), expected.snapshot()
    assert [key for key, value in wanted.items() if not value.equal(found[key])] == []


@pytest.mark.parametrize(
    ("layout", "precision", "state"),
    [
        ("ddp", "bf16", {"update": "next_forward", "spare_host_gib": 0.0}),
        ("fsdp2", "bf16", {"update": "overlap"}),
        ("copies", "bf16", {}),
    ],
)
def test_what_is_saved_is_the_moment_of_asking(
    pool: Pool, tmp_path: Path, layout: str, precision: str, state: dict[str, Any]
) -> None:
    world_size, sharding = LAYOUTS[layout]
    values = {
        "sharding": sharding,
        "precision": PRECISIONS[precision],
        "clipping": {"max_norm": 0.5},
        "optimizer_state": state,
    }
    pool.run(check_snapshots, world_size, folder=str(tmp_path), values=values)

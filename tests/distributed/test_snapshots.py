"""Saves that read the host's records while training goes on, on several ranks."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightstep.state.snapshot import Snapshot
from tests.distributed.ranks import Pool
from tests.distributed.test_next_forward import LAYOUTS, PRECISIONS, Training
from tests.unit.test_snapshots import ask_twice, check_saved


def check_snapshots(rank: int, world_size: int, folder: str, values: dict[str, Any]) -> None:
    """Two saves, with slow lanes and a slow writer, held against synchronous ones, and the run against one without."""
    state = {"backend": "stream", "ring_mib": 0.01}
    expected = Training(rank, world_size, {**values, "optimizer_state": state})
    tested = Training(rank, world_size, {**values, "optimizer_state": {**state, **values["optimizer_state"]}})
    take, chance, taken = Snapshot.take, random.Random(rank), []

    def slowly(snapshot: Snapshot, parameter: Tensor, key: str) -> Tensor:
        time.sleep(chance.random() * 2e-3)
        taken.append(key)
        return take(snapshot, parameter, key)

    Snapshot.take = slowly  # type: ignore[method-assign]
    try:
        tested.step()
        tested.delay(rank)
        for number in range(2):
            pending = ask_twice(tested, Path(folder, str(number)))
            losses = [tested.step() for _ in range(2)]
            pending.result(60)
            check_saved(Path(folder, str(number)))
    finally:
        Snapshot.take = take  # type: ignore[method-assign]
    assert taken
    assert [expected.step() for _ in range(5)][3:] == losses
    found, wanted = tested.snapshot(), expected.snapshot()
    assert [key for key, value in wanted.items() if not value.equal(found[key])] == []


@pytest.mark.parametrize(
    ("layout", "update", "spare"),
    [
        ("ddp", "next_forward", 0.0),
        ("fsdp2", "overlap", "auto"),
        ("fsdp2", "at_step", 0.0),
        ("hsdp", "at_step", "auto"),
    ],
)
def test_what_is_saved_is_the_moment_of_asking(
    pool: Pool, tmp_path: Path, layout: str, update: str, spare: Any
) -> None:
    world_size, sharding = LAYOUTS[layout]
    values = {
        "sharding": sharding,
        "precision": PRECISIONS["bf16"],
        "clipping": {"max_norm": 0.5},
        "optimizer_state": {"update": update, "spare_host_gib": spare},
    }
    pool.run(check_snapshots, world_size, folder=str(tmp_path), values=values)

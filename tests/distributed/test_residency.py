"""State that stays on the device and device memory that is lent, on several ranks: the bits of the resident backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Pool
from tests.distributed.test_next_forward import LAYOUTS, Training

KIB = 2.0**-20  # in GiB


def check_same_bits(rank: int, world_size: int, sharding: dict[str, Any], time: str, folder: Path) -> None:
    """Ranks keep different sizes, change them, and lend their memory, each in a step of its own choice."""
    values = {"sharding": sharding, "precision": {"parameters": "bfloat16"}, "clipping": {"max_norm": 0.5}}
    expected = Training(rank, world_size, {**values, "optimizer_state": {"backend": "resident"}})
    state = {"backend": "stream", "ring_mib": 0.01, "resident_gib": (1 + 2 * rank) * KIB, "update": time}
    tested = Training(rank, world_size, {**values, "optimizer_state": state})
    assert [tested.step(), tested.step()] == [expected.step(), expected.step()]
    tested.delay(rank)
    for number in range(5):
        assert tested.step() == expected.step()
        if number == rank:
            tested.optimizer.set_residency(1.0)
        if number in (2, 2 + rank):
            for training in (tested, expected):
                training.optimizer.release_device_memory()
                assert training.optimizer.memory_report()["device_bytes"] == 0
        if number == 2:
            tested.strategy.save_checkpoint(folder, tested.model, tested.optimizer)
    held = tested.optimizer.memory_report()["device_bytes"]
    assert held > 0
    found, wanted = tested.snapshot(), expected.snapshot()
    assert found.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []
    tested.strategy.load_checkpoint(folder, tested.model, tested.optimizer)
    tested.steps = 5
    for _ in range(2):
        tested.step()
    found = tested.snapshot()
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize(
    ("layout", "time"),
    [("fsdp2", "overlap"), ("copies", "next_forward")],
)
def test_the_same_bits_whatever_stays(pool: Pool, layout: str, time: str, tmp_path: Path) -> None:
    world_size, sharding = LAYOUTS[layout]
    pool.run(check_same_bits, world_size, sharding=sharding, time=time, folder=tmp_path / "checkpoint")

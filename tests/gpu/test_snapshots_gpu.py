"""Saves that a thread writes while the GPU trains: what is on disk is the moment of asking, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.gpu.test_next_forward_gpu import llama, train
from tests.unit.test_snapshots import ask_twice, check_saved

pytestmark = pytest.mark.gpu

STATES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": {"backend": "stream", "ring_mib": 64},
    "stream-next-forward": {"backend": "stream", "ring_mib": 64, "update": "next_forward"},
    "stream-resident-in-part": {"backend": "stream", "ring_mib": 64, "resident_gib": 0.05},
}


class Run(NamedTuple):
    strategy: Any
    model: Any
    optimizer: Any


@pytest.mark.parametrize("state", STATES)
def test_what_is_saved_is_the_moment_of_asking(tmp_path: Path, state: str) -> None:
    """Steps, and edits of weights, are queued at once behind the copies."""
    run = Run(*llama(STATES[state]))
    train(run.model, run.optimizer, range(2))
    if state == "resident":  # copies begin when an update that did not wait for them would be over
        lanes = run.optimizer._backend._lanes[torch.device("cuda", torch.cuda.current_device())]
        lanes.delay = lambda _: torch.cuda._sleep(10_000_000)
    for number in range(2):
        pending = ask_twice(run, tmp_path / str(number))
        train(run.model, run.optimizer, range(2, 5))
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(1.5)
        assert pending.result(120)
        check_saved(tmp_path / str(number))
    run.optimizer.close()

"""Models that are moved or cast in mid-run: torch swaps DTensors, and what is known of them must survive that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.covering import every_value
from tests.distributed.ranks import Pool
from tests.distributed.test_next_forward import LAYOUTS, Training
from tests.distributed.training import FSDP2

STREAM = {"backend": "stream", "ring_mib": 1}
SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "resident": (2, FSDP2, {"backend": "resident"}, "float16"),
    "next_forward": (2, FSDP2, {**STREAM, "update": "next_forward"}, "float32"),
    "in_backward": (2, FSDP2, {**STREAM, "update": "in_backward"}, "bfloat16"),
    "overlap": (2, FSDP2, {**STREAM, "update": "overlap"}, "bfloat16"),
    "copies": (2, LAYOUTS["copies"][1], {**STREAM, "update": "next_forward"}, "bfloat16"),
}


class Run(Training):
    """``moves`` says at which moments the model is moved."""

    def __init__(
        self, rank: int, world_size: int, sharding: dict[str, Any], state: dict[str, Any], dtype: str, moves: str = ""
    ) -> None:
        self.moves = moves
        scope = "unit" if state.get("update") == "in_backward" else "global"
        scale = {"loss_scale": {"kind": "constant", "scale": 256.0}} if dtype == "float16" else {}
        values = {"sharding": sharding, "precision": {"parameters": dtype, **scale}, "optimizer_state": state}
        super().__init__(rank, world_size, {**values, "clipping": {"max_norm": 0.5, "scope": scope}})
        self.move(self.model, "before the first step")

    def prepare(self, model: nn.Module) -> nn.Module:
        prepared = super().prepare(model)
        self.move(prepared, "before the optimizer")
        return prepared

    def move(self, model: nn.Module, moment: str) -> None:
        """To other memory and back; as :meth:`torch.nn.Module.to` does, which on the CPU has nothing to do."""
        if moment in self.moves:
            model.cpu()
            model._apply(torch.clone)
            model.to(self.device)

    def step(self) -> list[float]:
        losses = super().step()
        self.move(self.model, "after the step")
        return losses


def check_moved(rank: int, world_size: int, settings: str, moves: str) -> None:
    _, sharding, state, dtype = SETTINGS[settings]
    runs = [Run(rank, world_size, sharding, state, dtype, moved) for moved in ("", moves)]
    losses = [[run.step()] for run in runs]
    if state["backend"] == "stream":
        runs[1].delay(rank)
    for run, found in zip(runs, losses, strict=True):
        found += [run.step() for _ in range(2)]
    wanted, found = (run.snapshot() for run in runs)
    assert losses[0] == losses[1] and found.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []


@every_value(moves=["before the optimizer, before the first step", "after the step"], settings=SETTINGS)
def test_same_bits_as_a_model_that_stays(pool: Pool, settings: str, moves: str) -> None:
    pool.run(check_moved, SETTINGS[settings][0], settings=settings, moves=moves)

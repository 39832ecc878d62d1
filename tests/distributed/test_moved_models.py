"""Models that are moved or cast in mid-run: torch swaps DTensors, and what is known of them must survive that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lightstep
from lightstep.distributed import local_tensor
from tests.covering import every_value
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, device_of
from tests.distributed.sharding_runs import HSDP
from tests.distributed.test_next_forward import random_delays

FSDP2 = {"kind": "fsdp2"}
STREAM = {"backend": "stream", "ring_mib": 1}
SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "resident": (2, FSDP2, {"backend": "resident"}, "float16"),
    "bulk": (2, FSDP2, {"backend": "bulk"}, "bfloat16"),
    "next_forward": (2, FSDP2, {**STREAM, "update": "next_forward"}, "float32"),
    "in_backward": (2, FSDP2, {**STREAM, "update": "in_backward"}, "bfloat16"),
    "overlap": (2, FSDP2, {**STREAM, "update": "overlap"}, "bfloat16"),
    "hsdp": (4, HSDP, {**STREAM, "update": "next_forward"}, "bfloat16"),
}


class Run:
    """A tiny transformer in training; ``moves`` says at which moments it is moved."""

    def __init__(
        self, rank: int, world_size: int, sharding: dict[str, Any], state: dict[str, Any], dtype: str, moves: str = ""
    ) -> None:
        self.rank, self.device, self.moves = rank, device_of(rank, world_size), moves
        scope = "unit" if state.get("update") == "in_backward" else "global"
        scale = {"loss_scale": {"kind": "constant", "scale": 256.0}} if dtype == "float16" else {}
        self.strategy = lightstep.Strategy.load(
            {
                "sharding": sharding,
                "precision": {"parameters": dtype, **scale},
                "optimizer_state": state,
                "clipping": {"max_norm": 0.5, "scope": scope},
            }
        )
        torch.manual_seed(0)
        self.model: nn.Module = self.strategy.prepare_model(TinyTransformer())
        self._move("before the optimizer")
        groups = self.strategy.unwrap_model(self.model).split()
        self.optimizer: Any = self.strategy.create_optimizer(self.model, torch.optim.AdamW, param_groups=groups)
        self._move("before the first step")

    def _move(self, moment: str) -> None:
        """To other memory and back; as :meth:`torch.nn.Module.to` does, which on the CPU has nothing to do."""
        if moment in self.moves:
            self.model.cpu()
            self.model._apply(torch.clone)
            self.model.to(self.device)

    def train(self, steps: int) -> None:
        for step in range(steps):
            for micro in range(2):
                with self.strategy.accumulate(self.model, last=micro == 1):
                    loss = loss_of(self.model, step, micro, self.rank, self.device)
                    self.optimizer.backward(loss)
            del loss
            self._move("before the step")
            self.optimizer.step()
            self._move("after the step")
            if step == 0 and self.device.type == "cpu" and hasattr(self.optimizer._backend, "inner"):
                random_delays(self.optimizer._backend.lanes, step)

    def content(self) -> dict[str, Tensor]:
        self.optimizer.synchronize()
        found = {}
        for name, parameter in self.strategy.unwrap_model(self.model).named_parameters():
            found[name] = local_tensor(parameter).detach().cpu().clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = local_tensor(torch.as_tensor(value)).cpu().clone()
        return found


def check_moved(rank: int, world_size: int, settings: str, moves: str) -> None:
    _, sharding, state, dtype = SETTINGS[settings]
    tested, expected = (Run(rank, world_size, sharding, state, dtype, moved) for moved in (moves, ""))
    for run in (tested, expected):
        run.train(3)
    wanted, found = expected.content(), tested.content()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), f"{key} differs on rank {rank}"


@every_value(moves=["before the optimizer, before the first step", "after the step"], settings=SETTINGS)
def test_same_bits_as_a_model_that_stays(pool: Pool, settings: str, moves: str) -> None:
    pool.run(check_moved, SETTINGS[settings][0], settings=settings, moves=moves)

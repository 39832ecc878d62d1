"""A tiny model on several ranks whose weights are published: by several files of tests."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import Tensor

from lightstep import Strategy
from lightstep.checkpoint.huggingface import full_weights
from tests.distributed.models import TinyTransformer, loss_of

FSDP2: dict[str, Any] = {"kind": "fsdp2"}
HSDP: dict[str, Any] = {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": 2}}
DDP: dict[str, Any] = {"kind": "ddp", "find_unused_parameters": True}

DEFERRED: dict[str, Any] = {"backend": "stream", "update": "next_forward", "ring_mib": 0.01}
OVERLAP: dict[str, Any] = {"backend": "stream", "update": "overlap", "ring_mib": 0.01}
RESIDENT: dict[str, Any] = {"backend": "resident"}
ON_HOST: dict[str, Any] = {**OVERLAP, "weights": {"placement": "host", "device_mib": 0.005}}


class Training:
    """A tiny model on several ranks, each of which is now and then late."""

    def __init__(
        self, rank: int, sharding: dict[str, Any], state: dict[str, Any], rollout: dict[str, Any] | None = None
    ) -> None:
        sent = {"parameters": "bfloat16", "bucket_mib": 0.001, "timeout_s": 60, **(rollout or {})}
        if "mode" not in sent:
            del sent["timeout_s"]
        precision = {"parameters": "float32"} if state == RESIDENT else {}
        weights, state = state.get("weights", {}), {key: value for key, value in state.items() if key != "weights"}
        self.strategy = Strategy.load(
            {
                "sharding": sharding,
                "weights": weights,
                "optimizer_state": state,
                "precision": precision,
                "roles": {"rollout": sent},
            }
        )
        torch.manual_seed(0)
        self.model: Any = self.strategy.prepare_model(lambda: TinyTransformer(tied=True), role=self.strategy.role)
        if self.strategy.role == "trainer":
            self.optimizer: Any = self.strategy.create_optimizer(self.model, lr=1e-2)
        self.steps, self._chance = 0, random.Random(rank)

    def step(self) -> None:
        self.optimizer.backward(loss_of(self.model, self.steps, 0, self.strategy.rank, self.strategy.device))
        self.optimizer.step()
        self.steps += 1

    def be_late(self) -> None:
        time.sleep(self._chance.random() * 0.01)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().bfloat16().clone() for name, tensor in full_weights(self.model).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Tied tensors are sent under one name."""
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

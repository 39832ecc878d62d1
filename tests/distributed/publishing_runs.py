"""A tiny model on several ranks whose weights are published: by several files of tests."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightstep import Strategy
from lightstep.checkpoint.huggingface import full_weights
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.training import OVERLAP, RESIDENT, Training

ON_HOST: dict[str, Any] = {**OVERLAP, "weights": {"placement": "host", "device_mib": 0.005}}


class Publishing(Training):
    """A tiny model on several ranks, each of which is now and then late. Rollout workers have no optimizer."""

    def __init__(self, sharding: dict[str, Any], state: dict[str, Any], rollout: dict[str, Any] | None = None) -> None:
        sent = {"parameters": "bfloat16", "bucket_mib": 0.001, "timeout_s": 60, **(rollout or {})}
        if "mode" not in sent:
            del sent["timeout_s"]
        values = {
            "sharding": sharding,
            "weights": state.get("weights", {}),
            "optimizer_state": {key: value for key, value in state.items() if key != "weights"},
            "precision": {"parameters": "float32"} if state == RESIDENT else {},
            "roles": {"rollout": sent},
        }
        super().__init__(values, lambda: TinyTransformer(tied=True), groups=lambda model: None)
        self._chance = random.Random(self.rank)

    def begin(self, values: Mapping[str, Any]) -> None:
        self.strategy = Strategy.load(values)
        torch.manual_seed(self.seed)
        self.model = self.strategy.prepare_model(self.make, role=self.strategy.role)
        if self.strategy.role == "trainer":
            self.optimizer = self.strategy.create_optimizer(self.model, **self.arguments)

    def loss(self, micro: int = 0) -> Tensor:
        return loss_of(self.model, self.steps, 0, self.strategy.rank, self.strategy.device)

    def micro_batches(self) -> int:
        return 1

    def be_late(self) -> None:
        time.sleep(self._chance.random() * 0.01)

    def weights(self) -> dict[str, Tensor]:
        """Whole, as they are sent."""
        return {name: tensor.detach().cpu().bfloat16().clone() for name, tensor in full_weights(self.model).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Tied tensors are sent under one name."""
    return all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in found.items())

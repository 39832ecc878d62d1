"""Fabric's ``ModelParallelStrategy`` with a lightstep strategy that shards the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep import Strategy
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.training import DDP, DEFERRED, FSDP2, STREAM

LIMIT = {"max_norm": 0.5}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": DDP, "clipping": LIMIT},
    "fsdp2 on the host": {
        "sharding": FSDP2,
        "optimizer_state": DEFERRED,
        "clipping": LIMIT,
        "weights": {"placement": "host", "device_mib": 0.005},
    },
    "fsdp2 in backward": {
        "sharding": FSDP2,
        "optimizer_state": {**STREAM, "update": "in_backward"},
        "clipping": {**LIMIT, "scope": "unit"},
    },
}


def living() -> TinyTransformer:
    """Loading through torch.distributed.checkpoint asks for the state of all that is trainable."""
    model = TinyTransformer()
    model.dead.requires_grad_(False)
    return model


def train(strategy: Strategy, model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[Tensor]:
    for step in steps:
        for micro in range(2):
            with strategy.accumulate(model, last=micro == 1):
                optimizer.backward(loss_of(model, step, micro, rank, strategy.device) / 2)
        assert optimizer.step()
    weights = strategy.unwrap_model(model).state_dict().values()
    return [getattr(weight, "full_tensor", weight.clone)() for weight in weights]


@pytest.mark.parametrize("values", STRATEGIES.values(), ids=STRATEGIES)
@on_ranks(2)
def test_the_same_weights_as_without_fabric(rank: int, world_size: int, values: dict[str, Any], tmp_path: Path) -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    os.environ["TORCHELASTIC_RUN_ID"] = "torchrun sets it"

    def setup() -> tuple[Strategy, Any, nn.Module, Any]:
        torch.manual_seed(0)
        strategy = Strategy.load(values)
        shard = ModelParallelStrategy(
            lambda model, _: strategy.prepare_model(model), data_parallel_size=world_size, tensor_parallel_size=1
        )
        fabric = Fabric(accelerator=strategy.device.type, devices=world_size, strategy=shard)
        fabric.launch()
        model = fabric.setup_module(living())
        return strategy, fabric, model, fabric.setup_optimizers(strategy.create_optimizer(model, lr=1e-2))

    torch.manual_seed(0)
    strategy = Strategy.load(values)
    plain = strategy.prepare_model(living())
    expected = train(strategy, plain, strategy.create_optimizer(plain, lr=1e-2), rank, range(4))
    strategy, fabric, model, optimizer = setup()
    train(strategy, model, optimizer, rank, range(2))
    if values["sharding"]["kind"] == "fsdp2":
        fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
        strategy, fabric, model, optimizer = setup()
        fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    weights = train(strategy, model, optimizer, rank, range(2, 4))
    for mine, theirs in zip(weights, expected, strict=True):
        assert torch.equal(mine, theirs)
    del os.environ["TORCHELASTIC_RUN_ID"]

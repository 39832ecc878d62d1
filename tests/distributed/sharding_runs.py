"""Runs under FSDP2, HSDP and DDP that several files of tests make, and their weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lightstep
from tests.distributed.models import loss_of

FSDP2 = {"kind": "fsdp2"}
HSDP = {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": "auto"}}
DDP = {"kind": "ddp", "find_unused_parameters": True}


def load(sharding: dict[str, Any], **sections: Any) -> lightstep.Strategy:
    return lightstep.Strategy.load({"sharding": sharding, **sections})


def made(
    sharding: dict[str, Any],
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    lr: float = 1e-2,
    sections: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[lightstep.Strategy, Any, Any]:
    """Strategy, prepared model and optimizer."""
    strategy = load(sharding, **(sections or {}))
    prepared = strategy.prepare_model(model)
    return strategy, prepared, strategy.create_optimizer(prepared, optimizer_class, lr=lr, **settings)


def train(
    strategy: lightstep.Strategy,
    model: nn.Module,
    optimizer: Any,
    steps: int = 2,
    micro_batches: int = 2,
) -> list[Any]:
    results = []
    for step in range(steps):
        for micro in range(micro_batches):
            with strategy.accumulate(model, last=micro == micro_batches - 1):
                optimizer.backward(loss_of(model, step, micro, strategy.rank, strategy.device) / micro_batches)
        results.append(optimizer.step())
    return results


def full(parameter: Tensor) -> Tensor:
    whole = parameter.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole.clone()


def weights_of(strategy: lightstep.Strategy, model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in strategy.unwrap_model(model).named_parameters()}


def same_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def same_on_all_ranks(model: nn.Module) -> bool:
    flat = torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    return all(torch.equal(flat, other) for other in everybody)

"""Averages of sharded weights: those of the whole weights, and loaded on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep import Strategy, WeightAverage
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, device_of
from tests.reference.plain_loop import ReferenceAverage

SHARDING = {"fsdp2": {"kind": "fsdp2"}, "ddp": {"kind": "ddp", "find_unused_parameters": True}}
STREAM = {"backend": "stream", "ring_mib": 0.01, "update": "overlap"}


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in tensors.items()}


def check_average(rank: int, world_size: int, folder: str, kind: str) -> None:
    device = device_of(rank, world_size)
    strategy = Strategy.load({"sharding": SHARDING[kind], "clipping": {"max_norm": None}, "optimizer_state": STREAM})
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    average = WeightAverage(model, 0.9)
    inner = strategy.unwrap_model(model)

    def weights() -> dict[str, Tensor]:
        strategy._reshard(model)
        return _whole({name: p.detach().clone() for name, p in inner.named_parameters() if name in average.tensors})

    values = weights()
    expected = ReferenceAverage(values.values(), 0.9)
    for step in range(3):
        for micro in range(2):
            with strategy.accumulate(model, last=micro == 1):
                loss = loss_of(model, step, micro, rank, device)
                if step and not micro:
                    average.update()
                optimizer.backward(loss / 2)
        optimizer.step()
        if step < 2:
            expected.parameters = list(weights().values())
            expected.update()
        own = weights()
        with average.applied(), torch.no_grad():
            loss_of(model, step, 0, rank, device)
            assert not step or not torch.equal(weights()["head.weight"], own["head.weight"])
        assert all(torch.equal(value, own[name]) for name, value in weights().items())
    found = _whole(average.tensors)
    assert all(torch.equal(one, two) for one, two in zip(found.values(), expected.values, strict=True))
    strategy.save_checkpoint(folder, model, optimizer)
    if rank == 0:
        torch.save(found, f"{folder}.pt")


def check_loaded(folder: str, values: dict[str, Any]) -> None:
    strategy = Strategy.load(values)
    model = strategy.prepare_model(TinyTransformer())
    average = WeightAverage(model)
    strategy.load_checkpoint(folder, model)
    found, saved = _whole(average.tensors), torch.load(f"{folder}.pt", map_location=strategy.device)
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)


def test_the_average_of_shards(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_average, 2, folder=str(tmp_path / "fsdp2"), kind="fsdp2")
    pool.run(check_average, 2, folder=str(tmp_path / "ddp"), kind="ddp")
    pool.run(check_loaded, 2, folder=str(tmp_path / "ddp"), values={"sharding": {"kind": "fsdp2"}})
    pool.run(check_loaded, 1, folder=str(tmp_path / "fsdp2"), values={"sharding": {"kind": "single"}})

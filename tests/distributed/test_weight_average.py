"""Averages of sharded weights: those of the whole weights, and loaded on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep import Strategy, WeightAverage
from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import Pool
from tests.distributed.training import DDP, FSDP2, OVERLAP, Training, same_tensors, weights_of
from tests.reference.plain_loop import ReferenceAverage


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in tensors.items()}


def check_average(rank: int, folder: str, sharding: dict[str, Any]) -> None:
    run = Training({"sharding": sharding, "clipping": {"max_norm": None}, "optimizer_state": OVERLAP})
    average = WeightAverage(run.model, 0.9)

    def weights() -> dict[str, Tensor]:
        run.strategy._reshard(run.model)
        return {name: value for name, value in weights_of(run.strategy, run.model).items() if name in average.tensors}

    values = weights()
    expected = ReferenceAverage(values.values(), 0.9)
    for step in range(3):
        for micro in range(2):
            with run.accumulate(last=micro == 1):
                loss = run.loss(micro)
                if step and not micro:
                    average.update()
                run.optimizer.backward(loss / 2)
        run.optimizer.step()
        run.steps += 1
        if step < 2:
            expected.parameters = list(weights().values())
            expected.update()
        own = weights()
        with average.applied():
            run.evaluate()
            assert not step or not torch.equal(weights()["head.weight"], own["head.weight"])
        same_tensors(weights(), own)
    found = _whole(average.tensors)
    assert all(torch.equal(one, two) for one, two in zip(found.values(), expected.values, strict=True))
    run.strategy.save_checkpoint(folder, run.model, run.optimizer)
    if rank == 0:
        torch.save(found, f"{folder}.pt")


def check_loaded(folder: str, values: dict[str, Any]) -> None:
    strategy = Strategy.load(values)
    model = strategy.prepare_model(TinyTransformer())
    average = WeightAverage(model)
    strategy.load_checkpoint(folder, model)
    same_tensors(_whole(average.tensors), torch.load(f"{folder}.pt", map_location=strategy.device))


def test_the_average_of_shards(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_average, 2, folder=str(tmp_path / "fsdp2"), sharding=FSDP2)
    pool.run(check_average, 2, folder=str(tmp_path / "ddp"), sharding=DDP)
    pool.run(check_loaded, 2, folder=str(tmp_path / "ddp"), values={"sharding": {"kind": "fsdp2"}})
    pool.run(check_loaded, 1, folder=str(tmp_path / "fsdp2"), values={"sharding": {"kind": "single"}})

"""Two ranks train with Muon on shards until one of them fails in the middle of an update."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightstep
from lightstep.optimizer.muon import Orthogonalizer

STATE = {"backend": "stream", "update": "overlap", "ring_mib": 0.02}


def train_as(rank: int, folder: str) -> None:
    """In a process of this rank's own, which ends with the error. ``folder`` gets its text."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    patience = datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=patience)
    try:
        _steps(rank)
    except BaseException as failure:
        Path(folder, f"rank{rank}").write_text(f"{type(failure).__name__}: {failure}")
        raise
    finally:
        dist.destroy_process_group()


def _steps(rank: int) -> None:
    strategy = lightstep.Strategy.load({"sharding": {"kind": "fsdp2"}, "optimizer_state": STATE})
    model = strategy.prepare_model(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))))
    optimizer = strategy.create_optimizer(model, torch.optim.Muon, lr=0.01)
    original: Any = Orthogonalizer.__call__
    done: list[int] = []

    def orthogonalize(self: Orthogonalizer, direction: Tensor, group: Any) -> Tensor:
        if rank == 1 and len(done) == 2:
            raise torch.OutOfMemoryError("no more room")
        return original(self, direction, group)

    Orthogonalizer.__call__ = orthogonalize  # type: ignore[method-assign]
    for step in range(4):
        optimizer.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum())
        optimizer.step()
        optimizer.synchronize()
        done.append(step)

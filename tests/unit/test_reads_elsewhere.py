"""Updates that are under way and readers that come by other ways: another module, another thread."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lightstep
from lightstep.sharding.parameter_reads import DeferredUpdates
from lightstep.sharding.prepared_model import PreparedModel

OVERLAP = {"backend": "stream", "update": "next_forward", "ring_mib": 0.02}


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


class HeadLoss(nn.Module):
    """As fused cross entropies that keep the head's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def trained() -> tuple[nn.Module, Any]:
    """After a first step, which makes state; lanes are slow from here on."""
    torch.manual_seed(0)
    strategy = lightstep.Strategy.load({"optimizer_state": OVERLAP})
    model = strategy.prepare_model(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    step(model, optimizer)
    optimizer._backend.lanes.delay = lambda lane: time.sleep(0.01)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
    optimizer.step()


@pytest.mark.parametrize("parametrized", [True, False])
def test_a_module_of_later_reads_what_is_up_to_date(parametrized: bool) -> None:
    """A parametrization of the model's layer, or a module beside the model."""
    model, optimizer = trained()
    if parametrized:
        parametrize.register_parametrization(model[3], "weight", Halved())
    reader = model[3] if parametrized else HeadLoss(model[3].weight)
    step(model, optimizer)
    found = reader.weight.detach().clone()
    optimizer.synchronize()
    assert torch.equal(found, model[3].weight)


def test_a_read_while_another_thread_collects_the_optimizer() -> None:
    for _ in range(3):
        model, optimizer = trained()
        step(model, optimizer)
        optimizer.me = optimizer
        gc.disable()
        del optimizer
        collector = threading.Thread(target=gc.collect)
        collector.start()
        time.sleep(0.01)
        found = model[3].weight.detach().clone()
        collector.join()
        gc.enable()
        assert torch.equal(found, model[3].weight)


def test_what_a_deleted_optimizer_has_left_is_done_before_a_forward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last block there may be compiled code, whose reads nobody sees."""
    model, optimizer = trained()
    monkeypatch.setattr(DeferredUpdates, "shut_down_orphaned", lambda self: None)  # another thread would do it
    step(model, optimizer)
    weight, before = model[3].weight, optimizer.engine.queue
    del optimizer
    assert before.pending
    PreparedModel.of(model).gates._updates.wait()
    assert not before.pending and torch.isfinite(weight).all()

"""Masters follow the model, in part or as a whole, and before the first update they are what the user gave.

Whole weights that a user writes to, in every way, are programs of ``test_programs.py``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import lightstep
from tests.reference.pair import EVERY_TIME

# -- before the first update a master is what the user gave


VALUES = {"lr": 1e-2, "weight_decay": 0.1}


def given() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Run:
    """A model under one backend and the same in plain torch, with fp32 masters of the given weights."""

    def __init__(self, kind: str) -> None:
        self.strategy = lightstep.Strategy.load({"clipping": {"max_norm": None}, "optimizer_state": EVERY_TIME[kind]})
        self.model = self.strategy.prepare_model(given())
        self.optimizer: Any = self.strategy.create_optimizer(self.model, **VALUES)
        self.masters = [nn.Parameter(parameter.detach()) for parameter in given().parameters()]
        self.plain = torch.optim.AdamW(self.masters, fused=True, **VALUES)

    def check(self, model: nn.Module, optimizer: Any, layers: tuple[int, ...] = (0, 2)) -> None:
        """Two more steps of these layers are those of plain torch."""
        masters = dict(zip(self.model.state_dict(), self.masters, strict=True))
        for step in range(2):
            for name, parameter in model.named_parameters():
                if int(name[0]) in layers:
                    parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
                    masters[name].grad = parameter.grad.float()
            optimizer.step()
            self.plain.step()
            self.plain.zero_grad()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, masters[name].to(parameter.dtype)), name
            if parameter in optimizer.state:
                assert torch.equal(optimizer.state[parameter]["master"].cpu(), masters[name]), name


kinds = pytest.mark.parametrize("kind", ["resident", "stream-in-backward-and-forward"])


@kinds
def test_state_that_torch_makes_to_look_at_takes_no_master_away(kind: str) -> None:
    run = Run(kind)
    get_state_dict(run.model, run.optimizer)  # makes state by a step with zero gradients
    run.check(run.model, run.optimizer)


@kinds
def test_plain_torchs_state_is_that_of_the_weights_that_were_given(kind: str) -> None:
    """It holds no masters."""
    run = Run(kind)
    for master in run.masters:
        master.grad = torch.full_like(master, 0.3)
    run.plain.step()
    model = given()
    model.load_state_dict(dict(zip(model.state_dict(), run.masters, strict=True)))
    model = run.strategy.prepare_model(model)
    optimizer = run.strategy.create_optimizer(model, **VALUES)
    optimizer.load_state_dict(copy.deepcopy(run.plain.state_dict()))
    run.check(model, optimizer)


def test_looking_leaves_the_optimizer_free_to_be_sharded() -> None:
    run = Run("resident")
    state = run.optimizer.state_dict()
    assert sorted(state["state"]) == [0, 1, 2, 3] and all([*own] == ["master"] for own in state["state"].values())
    run.optimizer.load_state_dict(state)
    assert not run.optimizer.is_set_up and not run.optimizer.state
    run.check(run.model, run.optimizer)

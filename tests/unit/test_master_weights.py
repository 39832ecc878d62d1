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
from tests.covering import every_value
from tests.reference.pair import BACKENDS, EVERY_TIME, TWO_GROUPS, Pair, same, scale_for

LOW = ["bfloat16", "float16"]


def build(parameters: str, backend: str, name: str = "AdamW") -> Pair:
    return Pair(
        *TWO_GROUPS[name],
        parameters=parameters,
        backend=backend,
        micro_batches=2,
        max_norm=0.35,
        late_from=3,
        **scale_for(parameters),
    )


@every_value(parameters=LOW, backend=BACKENDS)
def test_one_edited_row_is_never_reverted(parameters: str, backend: str) -> None:
    """A row is zeroed, as for a padding token; a step with zero gradient and no decay leaves it exactly there."""
    pair = build(parameters, backend, "SGD-momentum")
    for group in pair.optimizer.param_groups:
        group.update(weight_decay=0.0, momentum=0.0, nesterov=False)
    pair.optimizer.backward(pair.model.embed.weight.float().square().sum())
    pair.optimizer.step()
    with torch.no_grad():
        pair.model.embed.weight[3] = 0.0
    edited = pair.model.embed.weight.detach().clone()
    for _ in range(3):
        pair.model.embed.weight.grad = torch.zeros_like(pair.model.embed.weight)
        pair.optimizer.step()
    assert torch.equal(pair.model.embed.weight, edited)


@every_value(parameters=LOW, backend=BACKENDS)
def test_refresh_rebuilds_every_master_from_the_model(parameters: str, backend: str) -> None:
    pair = build(parameters, backend)
    pair.train(5)
    rounded = 0
    for _, tested, expected in pair.named():
        if not tested.requires_grad or not pair.reference.state(expected):
            continue
        rounded += int(not torch.equal(pair.optimizer.state[tested]["master"].to(tested.device), tested.float()))
        pair.reference.adopt(expected)
    assert rounded >= 5, "the masters held digits that the weights do not"
    pair.optimizer.refresh_master_weights()
    for name, tested, expected in pair.named():
        if pair.reference.state(expected):
            same(name, pair.optimizer.state[tested]["master"], tested.detach().float())
    pair.train(5)


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

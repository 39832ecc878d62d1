"""Error texts name tensors by shape and dtype, and print none of their elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.error_text import error_text, value_text


def is_short(text: str) -> bool:
    return "tensor([" not in text and len(text) < 600


def test_errors_with_tensors() -> None:
    weight = nn.Parameter(torch.zeros(300, 300))
    assert error_text(KeyError(weight)) == "KeyError: a tensor of shape (300, 300) and torch.float32"
    assert error_text(KeyError("exp_avg")) == "KeyError: 'exp_avg'"
    assert error_text(ValueError("plain")) == "ValueError: plain"
    assert len(error_text(RuntimeError("x" * 10**6))) < 1100


def test_values_with_tensors() -> None:
    weight = torch.zeros(300, 300)
    assert value_text([weight] * 5).startswith("[a tensor of shape (300, 300) and torch.float32, ")
    assert is_short(value_text([weight] * 5)) and is_short(value_text({"params": [weight]}, 80).replace("tensor([", ""))
    assert value_text(torch.tensor(0.5)) == "tensor(0.5000)"
    assert value_text("a") == "'a'"


class Forgetful(torch.optim.SGD):
    """Finds no entry of its own for a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        known: dict[Tensor, int] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() >= 300:
                    known[parameter] += 1
                parameter.add_(parameter.grad)


def test_a_class_that_fails_when_it_is_tried() -> None:
    strategy = lightstep.Strategy.load({"optimizer_state": {"backend": "resident"}})
    model: Any = strategy.prepare_model(nn.Linear(64, 64))
    with pytest.raises(TypeError, match="KeyError: a tensor of shape") as raised:
        strategy.create_optimizer(model, Forgetful, lr=1e-2)
    assert is_short(str(raised.value)), str(raised.value)[:300]


def test_rules_that_are_given_parameters() -> None:
    model = nn.Linear(64, 64)
    for wrong in ({"names": list(model.parameters())}, {"kinds": model.weight}):
        with pytest.raises((TypeError, ValueError)) as raised:
            lightstep.Rule(torch.optim.AdamW, **wrong)
        assert is_short(str(raised.value)), str(raised.value)[:300]

"""Loops written for ``torch.optim``: what they do with a lightstep optimizer in their hands."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep import Strategy
from lightstep.optimizer.base import BaseOptimizer
from tests.reference.tiny_model import TinyModel, loss_of

SCALE = {"kind": "dynamic", "init_scale": 2.0**8, "growth_interval": 2}
FP16 = {"precision": {"parameters": "float16", "loss_scale": SCALE}}


def torch_loop(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, micro_batches: int) -> list[Tensor]:
    """As in a script that knows nothing of lightstep; returns the norms."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            (loss_of(model, step, micro) / micro_batches).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
    return norms


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_fp32_loop_with_torchs_own_clipping(backend: str, optimizer_class: Any) -> None:
    torch.manual_seed(0)
    expected = TinyModel()
    model = copy.deepcopy(expected)
    values = {"precision": {"parameters": "float32"}, "optimizer_state": {"backend": backend}}
    strategy = Strategy.load(values, overrides={"clipping.max_norm": None})
    optimizer = strategy.create_optimizer(strategy.prepare_model(model), optimizer_class, lr=1e-2)
    reference = optimizer_class([p for p in expected.parameters() if p.requires_grad], lr=1e-2, fused=True)
    norms = torch_loop(model, optimizer, steps=6, micro_batches=2)
    assert norms == torch_loop(expected, reference, steps=6, micro_batches=2)
    assert any(norm > 0.5 for norm in norms)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected.state_dict()[name]), name


def prepared(values: dict[str, Any]) -> tuple[Strategy, nn.Module, BaseOptimizer]:
    torch.manual_seed(0)
    strategy = Strategy.load(values)
    model = strategy.prepare_model(TinyModel())
    return strategy, model, strategy.create_optimizer(model, lr=1e-2)


VALUES = {
    "fp16": FP16,
    "added in fp16": {"precision": {**FP16["precision"], "reduce": "parameters"}},
    "constant": {"precision": {"parameters": "float32", "loss_scale": {"kind": "constant", "scale": 64}}},
    "stream": {**FP16, "optimizer_state": {"backend": "stream", "update": "next_forward"}},
}
scaled = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)


@scaled
def test_a_backward_that_was_not_scaled_is_refused_before_anything_happens(values: dict[str, Any]) -> None:
    _, model, optimizer = prepared(values)
    _, other_model, other = prepared(values)

    def train(steps: range) -> None:
        for step in steps:
            for one, its_model in ((optimizer, model), (other, other_model)):
                one.backward(loss_of(its_model, step))
                assert one.step()

    train(range(3))
    loss_of(model, 3).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call optimizer\.backward\(loss\)"):
            optimizer.step()
    optimizer.zero_grad()
    train(range(4, 6))
    optimizer.synchronize()
    other.synchronize()
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_that_the_model_gave_up_are_not_held_against_the_next_ones() -> None:
    _, model, optimizer = prepared(FP16)
    loss_of(model, 0).backward()
    model.zero_grad()
    optimizer.backward(loss_of(model, 1))
    assert optimizer.step()
    loss_of(model, 2).backward()
    model.zero_grad()
    with pytest.warns(UserWarning, match="no gradient"):
        optimizer.step()


def test_one_of_several_micro_batches_that_was_not_scaled_is_refused() -> None:
    _, model, optimizer = prepared(FP16)
    optimizer.backward(loss_of(model, 0, 0))
    loss_of(model, 0, 1).backward()
    optimizer.backward(loss_of(model, 0, 2))
    with pytest.raises(RuntimeError, match="was not multiplied by this optimizer's loss scale"):
        optimizer.step()


def test_gradients_that_were_assigned_are_taken_as_scaled() -> None:
    _, model, optimizer = prepared(FP16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for p in model.parameters())  # as torch: a frozen parameter with a gradient is updated too
    result = optimizer.step()
    assert result
    assert float(result.grad_norm) == pytest.approx(count**0.5 / 2**8)


def two_optimizers(scale: dict[str, Any]) -> tuple[nn.Module, BaseOptimizer, BaseOptimizer]:
    strategy = Strategy.load({"precision": {"parameters": "float16", "loss_scale": scale}})
    model = strategy.prepare_model(TinyModel())
    first, second = ([{"params": group}] for group in model.split())  # type: ignore[operator]
    return model, *(strategy.create_optimizer(model, param_groups=groups, lr=1e-2) for groups in (first, second))


def test_two_optimizers_share_a_backward_if_their_scales_never_part() -> None:
    model, first, second = two_optimizers({"kind": "constant", "scale": 64})
    first.backward(loss_of(model, 0))
    assert first.step() and second.step()
    model, first, second = two_optimizers(SCALE)
    first.backward(loss_of(model, 0))
    assert first.step()
    with pytest.raises(RuntimeError, match="DynamicLossScale"):
        second.step()


def test_gradients_of_a_step_that_is_given_up_are_set_to_zero() -> None:
    _, model, optimizer = prepared({"precision": {"parameters": "bfloat16"}})
    optimizer.backward(loss_of(model, 0))
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    optimizer.grad_norm()
    optimizer.zero_grad(set_to_none=False)
    assert {name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()} == with_gradient


@pytest.mark.parametrize("update", ["at_step", "in_backward"])
def test_gradients_of_the_last_step_alone_are_set_to_zero(update: str) -> None:
    state = {"backend": "stream", "update": update}
    strategy = Strategy.load({"clipping": {"max_norm": None}, "optimizer_state": state})
    model = strategy.prepare_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    for used in (model, model[0]):
        optimizer.backward(used(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum())
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert [p.grad is not None for p in model.parameters()] == [True, True, False, False]

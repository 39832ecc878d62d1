"""``swap_tensors`` on parameters in mid-run: it refuses tensors with weak references, and takes hooks from others.

That the bits of a run stay the same is a program of ``test_programs.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.precision.loss_scale import ConstantLossScale
from tests.training import made

Move = Callable[[nn.Module], object]


def reload(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


@pytest.fixture(autouse=True)
def swaps() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))


@pytest.mark.parametrize("changed", [reload, lambda model: model.bfloat16()], ids=["swapped", "cast"])
def test_a_backward_by_hand_that_nobody_has_watched_is_said(changed: Move) -> None:
    """With one micro-batch nothing is wrong; from the next step or ``optimizer.backward()`` on all are watched."""
    strategy = lightstep.Strategy.load("resident")
    model = strategy.prepare_model(network())
    if changed is not reload:
        model.float()
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    changed(model)
    inputs = torch.ones(2, 6, dtype=torch.bfloat16)
    for said in (True, False):
        model(inputs).float().square().mean().backward()
        with pytest.warns(UserWarning, match="sums in bfloat16 instead of fp32") if said else nullcontext():
            optimizer.step()
    for _ in range(2):
        model(inputs).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    optimizer.zero_grad()
    changed(model.float())
    for _ in range(2):
        optimizer.backward(model(inputs.to(model[0][0].weight.dtype)).float().square().mean())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_loss_by_hand_is_seen_not_to_be_scaled() -> None:
    """After a loss scale has been set, and after a swap in the second step at the latest."""
    _, model, optimizer = made("resident", network(), torch.optim.AdamW, lr=1e-2)
    optimizer.loss_scale = ConstantLossScale(1024.0)
    inputs = torch.ones(2, 6, dtype=torch.bfloat16)
    for swapped in (False, True):
        if swapped:
            reload(model)
            model(inputs).float().mean().backward()
            with pytest.warns(UserWarning, match="divided by ConstantLossScale"):
                optimizer.step()
        model(inputs).float().mean().backward()
        with pytest.raises(RuntimeError, match="not multiplied by this optimizer's loss scale"):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["resident", "fp16", "stream", "stream-overlap"])
def test_parameters_have_no_weak_references(name: str) -> None:
    strategy, model, optimizer = made(name, network(), torch.optim.AdamW, lr=1e-2)
    for step in range(4):
        with strategy.accumulate(model, last=step % 2 == 1):
            optimizer.backward(model(torch.ones(2, 6, dtype=strategy.parameter_dtype)).float().mean())
        if step % 2:
            optimizer.step()
    optimizer.synchronize()
    assert not [key for key, parameter in model.named_parameters() if weakref.getweakrefs(parameter)]


def test_a_hook_of_the_users_survives_with_ours() -> None:
    _, model, optimizer = made("resident", network(), torch.optim.AdamW)
    called: list[Tensor] = []
    first = next(model.parameters())
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum())
        optimizer.step()
        model._apply(torch.clone)
    assert not called
    first.register_hook(called.append)
    optimizer.backward(model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum())
    assert len(called) == 1

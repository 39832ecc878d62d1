"""``swap_tensors`` on parameters in mid-run: it refuses tensors with weak references, and takes hooks from others."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.precision.loss_scale import ConstantLossScale
from tests.training import made, random_delays

Move = Callable[[nn.Module], object]


def move(model: nn.Module) -> None:
    """What ``model.to(...)`` does where it has another device to go to."""
    model._apply(torch.clone)


def reload(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def cast(model: nn.Module) -> None:
    """There and back; every 16-bit number is an fp32 number."""
    dtype = next(model.parameters()).dtype
    model.float().to(dtype)


@pytest.fixture(autouse=True)
def swaps() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))


def train(strategy: lightstep.Strategy, moved: Move | None) -> tuple[nn.Module, Any]:
    """Two micro-batches a step, by turns with ``optimizer.backward`` and, where nothing is scaled, without it."""
    model = strategy.prepare_model(network())
    if moved is not None:
        moved(model)  # the fp32 values that masters start from are kept
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    by_hand = strategy.config.precision.loss_scale.kind == "none"
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(2):
            inputs = torch.randn(4, 6, generator=generator).to(next(model.parameters()).dtype)
            with strategy.accumulate(model, last=micro == 1):
                loss = model(inputs).float().square().mean()
                loss.backward() if step % 2 and by_hand else optimizer.backward(loss)
                del loss
        optimizer.step()
        if step == 1 and strategy.config.optimizer_state.backend == "stream":
            random_delays(optimizer._backend.lanes, step)
        if moved is not None:
            moved(model)
    optimizer.synchronize()
    return model, optimizer


def overrides(name: str, update: str) -> dict[str, Any]:
    if name == "fp16":
        return {"precision.loss_scale": {"kind": "constant", "scale": 256.0}}
    clipping = {"clipping.scope": "unit"} if update == "in_backward" else {}
    return {"optimizer_state.update": update, **clipping}


@functools.cache
def run(name: str, update: str, moved: Move | None) -> tuple[nn.Module, Any]:
    return train(lightstep.Strategy.load(name, overrides=overrides(name, update)), moved)


@pytest.mark.parametrize(
    ("name", "update", "moved"),
    [
        *(("resident", "at_step", moved) for moved in (move, reload, cast)),
        *(("stream", "in_backward", move), ("stream", "in_backward", cast), ("stream", "at_step", reload)),
        *(("stream", "overlap", moved) for moved in (move, reload, cast)),
        *(("fp16", "at_step", cast), ("fp32", "at_step", move)),
    ],
)
def test_same_bits_with_parameters_that_are_swapped(name: str, update: str, moved: Move) -> None:
    (model, optimizer), (expected, other) = run(name, update, moved), run(name, update, None)
    for (key, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, wanted), key
        for entry, value in other.state[wanted].items():
            assert torch.equal(torch.as_tensor(optimizer.state[parameter][entry]), torch.as_tensor(value)), (key, entry)


@pytest.mark.parametrize("changed", [reload, lambda model: model.bfloat16()], ids=["swapped", "cast"])
def test_a_backward_by_hand_that_nobody_has_watched_is_said(changed: Move) -> None:
    """With one micro-batch nothing is wrong; from the next step on all are watched."""
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
    strategy = lightstep.Strategy.load(name)
    model, _ = train(strategy, None)
    assert not [key for key, parameter in model.named_parameters() if weakref.getweakrefs(parameter)]


def test_a_hook_of_the_users_survives_with_ours() -> None:
    _, model, optimizer = made("resident", network(), torch.optim.AdamW)
    called: list[Tensor] = []
    first = next(model.parameters())
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum())
        optimizer.step()
        move(model)
    assert not called
    first.register_hook(called.append)
    optimizer.backward(model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum())
    assert len(called) == 1

"""offload_fsdp_optimizer / load_fsdp_optimizer: the state of any torch optimizer goes to the host and comes back.

Every test runs on each kind of device this machine has. On a machine without an accelerator host and device are the
same memory: what is left to check there is that nothing changes; the device argument is checked with ``meta``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lightstep
from lightstep import load_fsdp_optimizer, offload_fsdp_optimizer
from tests.reference.lion import Lion
from tests.reference.pair import same_tree, strategy_values

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Adam-amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "SGD-momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}),
    "Lion": (Lion, {"lr": 1e-3}),
}

devices = pytest.mark.parametrize("device", DEVICES)


def build(name: str, device: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)
    optimizer_class, values = OPTIMIZERS[name]
    return model, optimizer_class(model.parameters(), **values)


def train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).device)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Everything in the state that has a dimension."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.dim() > 0]


def snapshot(optimizer: Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())


@devices
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_the_pair_is_training_without(name: str, device: str) -> None:
    """Both directions move the state, change nothing, and move nothing the second time."""
    model, optimizer = build(name, device)
    plain_model, plain = build(name, device)
    train(plain_model, plain, 4)
    for move in (offload_fsdp_optimizer, load_fsdp_optimizer):
        move(optimizer)
        assert not optimizer.state, "a fresh one has none"
    for step in range(4):
        train(model, optimizer, 1, first=step)
        before = snapshot(optimizer)
        for move, place in ((offload_fsdp_optimizer, "cpu"), (load_fsdp_optimizer, device)):
            move(optimizer)
            tensors = state_tensors(optimizer)
            assert all(value.device.type == place for value in tensors)
            same_tree(move.__name__, optimizer.state_dict(), before)
            move(optimizer)
            again = state_tensors(optimizer)
            assert all(x is y for x, y in zip(again, tensors, strict=True)), "the second call moved something"
            same_tree(f"{move.__name__} again", optimizer.state_dict(), before)
        assert all(p.device.type == device for p in model.parameters())
    for tested, expected in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(tested, expected)
    same_tree(name, optimizer.state_dict(), plain.state_dict())


@devices
def test_host_buffers_are_reused_and_follow_the_state(device: str) -> None:
    model, optimizer = build("AdamW", device)
    train(model, optimizer, 1)
    offload_fsdp_optimizer(optimizer)
    first = [value.data_ptr() for value in state_tensors(optimizer)]
    for step in range(1, 4):
        load_fsdp_optimizer(optimizer)
        train(model, optimizer, 1, first=step)
        before = snapshot(optimizer)
        offload_fsdp_optimizer(optimizer)
        assert [value.data_ptr() for value in state_tensors(optimizer)] == first
        same_tree(f"step {step}", optimizer.state_dict(), before)


@devices
def test_what_is_no_tensor_is_left_alone(device: str) -> None:
    model, optimizer = build("AdamW", device)
    train(model, optimizer, 1)
    marker = object()
    extras = {"count": 3, "name": "x", "nothing": None, "marker": marker, "nested": {"deep": [1, 2]}}
    for state in optimizer.state.values():
        state.update(extras)
    for move in (offload_fsdp_optimizer, load_fsdp_optimizer):
        move(optimizer)
        for state in optimizer.state.values():
            assert all(state[key] is value for key, value in extras.items())


@devices
def test_state_of_another_optimizer_is_not_disturbed(device: str) -> None:
    """Buffers belong to one optimizer: two over the same parameters keep two states."""
    model, first = build("AdamW", device)
    second = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.1, 0.2))
    train(model, first, 1)
    train(model, second, 1, first=1)
    before = snapshot(first), snapshot(second)
    for optimizer in (first, second):
        offload_fsdp_optimizer(optimizer)
    same_tree("first", first.state_dict(), before[0])
    same_tree("second", second.state_dict(), before[1])


def test_the_device_argument_is_honoured() -> None:
    model, optimizer = build("AdamW", "cpu")
    train(model, optimizer, 1)
    load_fsdp_optimizer(optimizer, device="meta")
    assert {value.device.type for value in state_tensors(optimizer)} == {"meta"}
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_the_pair_refuses_what_places_its_own_state() -> None:
    strategy = lightstep.Strategy.load(strategy_values("bfloat16", "bulk"))
    optimizer = strategy.create_optimizer(strategy.prepare_model(nn.Linear(3, 2)), torch.optim.AdamW, lr=1e-3)
    for move in (offload_fsdp_optimizer, load_fsdp_optimizer):
        with pytest.raises(TypeError, match="places its own state"):
            move(optimizer)

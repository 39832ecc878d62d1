"""Modules that ``torch.jit`` has scripted or traced: trained as in the plain loop, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.config import ConfigError
from tests.covering import every_value
from tests.reference.pair import BACKENDS
from tests.reference.plain_loop import ReferenceLoop

DEFERRED = ["next_forward", "overlap", "in_backward"]


@pytest.fixture(autouse=True)
def unfused() -> Iterator[None]:
    """The first calls of a scripted module run unfused, later ones fused, with other bits."""
    with torch.jit.optimized_execution(False):
        yield


def inner(how: str) -> nn.Module:
    """Two layers, in bf16: a trace keeps the dtype that it has seen."""
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).bfloat16()
    made: Any = torch.jit.script(plain) if how == "script" else torch.jit.trace(plain, inputs_of(0, 0))
    return made  # type: ignore[no-any-return]


def network(how: str, root: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return inner(how) if root else nn.Sequential(nn.Linear(6, 6), inner(how), nn.Linear(6, 3)).bfloat16()


def inputs_of(step: int, micro: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + micro)).bfloat16()


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.backward(model(inputs_of(step, 0)).float().square().mean())
        optimizer.step()


@every_value(how=["script", "trace"], backend=BACKENDS, root=[False, True])
def test_same_bits_as_the_plain_loop(how: str, backend: str, root: bool) -> None:
    values: dict[str, Any] = {"optimizer_state": BACKENDS[backend], "clipping": {"max_norm": 0.5}}
    strategy = lightstep.Strategy.load(values)
    expected = network(how, root)
    model = strategy.prepare_model(network(how, root))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    reference = ReferenceLoop([{"params": list(expected.parameters())}], torch.optim.AdamW, max_norm=0.5, lr=1e-2)
    for step in range(5):
        for micro in range(2):
            optimizer.backward(model(inputs_of(step, micro)).float().square().mean())
            reference.backward(expected(inputs_of(step, micro)).float().square().mean())
        assert reference.step(optimizer.step().grad_norm)
        for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(parameter, wanted), f"step {step}: {name}"


@every_value(update=DEFERRED, how=["script", "trace"])
def test_deferred_updates_are_refused_by_name(how: str, update: str) -> None:
    clipping = {"clipping.scope": "unit"} if update == "in_backward" else {}
    strategy = lightstep.Strategy.load("stream", overrides={"optimizer_state.update": update, **clipping})
    kind = "RecursiveScriptModule" if how == "script" else "TopLevelTracedModule"
    with pytest.raises(ConfigError, match=rf"torch\.jit: 1 \({kind}\)\. .* is {update}: set it to at_step"):
        strategy.prepare_model(network(how))
    with pytest.raises(ConfigError, match=rf"torch\.jit: the model \({kind}\)"):
        strategy.prepare_model(network(how, root=True))


@every_value(update=DEFERRED, how=["script", "trace"])
def test_frozen_ones_are_no_obstacle(how: str, update: str) -> None:
    clipping = {"clipping.scope": "unit"} if update == "in_backward" else {}
    runs = []
    for chosen in (update, "at_step"):
        strategy = lightstep.Strategy.load("stream", overrides={"optimizer_state.update": chosen, **clipping})
        given = network(how)
        for parameter in given[1].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        model: Any = strategy.prepare_model(given)
        optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
        train(model, optimizer, range(4))
        runs.append(copy.deepcopy([parameter.detach() for parameter in model.parameters()]))
        dict(model.named_parameters())["1.0.weight"].requires_grad_(True)
        if chosen != "at_step":
            with pytest.raises(ConfigError, match=r"torch\.jit: 1 "):
                train(model, optimizer, [4])
    assert all(map(torch.equal, *runs))

"""``torch.compile``d models: the same weights at every update time, and how often the gates interrupt a graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightstep import Strategy
from lightstep.optimizer.base import BaseOptimizer
from tests.distributed.models import Block, TinyTransformer, loss_of
from tests.training import OnVectors, assert_same

CLIPPED: dict[str, Any] = {"clipping": {"max_norm": 0.5, "scope": "unit"}}
UPDATES: dict[str, dict[str, Any]] = {
    "at_step": CLIPPED,
    "next_forward": {**CLIPPED, "optimizer_state": {"backend": "stream", "update": "next_forward"}},
    "in_backward": {**CLIPPED, "optimizer_state": {"backend": "stream", "update": "in_backward"}},
}
Compile = Callable[[nn.Module, Any], nn.Module]


def whole(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[no-any-return]


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def blocks(model: nn.Module, backend: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend)
    return model


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def train(strategy: Strategy, model: nn.Module, optimizer: BaseOptimizer) -> None:
    for step in range(3):
        for micro in range(2):
            with strategy.accumulate(model, last=micro == 1):
                optimizer.backward(loss_of(model, step, micro, 0, strategy.device) / 2)
        assert optimizer.step()


def run(
    values: dict[str, Any],
    compile_: Compile = lambda model, _: model,
    backend: Any = "eager",
    *,
    before: bool = False,
    early: bool = False,
) -> list[Tensor]:
    """The weights after training a model that was compiled before or after ``prepare_model``.

    Args:
        early: there are forwards before there is an optimizer.
    """
    strategy = Strategy.load(values)
    torch.manual_seed(0)
    if before:
        model = strategy.prepare_model(compile_(TinyTransformer(), backend))
    else:
        model = compile_(strategy.prepare_model(TinyTransformer()), backend)
    if early:
        with torch.no_grad():
            loss_of(model, 0, 0, 0, strategy.device)
        loss_of(model, 0, 0, 0, strategy.device)
    train(strategy, model, strategy.create_optimizer(model, lr=1e-2))
    return [weight.clone() for weight in strategy.unwrap_model(model).state_dict().values()]


@functools.cache
def uncompiled(update: str) -> list[Tensor]:
    return run(UPDATES[update])


def same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("update", "compile_", "before"),
    [
        ("at_step", whole, False),
        ("next_forward", whole, True),
        ("in_backward", blocks, True),
    ],
)
def test_the_same_weights(update: str, compile_: Compile, before: bool) -> None:
    """``eager`` runs the traced graph, so that every bit is that of the model that was not compiled."""
    same(run(UPDATES[update], compile_, before=before), uncompiled(update))


@pytest.mark.parametrize("compile_", [in_place, blocks])
def test_forwards_before_there_is_an_optimizer(compile_: Compile) -> None:
    """Code that was compiled without gates would read weights whose updates are under way."""
    same(run(UPDATES["next_forward"], compile_, early=True), uncompiled("next_forward"))


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(depth))
        self.head = nn.Linear(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize(
    ("update", "compile_", "with_gates"),
    [("next_forward", whole, 3), ("next_forward", blocks, 1)],
)
def test_graphs_do_not_grow_with_the_model(update: str, compile_: Compile, with_gates: int) -> None:
    """Embedding, blocks, head, all blocks sharing one graph; the next test has the one graph of updates at the step.

    torch 2.11 divides the forward of a whole model once more.
    """
    more = compile_ is whole and torch.__version__.startswith("2.11.")
    for depth in (2, 9):  # more than torch compiles one function for
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        strategy = Strategy.load(UPDATES[update])
        model = compile_(strategy.prepare_model(Deep(depth)), counter)
        train(strategy, model, strategy.create_optimizer(model, lr=1e-2))
        assert counter.frame_count == with_gates + more


def test_one_graph_can_be_demanded_with_updates_at_the_step() -> None:
    for update in ("at_step", "next_forward"):
        strategy = Strategy.load(UPDATES[update])
        model = torch.compile(strategy.prepare_model(Deep(2)), backend="eager", fullgraph=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        if update == "at_step":
            train(strategy, model, optimizer)
        else:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
                train(strategy, model, optimizer)


class WithCompiledFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.multiply: Any = torch.compile(nn.functional.linear, backend="eager")

    def forward(self, inputs: Tensor) -> Any:
        return self.multiply(self.hidden(inputs), self.head.weight, self.head.bias)


@pytest.mark.parametrize("weights", [{}, {"placement": "host", "device_mib": 0.001}])
@pytest.mark.parametrize("update", ["at_step", "next_forward", "overlap"])
def test_weights_that_are_passed_to_compiled_functions_are_waited_for(update: str, weights: dict[str, Any]) -> None:
    def trained(**settings: Any) -> dict[str, Tensor]:
        run = OnVectors(make=WithCompiledFunction, clipping={"max_norm": None}, **settings)
        run.train(4)
        run.optimizer.synchronize()
        return run.snapshot()

    tested = trained(state={"backend": "stream", "update": update}, weights=weights)
    assert_same(tested, trained(state={"backend": "resident"}))


def test_a_checkpoint_of_a_compiled_model_is_one_of_the_model(tmp_path: Path) -> None:
    strategy = Strategy.load(UPDATES["next_forward"])
    model = whole(strategy.prepare_model(TinyTransformer()), "eager")
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    train(strategy, model, optimizer)
    strategy.save_checkpoint(tmp_path / "step", model, optimizer)
    assert "_orig_mod" not in (tmp_path / "step" / "lightstep.json").read_text()
    plain = strategy.prepare_model(TinyTransformer())
    other = strategy.create_optimizer(plain, lr=1e-2)
    strategy.load_checkpoint(tmp_path / "step", plain, other)
    for one, each in ((model, optimizer), (plain, other)):
        train(strategy, one, each)
    same(list(strategy.unwrap_model(model).state_dict().values()), list(plain.state_dict().values()))


@pytest.mark.parametrize("update", ["at_step", "in_backward"])
def test_compiled_autograd_with_accumulation_gives_the_same_weights(update: str) -> None:
    from torch._dynamo import compiled_autograd

    def trained(around: Callable[[], Any]) -> dict[str, Tensor]:
        run = OnVectors(
            {"backend": "stream", "update": update},
            make=lambda: nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3)),
            clipping={"max_norm": None},
        )
        for micro in range(6):
            with run.strategy.accumulate(run.model, last=micro % 3 == 2), around():
                run.optimizer.backward(run.loss(micro))
            if micro % 3 == 2:
                run.optimizer.step()
        return run.snapshot()

    enabled = trained(lambda: compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")))
    assert_same(enabled, trained(contextlib.nullcontext))

"""Mixtures of experts whose weights rest on the host: an expert without tokens stays there, and the bits stay."""

from __future__ import annotations

import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep.sharding.weight_visits import VisitOrder
from lightstep.state.host_fields import Field
from lightstep.state.host_weights import HostWeights, WeightGroup
from tests.covering import every_pair
from tests.distributed.models import CLASSES, VOCABULARY, TinyTransformer
from tests.training import Training, assert_same
from tests.unit.test_homes_and_times import LIMITS
from tests.unit.test_host_weights import TIMES, clean, make

EXPERTS, BLOCKS = 4, 3


pytestmark = pytest.mark.usefixtures("small_units")


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows)))


class MoEBlock(nn.Module):
    """Only experts with tokens are called.

    Attributes:
        allowed: experts that may get tokens.
        by_weights: the block computes with the weights of its experts, and does not call them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(EXPERTS))
        self.allowed, self.by_weights = tuple(range(EXPERTS)), False

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        scores = self.router(rows).float()[:, list(self.allowed)].softmax(-1)
        weight, chosen = scores.max(-1)
        made = torch.zeros_like(rows)
        for place, number in enumerate(self.allowed):
            (own,) = torch.where(chosen == place)
            if len(own):
                made = made.index_add(0, own, self.compute(number, rows[own]) * weight[own, None].to(rows.dtype))
        return hidden + made.view_as(hidden)

    def compute(self, number: int, rows: Tensor) -> Tensor:
        expert = self.experts[number]
        if not self.by_weights:
            return expert(rows)
        up = nn.functional.linear(rows, expert.up.weight, expert.up.bias)
        return nn.functional.linear(torch.tanh(up), expert.down.weight)


class MoE(nn.Module):
    """Tokens -> logits."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(MoEBlock(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def split(self) -> list[dict[str, Any]]:
        return [{"params": list(self.parameters()), "weight_decay": 0.1}]


class ByWeights(MoE):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.by_weights = True


class Stack(nn.Module):
    """All experts of a block, stacked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / (2 * width) ** 0.5)

    def forward(self, rows: Tensor, number: int) -> Tensor:
        return compute(rows, self.up[number], self.down[number])


def compute(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return nn.functional.linear(torch.tanh(nn.functional.linear(rows, up)), down)


class StackedBlock(MoEBlock):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = Stack(width)

    def compute(self, number: int, rows: Tensor) -> Tensor:
        if self.by_weights:
            return compute(rows, self.experts.up[number], self.experts.down[number])
        return self.experts(rows, number)


class Stacked(MoE):
    """A block calls the module of its experts once for each of them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.blocks = nn.ModuleList(StackedBlock(width) for _ in range(BLOCKS))


class Routed(Training):
    """Every micro-batch may use other experts than the one before: some get tokens in a step's first alone."""

    def loss(self, micro: int = 0) -> Tensor:
        for number, block in enumerate(self.model.blocks):
            inner = getattr(block, "_checkpoint_wrapped_module", block)
            inner.allowed = [(0, 1, 2, 3), (1, 3), (0,)][(self.steps + number + micro) % 3]
        return super().loss(micro)


def make_run(model: type[nn.Module], *arguments: Any, **more: Any) -> Training:
    return make(*arguments, kind=Routed if issubclass(model, MoE) else Training, make=model, **more)


@functools.cache
def expected_of(
    in_backward: bool, limit: str, parameters: str, model: type[nn.Module]
) -> tuple[list[list[float]], dict[str, Tensor]]:
    run = make_run(model, "resident", "in_backward" if in_backward else "at_step", limit, parameters)
    return run.train(4), run.snapshot()


@every_pair(
    home=["resident", "stream", "stream, some resident"],
    time=TIMES,
    limit=LIMITS,
    parameters=["bfloat16", "float16", "float32"],
    mib=[0.001, 0.02, 64.0],
    recompute=[False, True, "host"],
    model=[TinyTransformer, MoE, ByWeights, Stacked],
)
def test_the_same_bits(
    home: str,
    time: str,
    limit: str,
    parameters: str,
    mib: float,
    recompute: bool | str,
    model: type[nn.Module],
    inputs_leave: None,
) -> None:
    """Also of a model without experts."""
    losses, wanted = expected_of(time == "in_backward", limit, parameters, model)
    weights = {"placement": "host", "device_mib": mib}
    tested = make_run(model, home, time, limit, parameters, weights, recompute=recompute)
    found = tested.train(2)
    tested.delays(zlib.crc32(f"{home} {time} {limit} {parameters} {mib} {recompute}".encode()))
    assert found + tested.train(2) == losses
    assert_same(clean(tested.snapshot()), wanted)
    if time == "overlap" and model is TinyTransformer:
        queue, store = tested.optimizer.engine.queue, tested.optimizer._backend
        assert not queue.rolled_back
        assert (queue.redone > 0) is (limit == "clipped" and store.name != "resident")
        assert home == "resident" or store._versions.host_bytes() > 0, "nothing was updated in backward"
    tested.optimizer.close()


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each field has been brought to the device."""
    found: Counter[str] = Counter()
    bring = Field.bring

    def counted(field: Field) -> None:
        found[field.what] += 1
        bring(field)

    monkeypatch.setattr(Field, "bring", counted)
    return found


def experts_in(names: Iterable[str]) -> set[tuple[int, int]]:
    """Block and number of the experts that are named."""
    found = (re.search(r"blocks\.(\d+)\..*experts\.(\d+)", name) for name in names)
    return {(int(match[1]), int(match[2])) for match in found if match}


@pytest.mark.parametrize("recompute", [False, True])
def test_an_expert_without_tokens_stays_on_the_host(recompute: bool, brought: Counter[str]) -> None:
    """Its weights come neither for forward nor for backward."""
    weights = {"placement": "host", "device_mib": 0.001}
    run = make_run(MoE, "resident", "at_step", "clipped", "bfloat16", weights, recompute=recompute)
    called: set[str] = set()
    for name, module in run.model.named_modules():
        if isinstance(module, Expert):
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))  # type: ignore[misc]
    run.train(1)
    for _ in range(3):
        called.clear()
        brought.clear()
        run.train(1)
        assert experts_in(brought) == experts_in(called)
        assert 0 < len(called) < EXPERTS * BLOCKS


def test_what_is_passed_over_makes_room() -> None:
    """Experts come ahead as in the last pass; those that get no tokens in this one keep no others from coming."""
    weights = HostWeights(torch.device("cpu"), 2 * 512)
    groups = [WeightGroup(weights, [nn.Parameter(torch.zeros(4))], f"expert {number}") for number in range(5)]
    order = VisitOrder(groups)
    order.start()

    def present() -> list[int]:
        return [number for number, group in enumerate(groups) if group.weights.is_present]

    order.prefetch_after(groups[0], weights)
    assert present() == [1, 2], "there is room for two"
    order.prefetch_after(groups[3], weights)
    assert 4 in present()


def test_what_comes_ahead_makes_no_room_for_what_is_needed_later() -> None:
    weights = HostWeights(torch.device("cpu"), 512)
    groups = [WeightGroup(weights, [nn.Parameter(torch.zeros(4))], f"expert {number}") for number in range(3)]
    order = VisitOrder(groups)
    order.start()
    order.prefetch_after(groups[0], weights)
    assert [group.weights.is_present for group in groups] == [False, True, False], "there is room for one"


def test_a_block_that_computes_with_the_weights_of_its_experts_has_them_no_longer_than_its_own() -> None:
    run = make_run(ByWeights, "resident", "at_step", "clipped", "bfloat16", {"placement": "host"})
    weights = run.optimizer.engine._host_weights
    held: list[set[str]] = []

    def note(*_: Any) -> None:
        held.append(
            {group.name.split(".")[1] for group in weights.groups if group.is_entered and ".experts." in group.name}
        )

    for block in run.model.blocks:
        block.register_forward_hook(note)
        block.register_full_backward_hook(note)
    run.train(2)
    assert held and all(len(blocks) <= 1 for blocks in held)
    assert not any(group.is_entered for group in weights.groups)

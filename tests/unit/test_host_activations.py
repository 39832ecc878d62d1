"""Inputs of recomputed blocks that rest on the host: the bits of a run that keeps them on the device."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightstep import ConfigError, Strategy
from lightstep.state import host_activations
from lightstep.state.host_activations import HostActivations
from lightstep.state.host_memory import HostMemoryError
from tests.distributed.models import TinyTransformer, tiny_llama
from tests.training import Training, assert_same, host_activations_of, random_delays


@pytest.fixture(autouse=True)
def tiny_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostActivations, "SMALLEST", 1)


DEVICE = torch.device("cpu")
WIDTH = 16


class Block(nn.Module):
    """Takes and returns tensors in every way that blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], scale: float, *, skip: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        own = self.drop(torch.tanh(self.first(hidden) * angles[0])) * scale
        own = own * angles[1] if mask is None else own.where(mask, angles[1])
        return hidden + self.second(own), skip + own.transpose(0, 1).contiguous().transpose(0, 1)


class Stack(nn.Module):
    """Blocks with several inputs, one of them shared by all, some of them transposed."""

    def __init__(self, blocks: int = 6, recompute: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.angle = nn.Parameter(torch.ones(WIDTH))
        self.recompute = recompute or (lambda block, *arguments, **named: block(*arguments, **named))

    def forward(self, hidden: Tensor) -> Tensor:
        angles = (torch.sin(self.angle), torch.cos(hidden.detach()[:1]))
        hidden = hidden * self.angle
        skip = hidden.transpose(0, 1).contiguous().transpose(0, 1)
        mask = torch.arange(WIDTH, device=hidden.device) % 3 > 0
        for number, block in enumerate(self.blocks):
            named = {"mask": mask} if number % 2 else {}
            hidden, skip = self.recompute(block, hidden, angles, 0.5, skip=skip, **named)
        return hidden + skip


def plainly(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return checkpoint(function, *arguments, use_reentrant=False, **named)


def make(keeper: HostActivations | None) -> Stack:
    torch.manual_seed(0)
    if keeper is None:
        return Stack(recompute=plainly)
    return Stack(recompute=lambda *arguments, **named: keeper.checkpoint(plainly, *arguments, **named))


def batch(number: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def keeper() -> Iterator[HostActivations]:
    made = HostActivations(DEVICE)
    yield made
    made.lanes.synchronize()


@pytest.fixture
def parcels(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[host_activations._Parcel]:
    """Those that are alive."""
    found: weakref.WeakSet[host_activations._Parcel] = weakref.WeakSet()
    make_one = host_activations._Parcel.__init__

    def noted(parcel: host_activations._Parcel, *arguments: Any) -> None:
        found.add(parcel)
        make_one(parcel, *arguments)

    monkeypatch.setattr(host_activations._Parcel, "__init__", noted)
    return found


def usual(model: nn.Module) -> None:
    for number in range(4):
        model(batch(number)).square().mean().backward()


def two_graphs(model: nn.Module) -> None:
    """The graphs of two micro-batches are alive at once, and the first goes first."""
    losses = [model(batch(number)).square().mean() for number in range(3)]
    for loss in losses:
        loss.backward()


def one_loss(model: nn.Module) -> None:
    (model(batch(0)).square().mean() + model(batch(1)).mean()).backward()


def twice(model: nn.Module) -> None:
    """Backward of the same graph, with another forward between."""
    loss = model(batch(0)).square().mean()
    loss.backward(retain_graph=True)
    model(batch(1)).square().mean().backward()
    loss.backward()


def other_lengths(model: nn.Module) -> None:
    for rows in (3, 7, 2, 7, 12, 1):
        model(batch(rows, rows)).square().mean().backward()


def evaluations(model: nn.Module) -> None:
    model(batch(0)).square().mean().backward()
    with torch.no_grad():
        model(batch(1))
    with torch.inference_mode():
        model(batch(1))
    model(batch(2))  # nobody wants its gradients
    model(batch(3)).square().mean().backward()


def exceptions(model: nn.Module) -> None:
    def raising(*_: Any) -> None:
        raise ValueError("a user's hook")

    block = model.blocks[3]
    for register in (block.register_forward_hook, block.register_full_backward_hook):
        handle = register(raising)
        with pytest.raises(ValueError, match="a user's hook"):
            model(batch(5)).square().mean().backward()
        handle.remove()
    for parameter in model.parameters():
        parameter.grad = None
    usual(model)


def inputs_with_gradients(model: nn.Module) -> None:
    hidden = batch(0).requires_grad_()
    model(hidden * 1).square().mean().backward()
    model(hidden).square().mean().backward()
    assert hidden.grad is not None
    model.blocks[0].first.bias.grad.add_(hidden.grad.sum(0))


USES = [usual, two_graphs, one_loss, twice, other_lengths, evaluations, exceptions, inputs_with_gradients]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_same_gradients(use: Callable[[nn.Module], None]) -> None:
    expected = make(None)
    torch.manual_seed(1)
    use(expected)
    keeper = HostActivations(DEVICE)
    random_delays(keeper.lanes, 0, 2e-3)
    tested = make(keeper)
    torch.manual_seed(1)
    use(tested)
    assert_same(gradients(tested), gradients(expected))
    assert keeper.sent > 0 and keeper.brought > 0


def test_two_blocks_are_on_the_device_and_the_rest_on_the_host(
    keeper: HostActivations, parcels: weakref.WeakSet[host_activations._Parcel]
) -> None:
    most = [0, 0]

    def look(phase: int) -> None:
        own = [p for p in parcels if p._tensor is not None and not p.stays]
        most[phase] = max(most[phase], len({p.visit for p in own}))

    model = make(keeper)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: look(0 if torch._C._current_graph_task_id() == -1 else 1))
    loss = model(batch(0)).square().mean()
    first = {id(p) for p in parcels}
    # hidden and skip of each block, and one of the angles
    assert keeper.sent == 2 * len(model.blocks) + 1 and keeper.brought == 0
    loss.backward()
    assert most == [2, 2]
    assert keeper.brought == 2 * (len(model.blocks) - 2), "each once"
    assert not [p for p in parcels if id(p) in first], "freed without the collector"


def test_buffers_are_used_again(keeper: HostActivations) -> None:
    model = make(keeper)
    model(batch(0)).mean().backward()
    kept = keeper.buffers.idle_bytes()
    for number in range(4):
        model(batch(number)).mean().backward()
    assert keeper.buffers.idle_bytes() == kept, "the same memory"
    model(batch(1))  # an iteration that is given up
    assert keeper.buffers.idle_bytes() == kept
    model(batch(0, 9)).mean().backward()
    larger = keeper.buffers.idle_bytes()
    assert kept < larger <= 9 / 4 * kept * 9 / 8
    model(batch(0)).mean().backward()
    assert keeper.buffers.idle_bytes() == larger


def test_what_several_blocks_take_stays(
    keeper: HostActivations, parcels: weakref.WeakSet[host_activations._Parcel]
) -> None:
    loss = make(keeper)(batch(0)).mean()
    assert [p._like[1] for p in parcels if p.stays] == [(WIDTH,)], "one of the angles"
    loss.backward()


@pytest.mark.parametrize("after", [1, 2])
def test_an_input_that_is_written_to(after: int, keeper: HostActivations) -> None:
    """It is refused, as torch does it, unless it is on the host by then, as it was."""
    expected, tested = make(None), make(keeper)
    for model in (expected, tested):
        held: list[Tensor] = []

        def write(*_: Any, kept: list[Tensor] = held) -> None:
            if len(kept) == 1:  # in forward
                kept[0].detach().add_(1)

        model.blocks[0].register_forward_pre_hook(lambda _, given, kept=held: kept.append(given[0]))
        if model is tested:
            model.blocks[after].register_forward_hook(write)
        torch.manual_seed(1)
        loss = model(batch(0)).mean()
        if model is tested and after < 2:
            with pytest.raises(RuntimeError, match="was modified by an in-place operation"):
                loss.backward()
            return
        loss.backward()
    assert_same(gradients(tested), gradients(expected))


def test_a_block_within_a_block(keeper: HostActivations) -> None:
    """The inner one's inputs are recomputed with the outer one, and kept nowhere."""

    class Outer(nn.Module):
        def __init__(self, recompute: Callable[..., Any]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.recompute = recompute

        def forward(self, hidden: Tensor) -> Tensor:
            def block(hidden: Tensor) -> Tensor:
                for linear in self.inner:
                    hidden = self.recompute(lambda own, at=linear: torch.tanh(at(own)).sin(), hidden).cos()
                return hidden

            return self.recompute(block, hidden)

    expected = Outer(plainly)
    tested = Outer(lambda function, *given: keeper.checkpoint(plainly, function, *given))
    for model in (expected, tested):
        for number in range(2):
            model(batch(number).requires_grad_()).mean().backward()
    assert_same(gradients(tested), gradients(expected))
    assert keeper.sent == 2


def test_too_little_host_memory(keeper: HostActivations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSTEP_HOST_MEMORY_CHECK", "0")
    with pytest.raises(HostMemoryError, match=r"inputs of recomputed blocks: .*activation_checkpointing: true"):
        make(keeper)(batch(0))
    monkeypatch.delenv("LIGHTSTEP_HOST_MEMORY_CHECK")
    expected, tested = make(None), make(keeper)
    for model in (expected, tested):
        torch.manual_seed(1)
        usual(model)
    assert_same(gradients(tested), gradients(expected))


# ---- in a strategy


def strategy(wanted: Any, **more: Any) -> Strategy:
    return Strategy.load({"sharding": {"kind": "single", "activation_checkpointing": wanted}, **more})


class OfTransformers(Training):
    def loss(self, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + micro)
        words = torch.randint(self.model.config.vocab_size, (2, 8), generator=generator)
        return self.model(input_ids=words, labels=words).loss


def test_a_model_of_transformers() -> None:
    expected, tested = (
        OfTransformers({"backend": "stream"}, make=tiny_llama, weights={"placement": "host"}, recompute=how)
        for how in (True, "host")
    )
    found = tested.train(1)
    tested.delays(0)
    assert found + tested.train(3) == expected.train(4)
    assert_same(tested.snapshot(), expected.snapshot())
    (keeper,) = host_activations_of(tested.model)
    assert keeper.sent >= 4 * tested.model.config.num_hidden_layers


def test_copies_share_the_memory() -> None:
    prepared = strategy("host").prepare_model(TinyTransformer())
    (keeper,) = host_activations_of(prepared)
    assert host_activations_of(copy.deepcopy(prepared)) == [keeper]
    (other,) = host_activations_of(pickle.loads(pickle.dumps(prepared)))
    assert other is not keeper and other.device == keeper.device


def test_training_with_several_micro_batches() -> None:
    state = {"backend": "stream", "update": "next_forward", "ring_mib": 0.02}
    expected = Training({"backend": "resident"}, recompute=True)
    tested = Training(state, recompute="host")
    losses = expected.train(6)
    found = tested.train(2)
    tested.delays(0)
    assert found + tested.train(4) == losses
    assert_same(tested.snapshot(), expected.snapshot())


def test_what_cannot_rest_on_the_host_is_refused() -> None:
    class Own(TinyTransformer):
        def gradient_checkpointing_enable(self, **_: Any) -> None: ...

    with pytest.raises(ValueError, match=r"gradient_checkpointing_enable\(\) of Own sets no _gradient_checkpointing"):
        strategy("host").prepare_model(Own())
    with pytest.raises(ConfigError, match=r"activation_checkpointing' is 'hots'.* true or false.*allowed: host"):
        strategy("hots")


@pytest.mark.parametrize("wanted", [True, "host"])
def test_a_model_without_repeated_blocks_is_refused(wanted: Any) -> None:
    """Layers without weights are none, however many: recomputing them alone would free next to nothing."""
    activations = nn.ModuleList([nn.ReLU(), nn.ReLU()])
    for model in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), activations)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no repeated blocks to recompute"):
            strategy(wanted).prepare_model(model)

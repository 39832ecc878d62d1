"""Inputs of recomputed blocks that rest on the host, on a GPU and under sleeps: the bits of a run that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightstep import Strategy
from lightstep.bench.models import LlamaShape
from lightstep.state import host_activations
from lightstep.state.host_activations import HostActivations
from tests.unit import test_host_activations as on_cpu
from tests.unit.test_host_activations import USES, gradients, tiny_tensors_leave
from tests.unit.test_next_forward import assert_same, host_activations_of
from tests.unit.test_stream import random_sleeps

__all__ = ["tiny_tensors_leave"]

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = on_cpu.batch
    monkeypatch.setattr(on_cpu, "batch", lambda *given: batch(*given).cuda())


def make(keeper: HostActivations | None) -> nn.Module:
    return on_cpu.make(keeper).cuda()


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_same_gradients(use: Callable[[nn.Module], None]) -> None:
    expected = make(None)
    torch.manual_seed(1)
    use(expected)
    for seed in range(8):
        keeper = HostActivations(torch.device("cuda", 0))
        random_sleeps(keeper.lanes, seed, 3_000_000)
        tested = make(keeper)
        torch.manual_seed(1)
        use(tested)
        assert_same(gradients(tested), gradients(expected))
        assert keeper.sent > 0 and keeper.brought > 0


def test_memory_that_is_used_again_at_once() -> None:
    """The allocator hands out what was just freed: copies that are still under way would see it."""
    width, rows = 2048, 1024

    def train(recompute: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(8)).cuda()
        found = []
        for seed in range(6):
            hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).cuda().requires_grad_()
            for block in blocks:
                hidden = recompute(lambda own, at=block: torch.tanh(at(own)) + own, hidden)
                del block
                torch.full_like(hidden, float("nan"))
            hidden.square().mean().backward()
            if seed == 3:  # a graph that is given up while copies are under way
                recompute(lambda own: own * 2, torch.randn(rows, width, device="cuda").requires_grad_())
        found += [parameter.grad.cpu() for parameter in blocks.parameters()]
        return found

    expected = train(on_cpu.plainly)
    for seed in range(8):
        keeper = HostActivations(torch.device("cuda", 0))
        random_sleeps(keeper.lanes, seed, 10_000_000)
        tested = train(lambda *given, own=keeper: own.checkpoint(on_cpu.plainly, *given))
        assert all(torch.equal(a, b) for a, b in zip(tested, expected, strict=True))


@pytest.mark.parametrize("missing", ["filled", "read"])
def test_the_sleeps_find_a_missing_wait(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make(None)
    torch.manual_seed(1)
    on_cpu.usual(expected)
    wanted = gradients(expected)

    class Watched(host_activations._Buffer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            setattr(self, missing, torch.Event("cuda"))  # recorded, and never waited for
            left_out.append(getattr(self, missing))

    left_out: list[Any] = []
    monkeypatch.setattr(host_activations, "_Buffer", Watched)
    wait = host_activations.Lanes(torch.device("cuda", 0)).device_to_host.__class__.wait
    monkeypatch.setattr(
        "lightstep.state.lanes.StreamLane.wait",
        lambda self, event: None if any(event is other for other in left_out) else wait(self, event),
    )
    for seed in range(10):
        keeper = HostActivations(torch.device("cuda", 0))
        random_sleeps(keeper.lanes, seed, 30_000_000)
        tested = make(keeper)
        torch.manual_seed(1)
        on_cpu.usual(tested)
        if any(not torch.equal(value, wanted[name]) for name, value in gradients(tested).items()):
            return
    pytest.fail("10 runs did not notice")


@pytest.mark.parametrize("placement", ["device", "host"])
def test_device_memory(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of 24 blocks of 16 MiB each: two are on the device after forward.

    The losses are near: two runs of this Llama on a GPU differ in their bits in any case.
    """
    monkeypatch.setattr(HostActivations, "SMALLEST", 1 << 20)
    shape, tokens = LlamaShape("narrow", 1024, 4096, 256, 24, 512, 64), 8192
    kept, losses = [], []
    for wanted in (True, "host"):
        overrides: dict[str, Any] = {"sharding.activation_checkpointing": wanted}
        if placement == "host":
            overrides["weights"] = {"placement": "host", "device_mib": 64}
        strategy = Strategy.load("stream", overrides=overrides)
        model = strategy.prepare_model(shape.make(strategy.device, length=tokens))
        optimizer: Any = strategy.create_optimizer(model, lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(512, (1, tokens + 1), generator=generator).cuda()
        for step in range(3):
            loss = model(words[:, :-1].contiguous(), words[:, 1:].contiguous())
            if step == 2:
                torch.cuda.synchronize()
                kept.append(torch.cuda.memory_allocated())
            optimizer.backward(loss)
            optimizer.step()
        optimizer.synchronize()
        losses.append(loss.item())
        assert all(keeper.sent == 3 * 24 for keeper in host_activations_of(model))
        optimizer.close()
        del model, optimizer, strategy, loss
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert (kept[0] - kept[1]) / MIB > 20 * 16, kept

"""Updates in backward on a GPU: the bits of updates in ``step()`` with sleep kernels in every lane, and the memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep.strategy.base import Strategy
from tests.gpu.test_next_forward_gpu import Training as OnGpu
from tests.unit.test_in_backward import BACKENDS, CLIPPING, SCALES, Chain, in_backward
from tests.unit.test_next_forward import assert_same
from tests.unit.test_stream import random_sleeps

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def training(state: dict[str, Any], parameters: str, clipping: str) -> OnGpu:
    return OnGpu(state, parameters, clipping=CLIPPING[clipping], loss_scale=SCALES[parameters])


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("parameters", SCALES)
def test_sleep_kernels_in_every_lane(parameters: str, clipping: str) -> None:
    expected = training({"backend": "resident"}, parameters, clipping)
    losses, wanted = expected.train(6), expected.snapshot()
    for seed in range(34):
        tested = training(in_backward("stream" if seed % 3 else "partly resident"), parameters, clipping)
        tested.assert_bits(losses, wanted, seed)
    resident = training(in_backward("resident"), parameters, clipping)
    assert resident.train(6) == losses
    assert_same(resident.snapshot(), wanted)


def test_masters_start_from_weights_that_are_on_the_device() -> None:
    """The first update reads them in its lane, and then they are free memory."""

    def run(state: dict[str, Any], seed: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        strategy = Strategy.load({"clipping": {"max_norm": None}, "optimizer_state": state})
        model = strategy.prepare_model(Chain(8, 512).cuda())
        optimizer: Any = strategy.create_optimizer(model, lr=1e-3)
        if seed is not None:
            optimizer.managed()
            random_sleeps(optimizer.engine.backend.lanes, seed, 10_000_000)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            hidden = torch.randn(64, 512, generator=generator).to("cuda", torch.bfloat16)
            optimizer.backward(model(hidden).float().square().mean())
            optimizer.step()
        optimizer.synchronize()
        found = [optimizer.state[parameter]["master"].cpu() for parameter in model.parameters()]
        optimizer.close()
        return found

    expected = run({"backend": "resident"}, None)
    for seed in range(10):
        found = run({**in_backward("stream"), "ring_mib": 4}, seed)
        assert all(map(torch.equal, found, expected)), seed


def iterate(model: nn.Module, optimizer: Any, steps: int, watch: bool = False) -> None:
    hidden = torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(steps):
        loss = model(hidden).float().square().mean()
        torch.cuda.set_sync_debug_mode("error" if watch else "default")
        try:
            optimizer.backward(loss)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def peak(state: dict[str, Any], layers: int) -> int:
    """Bytes beyond what is there after a few iterations, at the peak of the next; weights are 8 MiB per layer."""
    gc.collect()
    torch.cuda.empty_cache()
    strategy = Strategy.load({"clipping": {"max_norm": None}, "optimizer_state": state})
    model = strategy.prepare_model(Chain(layers, 2048))
    optimizer: Any = strategy.create_optimizer(model, lr=1e-3)
    iterate(model, optimizer, 3)
    optimizer.synchronize()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    iterate(model, optimizer, 3, watch=True)
    torch.cuda.synchronize()
    highest = torch.cuda.max_memory_allocated() - held
    assert torch.cuda.memory_allocated() <= held + MIB
    optimizer.close()
    return highest


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_peak_is_lower_by_the_gradients_of_all_but_two_layers(backend: str) -> None:
    layers, gradient = 12, 2048 * 2048 * 2
    state = {**BACKENDS[backend], "ring_mib": 256} if "stream" in BACKENDS[backend]["backend"] else BACKENDS[backend]
    saved = peak(state, layers) - peak({**state, "update": "in_backward"}, layers)
    assert saved >= (layers - 2.5) * gradient, f"{saved / MIB:.1f} MiB"

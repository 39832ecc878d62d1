"""bf16 weights without masters on a CUDA device: the plain loop's bits, the kernel's, no host sync, no memory taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lightstep
from lightstep.precision import adam_kernel
from lightstep.state import segment
from tests.covering import every_pair
from tests.gpu.test_step_on_gpu import set_gradients, steady_step
from tests.reference.pair import BACKENDS, EVERY_TIME
from tests.unit.test_moments import SEEDS, STREAM
from tests.unit.test_rounded_weights import COUNTING, KINDS, RoundedPair, by_hand

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@every_pair(name=COUNTING, backend=EVERY_TIME, kind=KINDS, rounding_seed=SEEDS)
def test_the_bits_of_a_loop_without_masters(name: str, backend: str, kind: tuple[str, str], rounding_seed: int) -> None:
    optimizer_class, first, second, common = COUNTING[name]
    pair = RoundedPair(
        optimizer_class,
        first,
        second,
        common=common,
        backend=backend,
        kind=kind,
        rounding_seed=rounding_seed,
        max_norm=0.35,
        overflow_at=(1, 5),
        late_from=3,
        intermittent=True,
    )
    pair.train(6)
    pair.resume()
    pair.train(4)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
@pytest.mark.parametrize("state", [{}, {"backend": "bulk"}, STREAM, {**STREAM, "update": "next_forward"}])
def test_large_tensors_whole_and_cut(state: dict[str, Any], moments: str) -> None:
    by_hand({**state, "moments": moments}, lr=1e-2, betas=(0.9, 0.999))


@pytest.mark.parametrize("noise", ["window", "jumps", "listed"])
@pytest.mark.parametrize(("block", "noisy"), [(0, False), (1, False), (1, True), (128, False), (128, True), (16, True)])
def test_one_kernel_widens_updates_and_rounds(
    block: int, noisy: bool, noise: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = adam_kernel.fused_kernel_on(DEVICE)
    assert kernels is not None
    flags = (False, True, True, False, False, False, True)  # from fingerprinted to multiplied
    for gradient, amsgrad in ((torch.bfloat16, False), (torch.float32, True)):
        kind = adam_kernel.Kind(
            DEVICE, gradient, torch.bfloat16, False, amsgrad, *flags, block, noise, noisy, rounded=True
        )
        assert adam_kernel.runs_in_one_pass(kernels, kind), caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_a_steady_step_is_one_kernel_that_never_waits(
    backend: str, kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {**BACKENDS[backend], "ring_mib": 64, "moments": kind[0], "moments_rounding": kind[1]}
    strategy = lightstep.Strategy.load({"precision": {"master_weights": "stochastic"}, "optimizer_state": state})
    model = strategy.prepare_model(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-3)
    for _ in range(4):
        set_gradients(model)
        optimizer.step()
    refused = lambda *_: pytest.fail("weights were rounded apart from the update")  # noqa: E731
    monkeypatch.setattr(segment.Segment, "_round", refused)
    result, before, after = steady_step(model, optimizer)
    assert result
    assert after["num_device_alloc"] == before["num_device_alloc"]

"""Moments in bf16 and 8 bits on a CUDA device: the plain loop's bits, the kernels', no host sync, no memory taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lightstep
from lightstep.distributed import Window
from lightstep.precision import adam_kernel, moments, moments_int8, split
from lightstep.precision.moments import BFloat16
from lightstep.precision.moments_int8 import Int8
from lightstep.precision.noise import Noise
from lightstep.precision.split import probe_masters
from lightstep.state import segment
from tests.covering import every_pair
from tests.gpu.test_step_on_gpu import set_gradients, steady_step
from tests.reference.pair import BACKENDS, DTYPES, EVERY_TIME, scale_for
from tests.unit.test_moments import CLASSES, KINDS, SEEDS, STREAM, WINDOWS, ShortPair, at_thresholds, by_hand

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def test_the_fused_kernels_are_in_use() -> None:
    assert split._checked_kernels(DEVICE) is not None
    assert moments._checked_kernels(DEVICE) is not None
    assert moments_int8._checked_kernels(DEVICE) is not None


@pytest.mark.parametrize("window", WINDOWS)
def test_the_noise_is_that_of_the_cpu(window: Window) -> None:
    value = probe_masters(torch.device("cpu"))
    found, expected = torch.empty_like(value, dtype=torch.bfloat16, device=DEVICE), value.bfloat16()
    BFloat16(Noise()).at([expected]).encode_update(value, "exp_avg", 77, window)
    for step in (77, torch.tensor(77.0), torch.tensor(77.0, device=DEVICE)):
        BFloat16(Noise()).at([found.zero_()]).encode_update(value.to(DEVICE), "exp_avg", step, window)
        assert torch.equal(found.view(torch.int16).cpu(), expected.view(torch.int16))


@pytest.mark.parametrize("exponent", [0, -40, -115, 120])
@pytest.mark.parametrize("noise", [None, Noise()])
@pytest.mark.parametrize("never_negative", [False, True])
def test_codes_of_numbers_at_their_thresholds(never_negative: bool, noise: Noise | None, exponent: int) -> None:
    """The kernels guess a code from roots that are not exact."""
    value, codec, found = at_thresholds(never_negative, noise, exponent)[0], Int8(128, never_negative, noise), []
    for device in ("cpu", DEVICE):
        planes = [torch.empty(value.numel() // per, dtype=dtype, device=device) for _, dtype, per in codec.planes]
        if noise is None:
            codec.at(planes).encode(value.to(device))
        else:
            codec.at(planes).encode_update(value.to(device), "exp_avg", 7, Window())
        found.append([plane.cpu() for plane in planes])
    assert all(map(torch.equal, *found))


@every_pair(name=CLASSES, parameters=DTYPES, backend=EVERY_TIME, kind=KINDS, rounding_seed=SEEDS)
def test_the_bits_of_a_loop_that_keeps_its_moments_so(
    name: str, parameters: str, backend: str, kind: tuple[str, str], rounding_seed: int
) -> None:
    optimizer_class, first, second, common = CLASSES[name]
    pair = ShortPair(
        optimizer_class,
        first,
        second,
        common=common,
        parameters=parameters,
        backend=backend,
        kind=(kind[0], "nearest") if name == "SGD-momentum" else kind,
        rounding_seed=rounding_seed,
        max_norm=0.35,
        overflow_at=(1, 5) if parameters == "float16" else (),
        late_from=3,
        intermittent=True,
        **scale_for(parameters),
    )
    pair.train(8)
    pair.resume()
    pair.train(8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [{}, {"backend": "bulk"}, STREAM, {**STREAM, "update": "next_forward"}])
def test_large_tensors_whole_and_cut(state: dict[str, Any], kind: tuple[str, str]) -> None:
    options = {"rounding_seed": 2 if kind[1] == "stochastic" else 0, "lr": 1e-2, "betas": (0.9, 0.999)}
    by_hand({**state, "moments": kind[0], "moments_rounding": kind[1]}, steps=6, **options)


@pytest.mark.parametrize(
    ("block", "noise"),
    [
        *((1, noise) for noise in ("none", "window", "jumps", "listed")),
        *((128, noise) for noise in ("none", "window", "jumps", "listed")),
        *((64, "window"), (32, "none"), (16, "listed")),
    ],
)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, None])
def test_one_kernel_decodes_updates_and_encodes(
    block: int, noise: Any, weight: torch.dtype | None, caplog: pytest.LogCaptureFixture
) -> None:
    twin, split_masters = adam_kernel.fused_kernel_on(DEVICE), weight == torch.bfloat16
    assert twin is not None
    flags = (True, True, False, False, False, True)  # decays, decoupled, maximize, rate on device, divided, multiplied
    kinds = [
        adam_kernel.Kind(
            DEVICE, gradient, weight, split_masters, amsgrad, weight is not None, *flags, block, noise, noise != "none"
        )
        for gradient, amsgrad in ((torch.bfloat16, False), (torch.float32, block in (1, 128)))
    ]
    assert all(adam_kernel.runs_in_one_pass(twin, kind) for kind in kinds), caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [{"backend": "resident"}, STREAM, {**STREAM, "update": "overlap"}])
def test_no_moment_is_coded_apart_from_its_update(
    state: dict[str, Any], kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = lightstep.Strategy.load(
        {"optimizer_state": {**state, "ring_mib": 64, "moments": kind[0], "moments_rounding": kind[1]}}
    )
    model = strategy.prepare_model(nn.Sequential(*[nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(8)]))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-3)
    for step in range(5):
        if step == 2:
            refused = lambda *_: pytest.fail("moments were coded apart from the update")  # noqa: E731
            monkeypatch.setattr(segment.Segment, "_decoded_row", refused)
        set_gradients(model)
        assert optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_a_steady_step_never_waits_and_keeps_no_memory(backend: str, kind: tuple[str, str]) -> None:
    state = {**BACKENDS[backend], "ring_mib": 64, "moments": kind[0], "moments_rounding": kind[1]}
    strategy = lightstep.Strategy.load({"optimizer_state": state})
    model = strategy.prepare_model(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-3)
    for _ in range(4):
        set_gradients(model)
        optimizer.step()
    result, before, after = steady_step(model, optimizer)
    assert result
    assert after["num_device_alloc"] == before["num_device_alloc"]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's kernel takes one dtype before 2.13")
def test_torchs_own_fused_kernel_with_such_moments() -> None:
    """It takes bf16 states beside fp32 parameters, computes in fp32, and rounds to nearest."""
    torch.manual_seed(0)
    weight = torch.randn(100_003, device=DEVICE)
    ours, theirs = weight.clone(), weight.clone()
    wide = [torch.zeros_like(weight) for _ in range(2)]
    short = [torch.zeros_like(weight, dtype=torch.bfloat16) for _ in range(2)]
    options: Any = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
    for step in range(1, 6):
        gradient = torch.randn_like(weight)
        count = torch.tensor(float(step), device=DEVICE)
        for parameter, moments_of in ((ours, wide), (theirs, short)):
            first, second = ([one] for one in moments_of)
            torch._fused_adamw_(
                [parameter], [gradient], first, second, [], [count.clone()], amsgrad=False, maximize=False, **options
            )
        for one in wide:
            one.copy_(one.bfloat16())
    assert torch.equal(ours, theirs)
    assert all(torch.equal(one.bfloat16(), other) for one, other in zip(wide, short, strict=True))

"""The step on a CUDA device: the textbook loop's bits, no host sync, no memory taken, the fused kernel's bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightstep
from lightstep import clipping
from lightstep.clipping import GradientNorm
from lightstep.precision.scale_kernel import _by_torch, _checked_triton
from tests.reference.pair import BACKENDS, DTYPES, TWO_GROUPS, Pair, scale_for

pytestmark = pytest.mark.gpu

STEPS = 30


@contextmanager
def host_syncs_refused() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parameters", DTYPES)
@pytest.mark.parametrize("name", TWO_GROUPS)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_thirty_steps_equal_the_textbook_loop(name: str, parameters: str, backend: str, micro_batches: int) -> None:
    optimizer_class, first, second = TWO_GROUPS[name]
    overflow_at = (3, 11, 12) if parameters == "float16" else ()
    pair = Pair(
        optimizer_class,
        first,
        second,
        micro_batches=micro_batches,
        overflow_at=overflow_at,
        parameters=parameters,
        backend=backend,
        max_norm=0.5,
        **scale_for(parameters),
    )
    pair.train(STEPS)


def build(backend: str, optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any) -> Any:
    strategy = lightstep.Strategy.load({"optimizer_state": BACKENDS[backend], **settings})
    model = strategy.prepare_model(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))
    return model, strategy.create_optimizer(model, optimizer_class, lr=1e-3)


def set_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def steady_step(model: nn.Module, optimizer: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The result of a step in which the host waits for nothing; torch's statistics of memory before and after it."""
    set_gradients(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    with host_syncs_refused():
        result = optimizer.step()
    return result, before, torch.cuda.memory_stats()


@pytest.mark.parametrize("backend", ["resident", "stream"] if "stream" in BACKENDS else ["resident"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("loss_scale", ["none", "dynamic"])
def test_a_steady_step_never_waits_and_keeps_no_memory(backend: str, optimizer_class: Any, loss_scale: str) -> None:
    model, optimizer = build(backend, optimizer_class, precision={"loss_scale": loss_scale})
    for _ in range(3):
        set_gradients(model)
        optimizer.step()
    result, before, after = steady_step(model, optimizer)
    assert after["segment.all.allocated"] == before["segment.all.allocated"]
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert after["allocated_bytes.all.current"] <= before["allocated_bytes.all.current"] - gradient_bytes + 64 * 512
    assert result.applied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_scaling_gives_torchs_bits(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    fused = _checked_triton(device)
    assert fused is not _by_torch, "Triton is installed here and must have passed its check"
    gradient = torch.randn(1_000_003, device=device).to(dtype)
    for value in (1.0, 0.3, 1e-20, 2.0**-16):
        factor = torch.tensor([value], device=device)
        ours, theirs = torch.empty(gradient.numel(), device=device), torch.empty(gradient.numel(), device=device)
        fused(gradient, factor, ours)
        _by_torch(gradient, factor, theirs)
        assert torch.equal(ours, theirs)


SIZES = (10_000_019, 1, 3, 4096, 65_536, 65_540, 70_001, 300_002, 0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1, 2, 4], ids="{} elements into a bucket".format)
def test_the_norm_has_the_bits_of_torchs_own(norm_type: float, dtype: torch.dtype, offset: int) -> None:
    """On fp32 copies in tensors of their own, wherever in a buffer of any dtype the gradients are."""
    sizes = [size for size in SIZES if size or norm_type != float("inf")]
    buffers = [torch.randn(size + offset, device="cuda").to(dtype) for size in sizes]
    gradients = [buffer[offset:] for buffer in buffers]
    norm, overflow = GradientNorm([torch.zeros_like(gradient) for gradient in gradients], norm_type)(gradients)
    expected = torch.nn.utils.get_total_norm([gradient.float().clone() for gradient in gradients], norm_type)
    assert torch.equal(norm, expected)
    assert overflow == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_of_large_gradients_on_two_streams(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither stream reads what the other has not written, and memory is not reused too early."""
    monkeypatch.setattr(clipping, "_LARGE", 1)
    norm_of = GradientNorm([torch.zeros(size, dtype=dtype, device="cuda") for size in SIZES])
    expected, norms = [], []
    for repetition in range(20):
        values = [torch.randn(size, device="cuda").to(dtype) for size in SIZES]
        expected.append(torch.nn.utils.get_total_norm([value.float() for value in values]))
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000 * (repetition % 2))
        gradients = [torch.empty_like(value).copy_(value) for value in values]
        if repetition % 3 == 0:
            with clipping._side_stream(gradients[0].device):
                torch.cuda._sleep(10_000_000)
        norms.append(norm_of(gradients)[0])
        for gradient in gradients:
            gradient.fill_(float("nan"))
        del gradients
    assert torch.equal(torch.stack(norms), torch.stack(expected))


def test_one_large_gradient_alone() -> None:
    gradient = torch.randn(clipping._LARGE + 1, device="cuda")
    assert torch.equal(GradientNorm([gradient])([gradient])[0], torch.nn.utils.get_total_norm([gradient]))
    half = torch.randn(3, device="cuda")
    assert torch.equal(
        GradientNorm([gradient, half])([gradient, half])[0], torch.nn.utils.get_total_norm([gradient, half])
    )


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_of_several_dtypes_have_the_bits_of_their_fp32_copies(norm_type: float) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
    gradients = [torch.randn(70_001 + i, device="cuda").to(dtype) for i, dtype in enumerate(dtypes)]
    norm, _ = GradientNorm([torch.zeros_like(gradient) for gradient in gradients], norm_type)(gradients)
    assert torch.equal(norm, torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients], norm_type))


@pytest.mark.parametrize("backend", ["resident", "bulk", "stream"])
def test_the_example_of_exactness(backend: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples" / "exactness.py"), "--backend", backend]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])  # the checkout need not be installed
    environment = {**os.environ, "PYTHONPATH": paths}
    said = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True, env=environment).stdout
    assert "cuda" in said and "every bit equal" in said


def test_importing_touches_no_device() -> None:
    code = "import lightstep, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_parameters_on_two_devices_equal_a_plain_loop(parameters: torch.dtype, optimizer_class: Any) -> None:
    """A model that its user has spread over devices, with one norm, and a step that overflows on one of them.

    torch adds up norms in fp32, device by device in the order of a hash table; lightstep adds them up in fp64. So the
    norms are close, and the loop clips by lightstep's.
    """
    torch.manual_seed(0)
    strategy = lightstep.Strategy.load(
        {"precision": {"parameters": str(parameters).removeprefix("torch.")}, "clipping": {"max_norm": 0.1}}
    )
    layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    masters = [parameter.detach().clone() for parameter in layers.parameters()]
    model = strategy.prepare_model(layers)
    for number, layer in enumerate(layers):
        layer.to(f"cuda:{number % 2}")
    optimizer = strategy.create_optimizer(model, optimizer_class, lr=1e-2)
    masters = [master.to(parameter.device) for master, parameter in zip(masters, model.parameters(), strict=True)]
    chosen = {} if optimizer_class is torch.optim.RMSprop else {"fused": True}
    expected = optimizer_class(masters, lr=1e-2, **chosen)

    for step in range(6):
        inputs = torch.randn(8, 256, device="cuda:0", dtype=parameters)
        for layer in layers:
            inputs = layer(inputs.to(layer.weight.device))
        optimizer.backward(inputs.float().square().mean())
        if step == 3:
            layers[2].weight.grad[0, 0] = torch.inf
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float().clone()
        result, norm = optimizer.step(), nn.utils.get_total_norm([master.grad for master in masters])
        torch.testing.assert_close(result.grad_norm.cpu(), norm.cpu())
        assert bool(result) is (step != 3)
        for master in masters:
            master.grad *= torch.clamp(0.1 / (result.grad_norm + 1e-6), max=1.0).to(master.device)
        if step != 3:
            expected.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert torch.equal(parameter, master.to(parameters))

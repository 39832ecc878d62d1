"""A stand-in for the kernel of :mod:`lightstep.precision.adam_kernel` on the CPU: its interface, by torch's own passes.

So everything around the kernel is tested where there is no GPU: what it is handed, in which order, and what is left to
the passes apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightstep.optimizer import arithmetic, unit_updater
from lightstep.precision import adam_kernel
from lightstep.precision.adam_batch import AdamBatch, AdamCall, AdamMemory
from lightstep.precision.moments import BFloat16
from lightstep.precision.moments_int8 import Int8
from lightstep.precision.noise import Noise
from lightstep.precision.split import Splitter

used: Counter[str] = Counter()
"""How often it ran, by how masters and moments are kept."""


def update(batch: AdamBatch, gradients: Sequence[Tensor], steps: Sequence[Tensor], call: AdamCall) -> None:
    """See :func:`lightstep.precision.adam_triton.update`."""
    assert len({gradient.dtype for gradient in gradients}) == 1  # a kernel has one pointer type for all
    for marks in batch.marks:
        marks.zero_()
    for memory, gradient, step in zip(batch.memories, gradients, steps, strict=True):
        assert gradient.is_contiguous() and gradient.numel() == memory.n
        _update(memory, gradient.view(-1), step, call.shared, call.numbers, *call.constants)
        if batch.fingerprints is not None:
            found, place = torch.zeros(1, dtype=torch.int32), batch.fingerprints[memory.number : memory.number + 1]
            Splitter(memory.written.device).fingerprints(memory.written, memory.first, [(0, memory.n)], found)
            place.add_(found)
    torch.autograd.graph.increment_version(batch.written)


def _update(
    memory: AdamMemory,
    gradient: Tensor,
    step: Tensor,
    shared: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    decays: bool,
    decoupled: bool,
    maximize: bool,
) -> None:
    tensors = memory.tensors
    weight, low, whole = tensors.weight, tensors.low, tensors.master
    overflow, _, rate, divisor, factor = shared
    assert overflow is not None
    is_rounded = low is None and whole is None
    used["own" if weight is None else "split" if low is not None else "rounded" if is_rounded else "whole"] += 1
    if memory.block:
        used["bfloat16" if memory.block == 1 else "int8"] += 1
    if overflow != 0:
        return
    splitter, (exp_avg, exp_avg_sq, largest) = Splitter(gradient.device), _decoded(memory)
    if whole is None:
        assert weight is not None
        whole = weight.float()
        if low is not None:
            splitter.join(weight, low, exp_avg_sq, whole)
    row = gradient.float().clone()
    if divisor is not None:
        row.div_(divisor)
    if factor is not None:
        row.mul_(factor)
    assert all(type(number) is float for number in numbers[:5])  # a kernel compiled for an int takes no float
    lr, beta1, beta2, decay, eps, _ = numbers
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    fused(
        [whole],
        [row],
        [exp_avg],
        [exp_avg_sq],
        [] if largest is None else [largest],
        [step + 1],
        lr=lr if rate is None else rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay if decays else 0.0,
        eps=eps,
        amsgrad=largest is not None,
        maximize=maximize,
    )
    if low is not None:
        assert weight is not None
        splitter.split(whole, weight, low, exp_avg_sq)
    elif is_rounded:
        assert weight is not None
        BFloat16(Noise()).at([weight]).encode_update(whole, "weight", step + 1, memory.numbers)
    elif weight is not None:
        weight.copy_(whole)
    _encode(memory, (exp_avg, exp_avg_sq, largest), step + 1)


def _coded(memory: AdamMemory) -> list[Any]:
    """Each moment's memory, as a codec sees it."""
    noise = Noise() if memory.noisy else None
    planes = [planes for planes in adam_kernel._planes_of(memory).values() if planes]
    if memory.block == 1:
        return [BFloat16(noise).at(own) for own in planes]
    return [Int8(memory.block, number > 0, noise).at(own) for number, own in enumerate(planes)]


def _decoded(memory: AdamMemory) -> list[Any]:
    """The moments in fp32; the last one is ``None`` without ``amsgrad``."""
    tensors = memory.tensors
    if not memory.block:
        return [tensors.exp_avg, tensors.exp_avg_sq, tensors.max_exp_avg_sq]
    found: list[Any] = []
    for coded in _coded(memory):
        found.append(torch.empty(memory.n, dtype=torch.float32))
        coded.decode(found[-1])
    return [*found, None][:3]


def _encode(memory: AdamMemory, moments: Sequence[Any], step: Tensor) -> None:
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    for name, value, coded in zip(names, moments, _coded(memory) if memory.block else (), strict=False):
        if memory.noisy:
            coded.encode_update(value, name, step, memory.numbers)
        else:
            coded.encode(value)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW and Adam run in one pass on the CPU too."""
    import tests.one_pass_on_cpu as twin

    for module in (arithmetic, unit_updater):
        monkeypatch.setattr(module, "fused_kernel_on", lambda device: twin)
    make = Splitter.__init__  # sums as the kernel makes them
    monkeypatch.setattr(Splitter, "__init__", lambda self, device, checksums=False: make(self, device))


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several passes, as torch's own steps run on a CPU."""
    for module in (arithmetic, unit_updater):
        monkeypatch.setattr(module, "fused_kernel_on", lambda device: None)


@pytest.fixture
def few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is held against torch's passes on some numbers of each kind."""
    every_kind = adam_kernel.probe_masters(torch.device("cpu"))
    monkeypatch.setattr(adam_kernel, "probe_masters", lambda device: every_kind[:4099].clone())


@pytest.fixture(name="one_pass_on_cpu")
def one_pass_fixture(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what it did."""
    install(monkeypatch)
    used.clear()
    return used

"""A stand-in for the kernel of :mod:`lightstep.precision.adam_kernel` on the CPU: its interface, by torch's own passes.

So everything around the kernel is tested where there is no GPU: what it is handed, in which order, and what is left to
the passes apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightstep.optimizer import arithmetic, one_pass
from lightstep.precision.adam_batch import AdamBatch, AdamMemory
from lightstep.precision.split import Splitter
from lightstep.state import store

used: Counter[str] = Counter()
"""How often it ran, by how masters are kept."""


def update(
    batch: AdamBatch,
    gradients: Sequence[Tensor],
    steps: Sequence[Tensor],
    shared: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    *constants: bool,
) -> None:
    """See :func:`lightstep.precision.adam_triton.update`."""
    for memory, gradient, step in zip(batch.memories, gradients, steps, strict=True):
        _update(memory, gradient.view(-1), step, shared, numbers, *constants)
        if batch.fingerprints is not None:
            found, place = torch.zeros(1, dtype=torch.int32), batch.fingerprints[memory.number : memory.number + 1]
            Splitter(memory.written.device).fingerprints(memory.written, memory.first, [(0, memory.n)], found)
            place.add_(found)


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
    exp_avg, exp_avg_sq, largest, weight, low, master = memory.tensors
    overflow, _, rate, divisor, factor = shared
    assert overflow is not None
    used["own" if weight is None else "split" if low is not None else "whole"] += 1
    splitter, whole = Splitter(gradient.device), master
    if whole is None:
        assert weight is not None and low is not None
        if overflow != 0:
            return
        whole = torch.empty_like(exp_avg)
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
        [step],
        lr=lr if rate is None else rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay if decays else 0.0,
        eps=eps,
        amsgrad=largest is not None,
        maximize=maximize,
        found_inf=overflow,
    )
    if low is not None:
        assert weight is not None
        splitter.split(whole, weight, low, exp_avg_sq)
    elif weight is not None and overflow == 0:
        weight.copy_(whole)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW and Adam run in one pass on the CPU too."""
    import tests.one_pass_on_cpu as twin

    for module in (arithmetic, one_pass):
        monkeypatch.setattr(module, "fused_kernel_on", lambda device: twin)
    monkeypatch.setattr(store, "ChecksummedWeights", lambda splitter: splitter)  # sums as the kernel makes them


@pytest.fixture(name="one_pass_on_cpu")
def one_pass_fixture(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what it did."""
    install(monkeypatch)
    used.clear()
    return used

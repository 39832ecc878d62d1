"""AdamW and Adam in one pass on a GPU: the kernel runs, with torch's bits for every kind of update."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from typing import Any

import pytest
import torch

from lightstep.optimizer import arithmetic, unit_updater
from lightstep.precision import adam_kernel
from lightstep.precision.adam_batch import adam_call
from lightstep.precision.split import Splitter
from lightstep.state import segment
from tests.gpu.test_next_forward_gpu import Training
from tests.unit.test_next_forward import assert_same

pytestmark = pytest.mark.gpu

_CODINGS = {
    "split": (torch.bfloat16, True),
    "whole bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "own": (None, False),
}


@pytest.mark.parametrize("coding", list(_CODINGS))
def test_the_check_on_the_spot_passes(coding: str, caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    twin = adam_kernel.fused_kernel_on(device)
    assert twin is not None  # torch 2.11's Adam with decay in the gradient has other bits, unless it is amsgrad
    weight, split = _CODINGS[coding]
    flags = itertools.product((False, True), repeat=4)
    kinds = [
        adam_kernel.Kind(
            device, gradient, weight, split, amsgrad, False, True, decoupled, maximize, on_device, False, True
        )
        for amsgrad, decoupled, maximize, on_device in flags
        for gradient in (torch.bfloat16, torch.float32)
    ]
    base = kinds[0]._replace(decoupled=True)
    kinds += [base._replace(divided=True), base._replace(multiplied=False), base._replace(decays=False)]
    kinds += [base._replace(gradient=torch.float16), base._replace(divided=True, multiplied=False)]
    if weight is not None:
        kinds += [kind._replace(fingerprinted=True) for kind in kinds]
    with caplog.at_level(logging.INFO):
        aside = [kind for kind in kinds if not adam_kernel.runs_in_one_pass(twin, kind)]
    assert [kind for kind in aside if kind.decoupled or kind.amsgrad] == [], caplog.text


@pytest.mark.parametrize("coding", ["split", "whole bf16", "fp16"])
def test_an_overflow_changes_nothing_and_weights_keep_their_fingerprint(coding: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    twin = adam_kernel.fused_kernel_on(device)
    assert twin is not None
    weight, split = _CODINGS[coding]
    kind = adam_kernel.Kind(device, torch.bfloat16, weight, split, False, True, True, True, False, False, False, True)
    batch, step, values = adam_kernel._example(kind, edges=False, step=7.0)
    (memory,) = batch.memories
    held = [values["gradient"], step, *(one for one in memory.tensors if one is not None)]
    before = [one.clone() for one in held]
    scaling = kind.scaling()._replace(overflow=torch.ones((), device=device))
    twin.update(batch, [values["gradient"]], [step], adam_call(kind.settings(1e-3, 0.9, 0.99, 1e-8), scaling))
    assert batch.fingerprints is not None
    expected = torch.zeros(3, dtype=torch.int32, device=device)
    Splitter(device).fingerprints(memory.written, memory.first, [(0, memory.n)], expected[1:2])
    assert torch.equal(batch.fingerprints, expected) and expected[1] != 0
    for one, known in zip(held, before, strict=True):
        assert torch.equal(*(value.reshape(-1).view(torch.uint8) for value in (one, known)))


@pytest.mark.parametrize("state", [{"backend": "resident"}, {"backend": "stream"}], ids=["resident", "stream"])
@pytest.mark.parametrize("parameters", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("large", [segment.LARGE, 48])
def test_it_runs_and_gives_the_bits_of_the_passes_apart(
    state: dict[str, Any], parameters: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "LARGE", large)  # parameters put together, or in their own memory
    ran: Counter[str] = Counter()
    plan = unit_updater._Plan
    monkeypatch.setattr(unit_updater, "_Plan", lambda *given: (ran.update(planned=len(given[1])), plan(*given))[1])
    found = Training(state, parameters)
    losses = found.train(6)
    assert ran["planned"]
    for module in (arithmetic, unit_updater):
        monkeypatch.setattr(module, "fused_kernel_on", lambda device: None)
    expected = Training(state, parameters)
    assert expected.train(6) == losses
    assert_same(found.snapshot(), expected.snapshot())


def test_resident_keeps_ten_bytes_beside_a_bf16_weight_and_not_twelve(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for fused_kernel_on in (arithmetic.fused_kernel_on, lambda device: None):
        for module in (arithmetic, unit_updater):
            monkeypatch.setattr(module, "fused_kernel_on", fused_kernel_on)
        training = Training({"backend": "resident"}, "bfloat16")
        training.train(2)
        held.append(training.optimizer.memory_report()["device_bytes"])
    assert held[0] / held[1] == pytest.approx(10 / 12, rel=0.01)

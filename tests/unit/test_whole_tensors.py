"""Optimizers that are not element-wise, and classes whose state only looks like Adam's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep.optimizer import muon
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.muon import Graph, Orthogonalizer, orthogonalize
from tests.reference.own_classes import EachParameter
from tests.reference.pair import BACKENDS
from tests.training import OnVectors, assert_same


class Lamb(EachParameter):
    """Scales the update of each tensor by its norm, and says nothing about it."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        moment = state.setdefault("exp_avg", torch.zeros_like(p))
        moment.mul_(0.9).add_(grad, alpha=0.1)
        p.sub_(moment * (group["lr"] * (p.norm() / (moment.norm() + 1e-6))))


class SignedSum(EachParameter):
    """Keeps signed numbers under a name that torch's classes use for squares."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        total = state.setdefault("sum", torch.zeros_like(p)).add_(grad)
        p.add_(total, alpha=-group["lr"])


class Declared(EachParameter):
    """Squares, and it says so: their signs are free."""

    never_negative = ("sum",)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        total = state.setdefault("sum", torch.zeros_like(p)).addcmul_(grad, grad)
        p.addcdiv_(grad, total.sqrt() + 1e-3, value=-group["lr"])


pytestmark = pytest.mark.usefixtures("small_cuts")


def trained(
    backend: str, optimizer_class: type[torch.optim.Optimizer], update: str = "at_step", weights: Any = None
) -> OnVectors:
    """After four steps."""
    bias = optimizer_class is not torch.optim.Muon
    run = OnVectors(
        {**BACKENDS[backend], "update": update},
        make=lambda: nn.Sequential(nn.Linear(6, 40, bias=bias), nn.Tanh(), nn.Linear(40, 3, bias=bias)),
        optimizer_class=optimizer_class,
        clipping={"max_norm": None},
        weights=weights,
    )
    run.train(4)
    return run


@pytest.mark.parametrize(
    ("optimizer_class", "expected"),
    [
        (torch.optim.AdamW, False),
        (torch.optim.SGD, False),
        (torch.optim.Adafactor, True),
        (torch.optim.Muon, True),
        (SignedSum, False),
        (Lamb, True),
        (type("MyAdamW", (torch.optim.AdamW,), {}), False),
        (type("SaysItIsNot", (Lamb,), {"whole_tensors": False}), False),
    ],
)
def test_who_needs_whole_tensors_is_found_out(optimizer_class: type[torch.optim.Optimizer], expected: bool) -> None:
    state = torch.get_rng_state()
    arithmetic = BaseArithmetic(optimizer_class, {"lr": 1e-2})
    arithmetic.inspect_groups([{}])
    assert arithmetic.whole_tensors is expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("optimizer_class", [Lamb, SignedSum, Declared, torch.optim.Adafactor, torch.optim.Muon])
def test_streamed_equals_resident(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """With the weights on the host, too."""
    expected = trained("resident", optimizer_class).snapshot()
    for more in ({}, {"update": "overlap", "weights": {"placement": "host", "device_mib": 0.001}}):
        assert_same(trained("stream", optimizer_class, **more).snapshot(), expected)


def test_squares_that_are_declared_take_no_bitmap() -> None:
    used = [
        sum(record.nbytes for record in trained("stream", optimizer_class).optimizer._backend._records)
        for optimizer_class in (SignedSum, Declared)
    ]
    assert used[0] > used[1]


# -- graphs of Newton-Schulz, by a recorder for the CPU; tests/gpu/test_muon_gpu.py has real ones


GROUP: dict[str, Any] = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
MEMORY = torch.empty(24 * 40, dtype=torch.bfloat16)


class Recorder:
    """Counts; ``fault`` is what goes wrong."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.recorded, self.replayed = fault, 0, 0

    def record(self, work: Callable[[], Tensor]) -> Graph:
        self.recorded += 1
        if self.fault == "refused":
            raise RuntimeError("operation not permitted when stream is capturing")
        result: list[Tensor] = []

        def replay() -> None:
            self.replayed += 1
            found = work() + (0.5 if self.fault == "differs" else 0)
            if not result:
                graph.result.resize_(found.shape)
            graph.result.copy_(found)

        graph = Graph(replay, torch.empty(0, dtype=torch.bfloat16), 8)
        return graph


def prepared(monkeypatch: pytest.MonkeyPatch, fault: str = "") -> tuple[Orthogonalizer, Recorder]:
    recorder = Recorder(fault)
    monkeypatch.setattr(muon, "_can_record", lambda device: True)
    monkeypatch.setattr(muon, "_Recorder", lambda device: recorder)
    return Orthogonalizer(), recorder


def run(tested: Orthogonalizer, count: int, group: dict[str, Any] = GROUP) -> None:
    """Matrices of three shapes, all in the same memory."""
    numbers = torch.Generator().manual_seed(1)
    for _ in range(count):
        for shape in ((24, 40), (40, 24), (16, 16)):
            values = torch.randn(*shape, generator=numbers).bfloat16()
            matrix = MEMORY[: values.numel()].view(shape).copy_(values)
            assert torch.equal(tested(matrix, group), orthogonalize(values.clone(), group))


def test_a_graph_is_recorded_with_the_second_matrix_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    tested, recorder = prepared(monkeypatch)
    run(tested, 1)
    assert recorder.recorded == 0
    run(tested, 4)
    assert recorder.recorded == 3 and recorder.replayed == 3 + 3 * 3
    assert tested.nbytes() == 3 * 8
    run(tested, 2, {**GROUP, "ns_steps": 3})  # other settings are other kernels
    assert recorder.recorded == 6


@pytest.mark.parametrize("fault", ["refused", "differs"])
def test_a_graph_that_is_of_no_use_is_left_out(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tested, recorder = prepared(monkeypatch, fault)
    with caplog.at_level(logging.INFO, "lightstep"):
        run(tested, 4)
    assert recorder.recorded == 3 and recorder.replayed == (0 if fault == "refused" else 3)
    expected = {"refused": "not permitted", "differs": "its result differs"}[fault]
    assert caplog.text.count(expected) == 3 and "shape (24, 40)" in caplog.text
    assert tested.nbytes() == 0


def test_freed_graphs_are_recorded_again_and_copies_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tested, recorder = prepared(monkeypatch)
    run(tested, 2)
    copied = copy.deepcopy(tested)
    assert copied.nbytes() == 0 < tested.nbytes()
    tested.free()
    assert tested.nbytes() == 0
    run(tested, 2)
    assert recorder.recorded == 6


def test_graphs_of_freed_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    tested, recorder = prepared(monkeypatch)
    synchronized: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronized.append)
    run(tested, 3)
    tested.retain({MEMORY.data_ptr(), 0})
    assert tested.nbytes() == 3 * 8 and not synchronized
    tested.retain({MEMORY.data_ptr() + 64})
    assert tested.nbytes() == 0 and synchronized == [MEMORY.device]
    tested.retain(())
    run(tested, 3)
    assert recorder.recorded == 6 and len(synchronized) == 1


def test_the_cpu_has_no_graphs() -> None:
    tested = Orthogonalizer()
    run(tested, 3)
    assert tested.nbytes() == 0 and not tested._seen

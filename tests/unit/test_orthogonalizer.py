"""Graphs of Newton-Schulz: recorded once per shape, compared, and left out where they differ or cannot be recorded.

A recorder for the CPU runs the work again at every replay; `tests/gpu/test_muon_gpu.py` has real graphs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightstep.optimizer import muon
from lightstep.optimizer.muon import Graph, Orthogonalizer, orthogonalize

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

"""These tests need a CUDA GPU, and say so where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its state for the life of a process, and the Trainer takes one GPU."""
    from accelerate.state import AcceleratorState, GradientState

    from tests.unit import test_host_weights_elsewhere as on_cpu

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(on_cpu, "delay", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # with more the Trainer takes nn.DataParallel
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

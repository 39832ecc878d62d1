"""examples/exactness.py runs, and classes whose implementations differ are those that the README names."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from tests.snippets import CHECKOUT


@pytest.mark.parametrize("backend", ["resident", "bulk", "stream"])
def test_every_bit_is_equal(backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = CHECKOUT / "examples" / "exactness.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--backend", backend, "--steps", "6"])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "6 steps" in said and "every bit equal" in said and " 0 of them clipped" not in said


def test_fused_and_default_implementations_differ_in_the_last_bits() -> None:
    """Why a loop that is compared with lightstep's says ``fused=True``."""

    def after_steps(**implementation: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4096, generator=generator))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, **implementation)
        for _ in range(5):
            weight.grad = torch.randn(4096, generator=generator)
            optimizer.step()
        return weight.detach()

    fused, default = after_steps(fused=True), after_steps()
    assert not torch.equal(fused, default)
    assert torch.allclose(fused, default, rtol=1e-4)

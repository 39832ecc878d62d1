"""Muon beside AdamW on a CUDA device: the bits of torch's two optimizers with one norm over both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightstep.optimizer.muon import Orthogonalizer, orthogonalize
from tests.reference.pair import EVERY_TIME, scale_for
from tests.unit.test_rules import MUON, RMS, MuonPair

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", list(EVERY_TIME))
@pytest.mark.parametrize("parameters", ["bfloat16", "float16"])
@pytest.mark.parametrize("muon", [MUON, RMS], ids=["torch's rates", "AdamW's rates"])
def test_muon_and_adamw(backend: str, parameters: str, muon: dict[str, Any]) -> None:
    overflow_at = (3, 11) if parameters == "float16" else ()
    pair = MuonPair(
        muon, backend=backend, parameters=parameters, max_norm=0.5, overflow_at=overflow_at, **scale_for(parameters)
    )
    pair.train(15)
    pair.resume()
    pair.train(5)
    assert pair.reference.clipped_steps > 0


def test_graphs_of_newton_schulz_have_torchs_bits() -> None:
    """On any stream, with other work and allocations between recordings, and after their memory was freed."""
    tested, memory = Orthogonalizer(), torch.empty(2048 * 1024, dtype=torch.bfloat16, device="cuda")
    group = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
    numbers = torch.Generator("cuda").manual_seed(1)
    shapes = ((2048, 1024), (512, 1536), (256, 256), (64, 2048), (40, 24))
    for step in range(8):
        if step == 5:
            tested.free()
        stream = torch.cuda.Stream() if step % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for shape in shapes:
                values = torch.randn(*shape, device="cuda", generator=numbers).bfloat16()
                if step == 7:
                    values[0, 0] = float("nan")
                matrix = memory[: values.numel()].view(shape).copy_(values)
                found, expected = tested(matrix, group), orthogonalize(values, group)
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        torch.cuda.current_stream().wait_stream(stream)
    assert len(tested._graphs) == len(shapes) and not tested._eager and tested.nbytes() > 0

"""Muon beside AdamW on a CUDA device: the bits of torch's two optimizers with one norm over both."""

from __future__ import annotations

from typing import Any

import pytest

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

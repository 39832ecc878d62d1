"""Tiny models of transformers: the loss is that of plain mixed precision. tests/model_types.py tries all types."""

from __future__ import annotations

import pytest
import transformers

from tests import model_types
from tests.covering import every_value
from tests.model_types import attempt

KEEP = ("glm4_moe", "flint", "ctrl", "codegen")
"""Buffers or parameters stay fp32."""
FOLLOW = ("xglm", "openai-gpt", "falcon_mamba", "gemma3_text")
"""Buffers have to follow the parameters."""
OTHERS = ("qwen3_moe",)


def _needs(model_type: str) -> None:
    if model_type not in model_types.types():
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


@pytest.mark.parametrize("model_type", [*KEEP, *FOLLOW, *OTHERS])
def test_the_loss_is_that_of_plain_mixed_precision(model_type: str) -> None:
    _needs(model_type)
    outcome = attempt(model_type)
    assert outcome.result == "equal", outcome
    named = [name for name in outcome.kept if not name.endswith("inv_freq")]
    assert bool(named) == (model_type in KEEP), outcome


@every_value(model_type=["glm4_moe", "xglm"], preset=["stream-overlap", "fp16"])
def test_so_it_is_under_other_presets(model_type: str, preset: str) -> None:
    _needs(model_type)
    assert attempt(model_type, preset).result == "equal"

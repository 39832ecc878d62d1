"""Layers whose weights bitsandbytes has quantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


def quantised_by_bitsandbytes(storage: str, device: str) -> nn.Module:
    """A frozen layer of 64 x 64: int8, or 4-bit numbers in pairs of this storage dtype."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    if storage == "int8":
        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    else:
        layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4", quant_storage=getattr(torch, storage))
    layer.load_state_dict({"weight": torch.randn(64, 64), "bias": torch.zeros(64)})
    found: nn.Module = layer.to(device).requires_grad_(False)
    return found


def dequantised(layer: Any) -> Tensor:
    """Its weights in fp32."""
    import bitsandbytes as bnb

    if layer.weight.dtype == torch.int8 and not hasattr(layer.weight, "quant_state"):
        scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB  # the first forward moves them
        return layer.weight.data.float() * scales[:, None].float() / 127
    found: Tensor = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    return found

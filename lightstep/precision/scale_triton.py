"""The fused twin of :func:`lightstep.precision.scale_kernel.scale_into`; imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def scale(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """``out = float(gradient) * factor``; flat tensors and a 1-element factor on one CUDA device."""
    size = gradient.numel()
    with torch.cuda.device_of(gradient):  # Triton launches on the current device
        _scale_kernel[(triton.cdiv(size, _BLOCK),)](gradient, factor, out, size, BLOCK=_BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["size"])
def _scale_kernel(gradient, factor, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(gradient + place, mask=inside).to(tl.float32)
    tl.store(out + place, value * tl.load(factor), mask=inside)

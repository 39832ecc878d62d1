"""The fused kernel of :func:`lightstep.precision.scale_kernel.scale_into`; imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


def scale(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """``out = float(gradient) * factor``; flat tensors and a 1-element factor on one CUDA device."""
    size = gradient.numel()
    with torch.cuda.device_of(gradient):  # Triton launches on the current device
        _scale_kernel[(triton.cdiv(size, _BLOCK),)](gradient, factor, out, size, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit(do_not_specialize=["size"])
def _scale_kernel(gradient, factor, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    by = tl.load(factor)
    if first + BLOCK <= size:  # accesses under a mask are not vectorised
        tl.store(out + place, tl.load(gradient + place).to(tl.float32) * by)
    else:
        inside = place < size
        tl.store(out + place, tl.load(gradient + place, mask=inside).to(tl.float32) * by, mask=inside)

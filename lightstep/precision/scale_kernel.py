"""``out = float(gradient) * factor`` in one pass over memory.

torch does this by ``torch.mul`` with mixed dtypes, which on CUDA uses slow casting kernels. The Triton kernel does the
same IEEE operations. It is checked against torch once per device, and not used if it differs or Triton is missing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

ScaleInto = Callable[[Tensor, Tensor, Tensor], None]
"""``(flat gradient, 1-element fp32 factor, flat fp32 out)``, all contiguous and on one device."""

_log = logging.getLogger(__name__)


def scale_into(device: torch.device) -> ScaleInto:
    """The fastest correct implementation on this device."""
    return _checked_triton(device) if device.type == "cuda" else _by_torch


def _by_torch(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    assert gradient.is_contiguous()  # the fused kernel ignores strides
    # A 1-dim factor promotes to fp32 before multiplying; a 0-dim one would round the product to the gradient's dtype.
    torch.mul(gradient, factor, out=out)


@functools.cache
def _checked_triton(device: torch.device) -> ScaleInto:
    try:
        from lightstep.precision.scale_triton import scale

        with torch.cuda.device(device):
            if all(_matches_torch(scale, dtype, device) for dtype in (torch.bfloat16, torch.float16)):
                return scale
        reason = "its result differs"
    except Exception as error:  # Triton fails in many ways: not installed, no compiler, no driver, unknown target
        reason = f"{type(error).__name__}: {error}"
    _log.warning("gradients are scaled by torch.mul on %s, not by a fused kernel (%s)", device, reason)
    return _by_torch


def _matches_torch(kernel: ScaleInto, dtype: torch.dtype, device: torch.device) -> bool:
    patterns = torch.arange(2**16, device=device, dtype=torch.int32).to(torch.int16).view(dtype)
    factor = torch.tensor([0.37 / 65536], dtype=torch.float32, device=device)
    ours, theirs = (torch.empty(patterns.numel(), dtype=torch.float32, device=device) for _ in range(2))
    kernel(patterns, factor, ours)
    _by_torch(patterns, factor, theirs)
    return torch.equal(ours.nan_to_num(nan=1.5), theirs.nan_to_num(nan=1.5))

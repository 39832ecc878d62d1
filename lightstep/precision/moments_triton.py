"""The fused kernel of :class:`~lightstep.precision.moments.BFloat16`, and the noise for kernels.

It is used only if it gives the bits of the torch version on the device. ``available`` is False without Triton. Its body
has two versions, as in ``split_triton``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.precision.noise import signed
from lightstep.precision.triton_launch import Launcher

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

available = triton is not None
_BLOCK, _WARPS = 1024, 4


def round_stochastically(value: Tensor, out: Tensor, step: Tensor, salt: int, numbers: Tensor | Window) -> None:
    """See :meth:`BFloat16.encode_update`; ``step``: int32 on the device; ``salt``: that of the entry."""
    row, window = (numbers, Window()) if isinstance(numbers, Tensor) else (None, numbers)
    tensors = (value.view(torch.int32), out.view(torch.int16), step, row)
    _launch(value.numel(), tensors, (signed(salt), *window), window.jump != 0)


if available:

    @triton.jit
    def mix(x):  # type: ignore[no-untyped-def]
        """As ``noise.py``'s: FIRST and SECOND as signed numbers, written out, because a kernel cannot read globals."""
        x = x ^ ((x >> 16) & 0xFFFF)
        x = x * 2146121005
        x = x ^ ((x >> 15) & 0x1FFFF)
        x = x * -2073254261
        return x ^ ((x >> 16) & 0xFFFF)

    @triton.jit
    def noise_of(numbers, place, inside, a, b, start, inner, jump, skipped, JUMPS: tl.constexpr):  # type: ignore[no-untyped-def]
        """16 bits for each element at ``place``."""
        if numbers is not None:
            number = tl.load(numbers + place, mask=inside, other=0)
        else:
            local = place + skipped
            whole = local + start
            if JUMPS:
                whole += local // inner * jump
            number = whole.to(tl.int32)
        x = number * -1640531535 + a
        x = x ^ ((x >> 16) & 0xFFFF)
        x = x * 2146121005 + b
        x = x ^ ((x >> 15) & 0x1FFFF)
        return ((x * -2073254261) >> 16) & 0xFFFF

    @triton.jit
    def _round_block(  # type: ignore[no-untyped-def]
        value,
        out,
        numbers,
        first,
        n,
        a,
        b,
        start,
        inner,
        jump,
        skipped,
        JUMPS: tl.constexpr,
        BLOCK: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        place = first + tl.arange(0, BLOCK)
        inside = place < n if not WHOLE else tl.full(place.shape, True, tl.int1)
        noise = noise_of(numbers, place, inside, a, b, start, inner, jump, skipped, JUMPS)
        bits = tl.load(value + place, mask=inside, other=0)
        rounded = (bits + noise) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        code = tl.where(is_nan, (bits >> 16) | 0x40, rounded)
        tl.store(out + place, code.to(tl.int16), mask=inside)

    @triton.jit(do_not_specialize=["salt", "start", "inner", "jump", "skipped", "n"])
    def _round_kernel(  # type: ignore[no-untyped-def]
        value,
        out,
        step,
        numbers,
        salt,
        start,
        inner,
        jump,
        skipped,
        n,
        JUMPS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        first = tl.program_id(0).to(tl.int64) * BLOCK
        a = mix(tl.load(step) * -2048144777 + salt)
        b = mix(a + -1028477379)
        if first + BLOCK <= n:
            _round_block(value, out, numbers, first, n, a, b, start, inner, jump, skipped, JUMPS, BLOCK, True)
        else:
            _round_block(value, out, numbers, first, n, a, b, start, inner, jump, skipped, JUMPS, BLOCK, False)

    _launch = Launcher(_round_kernel, _BLOCK, _WARPS)

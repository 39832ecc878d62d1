"""AdamW and Adam on one run of parameters in one pass over memory; imported only where Triton is installed.

Operation by operation what torch's fused kernel does on CUDA, in its order, so that the bits are its bits: a moment is
``fma(beta, moment, fma(-beta, x, x))``, decay is one ``fma``, divisions and roots are correctly rounded, and nothing
else is contracted. Around it, in registers, what :mod:`lightstep.precision.split` does before and after.

The work stands there twice, for whole blocks and for the last one: accesses behind a mask of any length are made one
element at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightstep.precision.triton_launch import Launcher

_BLOCK, _WARPS = 512, 4


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    gradient,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    weight,
    low,
    master,
    step,
    corrections,
    learning_rate,
    divisor,
    factor,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    length,
    first,
    n,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    place = first + tl.arange(0, BLOCK)
    inside = place < n if not WHOLE else tl.full([BLOCK], True, tl.int1)
    g = tl.load(gradient + place, mask=inside, other=0).to(tl.float32)
    m = tl.load(exp_avg + place, mask=inside, other=0)
    if low is not None:
        signed = tl.load(exp_avg_sq + place, mask=inside, other=0).to(tl.int32, bitcast=True)
        v = (signed & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        code = tl.load(weight + place, mask=inside, other=0).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.load(low + place, mask=inside, other=0).to(tl.int32) & 0xFFFF
        p = (((code - ((signed >> 31) & 1)) << 16) | lower).to(tl.float32, bitcast=True)
    else:
        v = tl.load(exp_avg_sq + place, mask=inside, other=0)
        p = tl.load(master + place, mask=inside, other=0)

    if learning_rate is not None:
        lr = tl.load(learning_rate)
    updates = tl.minimum(tl.load(step).to(tl.int32), length - 1)
    rate = tl.div_rn(lr, tl.load(corrections + updates))
    root = tl.load(corrections + length + updates)
    # Times minus one, since Triton's `-x` is `0 - x`: not minus zero where x is zero.

    if divisor is not None:
        g = tl.div_rn(g, tl.load(divisor))
    if factor is not None:
        g = g * tl.load(factor)
    if MAXIMIZE:
        g = g * -1.0
    if DECAY:
        if DECOUPLED:
            p = tl.fma(lr * weight_decay * -1.0, p, p)
        else:
            g = tl.fma(p, weight_decay, g)
    m = tl.fma(beta1, m, tl.fma(beta1 * -1.0, g, g))
    square = g * g
    v = tl.fma(beta2, v, tl.fma(beta2 * -1.0, square, square))
    largest = v
    if max_exp_avg_sq is not None:
        before = tl.load(max_exp_avg_sq + place, mask=inside, other=0)
        largest = tl.where(before < v, v, before)
        tl.store(max_exp_avg_sq + place, largest, mask=inside)
    p = p - tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(largest), root) + eps)

    tl.store(exp_avg + place, m, mask=inside)
    if low is not None:
        bits = p.to(tl.int32, bitcast=True)
        upper = bits >> 16
        rounded = (bits + 0x7FFF + (upper & 1)) >> 16
        truncated = upper + ((upper & 0x7F) == 0).to(tl.int32)
        code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, truncated, rounded)
        tl.store(weight + place, code.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(low + place, bits.to(tl.int16), mask=inside)
        signed = (v.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (((code - upper) & 1) << 31)
        tl.store(exp_avg_sq + place, signed.to(tl.float32, bitcast=True), mask=inside)
    else:
        tl.store(exp_avg_sq + place, v, mask=inside)
        tl.store(master + place, p, mask=inside)
        if weight is not None:
            tl.store(weight + place, p.to(weight.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "n"])
def _adam_kernel(  # type: ignore[no-untyped-def]
    gradient,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    weight,
    low,
    master,
    step,
    overflow,
    corrections,
    learning_rate,
    divisor,
    factor,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    length,
    n,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if tl.load(overflow) == 0:
        if first + BLOCK <= n:
            _block(
                gradient,
                exp_avg,
                exp_avg_sq,
                max_exp_avg_sq,
                weight,
                low,
                master,
                step,
                corrections,
                learning_rate,
                divisor,
                factor,
                lr,
                beta1,
                beta2,
                weight_decay,
                eps,
                length,
                first,
                n,
                DECAY,
                DECOUPLED,
                MAXIMIZE,
                BLOCK,
                True,
            )
        else:
            _block(
                gradient,
                exp_avg,
                exp_avg_sq,
                max_exp_avg_sq,
                weight,
                low,
                master,
                step,
                corrections,
                learning_rate,
                divisor,
                factor,
                lr,
                beta1,
                beta2,
                weight_decay,
                eps,
                length,
                first,
                n,
                DECAY,
                DECOUPLED,
                MAXIMIZE,
                BLOCK,
                False,
            )


update = Launcher(_adam_kernel, _BLOCK, _WARPS, enable_fp_fusion=False)
"""Takes the number of elements, tensors and numbers in the kernel's order, and ``DECAY, DECOUPLED, MAXIMIZE``."""

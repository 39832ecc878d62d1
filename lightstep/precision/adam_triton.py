"""AdamW and Adam on runs of parameters in one pass over memory; imported only where Triton is installed.

The kernel does the operations of torch's fused CUDA kernel in the same order, and so gives its bits: a moment is
``fma(beta, moment, fma(-beta, x, x))``, decay is one ``fma``, divisions and roots are correctly rounded, and nothing
else is contracted. Before and after, it joins and splits masters in registers, as :mod:`lightstep.precision.split`, and
decodes and encodes moments that are kept in fewer bytes, as :mod:`lightstep.precision.moments` and
:mod:`lightstep.precision.moments_int8`. Weights without masters are rounded as moments in bf16 are.

Several runs share a launch, so that the GPU is not idle between them, nor waits for the host. A program finds its
addresses and what depends on the step once, and then processes some tiles. The body has two versions, for whole tiles
and for the last one, because accesses under a mask are not vectorised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightstep.distributed import Window
from lightstep.precision.adam_batch import AdamBatch, AdamCall, AdamMemory
from lightstep.precision.moments_int8_triton import (
    decode_positive,
    decode_signed,
    encode_in_eights,
    inverse,
    places_in_eights,
    quotient,
    share_of_noise,
    sign_bytes,
    signs_of,
)
from lightstep.precision.moments_triton import mix, noise_of
from lightstep.precision.noise import salt_of, signed
from lightstep.precision.split_triton import TOGETHER, mixed, pick, places_of, run_of
from lightstep.precision.triton_launch import Launcher, is_aligned

_SALTS = tuple(signed(salt_of(name)) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "weight"))


@triton.jit
def _inside(place, eight, left, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which places there are; if moments are in 8 bits by eights, so that accesses under this mask are vectorised."""
    if KEPT > 1:
        return tl.broadcast_to((eight * 8 < left)[:, None], place.shape)
    else:
        return place < left


@triton.jit
def _load_moment(codes, scales, where, KEPT: tl.constexpr, POSITIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A moment in fp32; if it is positive and in 8 bits, without the sign that it is kept with. (Also a weight.)"""
    place, eight, inside, left, _ = where
    code = tl.load(codes + place, mask=inside)
    if KEPT == 0:
        return code
    elif KEPT == 1:
        return (code.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + eight // (KEPT // 8), mask=eight * 8 < left)[:, None]
        if POSITIVE:
            return decode_positive(code, scale)
        else:
            return decode_signed(code, scale)


@triton.jit
def _load_square(codes, scales, signs, where, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The magnitude of a moment of squares, and the sign that it is kept with (int32, 0 or 1)."""
    _, eight, _, left, _ = where
    value = _load_moment(codes, scales, where, KEPT, True)
    if signs is not None:
        negative = signs_of(tl.load(signs + eight, mask=eight * 8 < left))
    else:
        negative = (value.to(tl.int32, bitcast=True) >> 31) & 1
    return tl.abs(value), negative


@triton.jit
def _with_sign(value, negative):  # type: ignore[no-untyped-def]
    bits = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (negative << 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _noise(numbers, where, window, SALT: tl.constexpr, JUMPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 bits for each element, by the number of its update."""
    place, _, inside, _, updates = where
    start, inner, jump, skipped = window
    a = mix(updates * -2048144777 + SALT)
    return noise_of(numbers, place, inside, a, mix(a + -1028477379), start, inner, jump, skipped, JUMPS)


@triton.jit
def _rounded(bits, noise):  # type: ignore[no-untyped-def]
    """The fp32 numbers with these bits in bf16, rounded stochastically."""
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    code = tl.where(is_nan, (bits >> 16) | 0x40, (bits + noise) >> 16)
    return code.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _store_moment(  # type: ignore[no-untyped-def]
    codes,
    scales,
    value,
    numbers,
    where,
    window,
    SALT: tl.constexpr,
    KEPT: tl.constexpr,
    POSITIVE: tl.constexpr,
    NOISY: tl.constexpr,
    JUMPS: tl.constexpr,
):
    """Keep fp32 numbers; of positive ones in 8 bits not the signs."""
    place, eight, inside, left, _ = where
    if NOISY:
        noise = _noise(numbers, where, window, SALT, JUMPS)
    if KEPT == 0:
        tl.store(codes + place, value, mask=inside)
    elif KEPT == 1:
        bits = value.to(tl.int32, bitcast=True)
        if NOISY:
            tl.store(codes + place, _rounded(bits, noise), mask=inside)
        else:  # a NaN's sign is lost in a cast
            code = value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
            code = (code & 0x7FFF) | ((bits >> 16) & 0x8000)
            tl.store(codes + place, code.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        up = 0.5
        if NOISY:
            up = share_of_noise(noise)
        code, scale = encode_in_eights(value, up, POSITIVE, KEPT)
        is_first = (eight % (KEPT // 8) == 0) & (eight * 8 < left)
        tl.store(scales + eight // (KEPT // 8), scale, mask=is_first)
        tl.store(codes + place, code, mask=inside)


@triton.jit
def _store_square(  # type: ignore[no-untyped-def]
    codes,
    scales,
    signs,
    value,
    negative,
    numbers,
    where,
    window,
    SALT: tl.constexpr,
    KEPT: tl.constexpr,
    NOISY: tl.constexpr,
    JUMPS: tl.constexpr,
):
    """Keep a moment of squares with these signs."""
    _, eight, _, left, _ = where
    if signs is not None:
        tl.store(signs + eight, sign_bytes(negative), mask=eight * 8 < left)
    else:
        value = _with_sign(value, negative)
    _store_moment(codes, scales, value, numbers, where, window, SALT, KEPT, True, NOISY, JUMPS)


@triton.jit
def _fingerprint(codes, place, inside):  # type: ignore[no-untyped-def]
    """Of weights (int32 from their 16 bits): one number, or one for each eight if places are in eights."""
    numbers = tl.where(inside, mixed(codes, place), 0)
    return tl.sum(numbers, axis=len(numbers.shape) - 1)


@triton.jit
def _block(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0915
    own,
    max_exp_avg_sq,
    weight,
    low,
    master,
    scales,
    sq_scales,
    max_scales,
    sq_signs,
    max_signs,
    numbers,
    mark,
    total,
    shared,
    window,
    divisor,
    factor,
    first,
    start,
    left,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    KEPT: tl.constexpr,
    NOISY: tl.constexpr,
    JUMPS: tl.constexpr,
    SALT: tl.constexpr,
    SQ_SALT: tl.constexpr,
    MAX_SALT: tl.constexpr,
    WEIGHT_SALT: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # What may be None is outside of the tuples: Triton takes none into one.
    gradient, exp_avg, exp_avg_sq = own[0] + first, own[1] + first, own[2] + first
    updates, lr, rate, root, beta1, beta2, weight_decay, eps = shared
    max_exp_avg_sq = None if max_exp_avg_sq is None else max_exp_avg_sq + first
    weight = None if weight is None else weight + first
    low = None if low is None else low + first
    master = None if master is None else master + first
    numbers = None if numbers is None else numbers + first
    eight = tl.arange(0, TILE // 8)
    if KEPT > 1:
        place = places_in_eights(TILE)
        scales, sq_scales, sq_signs = scales + first // KEPT, sq_scales + first // KEPT, sq_signs + first // 8
        max_scales = None if max_scales is None else max_scales + first // KEPT
        max_signs = None if max_signs is None else max_signs + first // 8
    else:
        place = tl.arange(0, TILE)
    inside = _inside(place, eight, left, KEPT) if not WHOLE else tl.full(place.shape, True, tl.int1)
    where = (place, eight, inside, left, updates)
    window = (window[0], window[1], window[2], window[3] + first)
    g = tl.load(gradient + place, mask=inside).to(tl.float32)
    m = _load_moment(exp_avg, scales, where, KEPT, False)
    v, negative = _load_square(exp_avg_sq, sq_scales, sq_signs, where, KEPT)
    if low is None:
        v = _with_sign(v, negative)
    else:
        code = tl.load(weight + place, mask=inside).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.load(low + place, mask=inside).to(tl.int32) & 0xFFFF
        p = (((code << 16) | lower) - (negative << 16)).to(tl.float32, bitcast=True)
    if master is not None:
        p = tl.load(master + place, mask=inside)
    elif low is None:
        p = _load_moment(weight, None, where, 1, False)

    # Multiplied by -1.0, because Triton's `-x` is `0 - x`, which is +0 if x is 0.

    if divisor is not None:
        g = tl.div_rn(g, divisor)
    if factor is not None:
        g = g * factor
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
        before, before_negative = _load_square(max_exp_avg_sq, max_scales, max_signs, where, KEPT)
        before = _with_sign(before, before_negative)
        largest = tl.where(before < v, v, before)
        _store_square(
            max_exp_avg_sq,
            max_scales,
            max_signs,
            largest,
            (largest.to(tl.int32, bitcast=True) >> 31) & 1,
            numbers,
            where,
            window,
            MAX_SALT,
            KEPT,
            NOISY,
            JUMPS,
        )
    size = tl.sqrt_rn(largest)
    # The root is at most 1, and the quotient of infinity a NaN.
    size = tl.maximum(size, quotient(size, root[0], root[1], root[2]))
    p = p - tl.div_rn(rate * m, size + eps)

    _store_moment(exp_avg, scales, m, numbers, where, window, SALT, KEPT, False, NOISY, JUMPS)
    bits = p.to(tl.int32, bitcast=True)
    if low is not None:
        rounded = p.to(tl.bfloat16)  # of NaNs a subtraction gives only 0x7FFFFFFF, whose upper half this is
        tl.store(weight + place, rounded, mask=inside)
        tl.store(low + place, bits.to(tl.int16), mask=inside)
        code = rounded.to(tl.int16, bitcast=True).to(tl.int32)
        negative = (code ^ (bits >> 16)) & 1
        if mark is not None:
            total += _fingerprint(code, start + place, inside)
    else:
        negative = (v.to(tl.int32, bitcast=True) >> 31) & 1
        if master is None:
            noise = _noise(numbers, where, window, WEIGHT_SALT, JUMPS)
            tl.store(weight + place, _rounded(bits, noise), mask=inside)
        else:
            tl.store(master + place, p, mask=inside)
            if weight is not None:
                rounded = p.to(weight.dtype.element_ty)
                tl.store(weight + place, rounded, mask=inside)
                if mark is not None:
                    total += _fingerprint(rounded.to(tl.int16, bitcast=True).to(tl.int32), start + place, inside)
    _store_square(exp_avg_sq, sq_scales, sq_signs, v, negative, numbers, where, window, SQ_SALT, KEPT, NOISY, JUMPS)
    return total


@triton.jit(do_not_specialize=["length"])
def _adam_kernel(  # type: ignore[no-untyped-def]
    gradients,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    weights,
    lows,
    masters,
    all_scales,
    all_sq_scales,
    all_max_scales,
    all_sq_signs,
    all_max_signs,
    all_numbers,
    steps,
    fingerprints,
    places,
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
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    KEPT: tl.constexpr,
    NOISY: tl.constexpr,
    JUMPS: tl.constexpr,
    SALT: tl.constexpr,
    SQ_SALT: tl.constexpr,
    MAX_SALT: tl.constexpr,
    WEIGHT_SALT: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number, own_places, begin = run_of(places, 8, COUNT, BLOCK)
    n = tl.load(own_places)
    gradient = pick(gradients, number, COUNT)
    exp_avg = pick(exp_avgs, number, COUNT)
    exp_avg_sq = pick(exp_avg_sqs, number, COUNT)
    max_exp_avg_sq = None if max_exp_avg_sqs is None else pick(max_exp_avg_sqs, number, COUNT)
    weight = None if weights is None else pick(weights, number, COUNT)
    low = None if lows is None else pick(lows, number, COUNT)
    master = None if masters is None else pick(masters, number, COUNT)
    scales = None if all_scales is None else pick(all_scales, number, COUNT)
    sq_scales = None if all_sq_scales is None else pick(all_sq_scales, number, COUNT)
    max_scales = None if all_max_scales is None else pick(all_max_scales, number, COUNT)
    sq_signs = None if all_sq_signs is None else pick(all_sq_signs, number, COUNT)
    max_signs = None if all_max_signs is None else pick(all_max_signs, number, COUNT)
    numbers = None if all_numbers is None else pick(all_numbers, number, COUNT)
    step = pick(steps, number, COUNT)
    mark = None if fingerprints is None else fingerprints + tl.load(own_places + 1)
    position = tl.load(own_places + 2)
    own = (gradient, exp_avg, exp_avg_sq)
    updates = tl.load(step).to(tl.int32) + 1
    if learning_rate is not None:
        lr = tl.load(learning_rate)
    known = tl.minimum(updates, length - 1)
    rate = tl.div_rn(lr, tl.load(corrections + known))
    root = tl.load(corrections + length + known)
    rounded, rest = inverse(root)
    shared = (updates, lr, rate, (root, rounded, rest), beta1, beta2, weight_decay, eps)
    scaled = None if divisor is None else tl.load(divisor)
    multiplied = None if factor is None else tl.load(factor)
    window = (
        tl.load(own_places + 3),
        tl.load(own_places + 4),
        tl.load(own_places + 5),
        tl.load(own_places + 6),
    )
    total = tl.zeros((TILE // 8,), tl.int32) if KEPT > 1 else 0
    end = tl.minimum(begin + BLOCK, n)
    if tl.load(overflow) == 0:
        for first in range(begin, end, TILE):
            start = (position + first).to(tl.int32)
            left = tl.minimum(n - first, TILE).to(tl.int32)
            for WHOLE in tl.static_range(1 if KEPT > 1 else 0, 2):
                if (left == TILE) == WHOLE if KEPT < 2 else True:
                    total = _block(
                        own,
                        max_exp_avg_sq,
                        weight,
                        low,
                        master,
                        scales,
                        sq_scales,
                        max_scales,
                        sq_signs,
                        max_signs,
                        numbers,
                        mark,
                        total,
                        shared,
                        window,
                        scaled,
                        multiplied,
                        first,
                        start,
                        left,
                        DECAY,
                        DECOUPLED,
                        MAXIMIZE,
                        KEPT,
                        NOISY,
                        JUMPS,
                        SALT,
                        SQ_SALT,
                        MAX_SALT,
                        WEIGHT_SALT,
                        TILE,
                        WHOLE and KEPT < 2,
                    )
    elif mark is not None:
        eight = tl.arange(0, TILE // 8)
        place = places_in_eights(TILE) if KEPT > 1 else tl.arange(0, TILE)
        for first in range(begin, end, TILE):
            inside = _inside(place, eight, n - first, KEPT)
            code = tl.load(weight + first + place, mask=inside).to(tl.int16, bitcast=True)  # type: ignore[operator]
            total += _fingerprint(code.to(tl.int32), (position + first).to(tl.int32) + place, inside)
    if mark is not None:
        tl.atomic_add(mark, tl.sum(total) if KEPT > 1 else total, sem="relaxed")


def launcher(tile: int, tiles: int, warps: int, **options: int) -> tuple[Launcher, int]:
    """A launcher whose programs process ``tiles`` tiles of so many elements, and the tile."""
    return Launcher(_adam_kernel, tile * tiles, warps, enable_fp_fusion=False, **options), tile


# With few registers more programs run at a time. Moments in 8 bits: eight elements for each thread.
plain, coding = launcher(1024, 2, 8, maxnreg=64), launcher(1024, 4, 4, maxnreg=96)


def update(batch: AdamBatch, gradients: Sequence[Tensor], steps: Sequence[Tensor], call: AdamCall) -> None:
    """See :class:`lightstep.precision.adam_batch.AdamBatch`."""
    for marks in batch.marks:
        marks.zero_()
    addresses = [gradient.data_ptr() for gradient in gradients]
    aligned = tuple([is_aligned(address) for address in addresses])
    launches = batch.launches.get(aligned)
    if launches is None:
        launches = batch.launches[aligned] = [_Launch(batch, rows) for rows in _rows(batch.memories, aligned)]
    counts = [step.data_ptr() for step in steps]
    for launch in launches:
        launch(gradients, addresses, steps, counts, call)
    torch.autograd.graph.increment_version(batch.written)


def _rows(memories: Sequence[AdamMemory], aligned: Sequence[bool]) -> Iterator[list[int]]:
    """The runs of each launch.

    A run that is not aligned gets a launch of its own: batches would be compiled for each combination of alignments.
    """
    may_share = [memory.aligned and one for memory, one in zip(memories, aligned, strict=True)]
    together = [number for number, may in enumerate(may_share) if may]
    yield from ([number] for number, may in enumerate(may_share) if not may)
    yield from (together[start : start + TOGETHER] for start in range(0, len(together), TOGETHER))


class _Launch:
    """Runs of a batch that share a launch, and what of its arguments stays the same from step to step."""

    def __init__(self, batch: AdamBatch, rows: Sequence[int]) -> None:
        memories = [batch.memories[number] for number in rows]
        self._rows = [*rows, *[rows[-1]] * (TOGETHER - len(rows))]
        self._tensors = memories[0].tensors
        self._launcher, self._tile = coding if memories[0].block > 1 else plain
        self._fingerprints = batch.fingerprints
        self._columns = self._columns_of([batch.memories[number].addresses for number in self._rows])
        self._compiling = self._columns_of([batch.memories[number].tensors for number in self._rows])
        device = memories[0].written.device
        windows = [one.window or Window() for one in memories]
        places = ((one.n, one.number, one.first, *window) for one, window in zip(memories, windows, strict=True))
        self._places, self._programs = places_of(tuple(places), self._launcher.block, device)
        self._own_constants = (memories[0].block, memories[0].noisy, memories[0].noise == "jumps", *_SALTS)
        self._keys: dict[tuple[int, bool], Any] = {}

    def _columns_of(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        columns = zip(self._tensors, zip(*rows, strict=True), strict=True)
        return [None if tensor is None else column for tensor, column in columns]

    def __call__(
        self,
        gradients: Sequence[Tensor],
        addresses: Sequence[int],
        steps: Sequence[Tensor],
        counts: Sequence[int],
        call: AdamCall,
    ) -> None:
        """Launch; ``addresses`` and ``counts`` are where the gradients and steps are."""
        first = self._rows[0]
        form = call.form, is_aligned(counts[first])
        key = self._keys.get(form)
        if key is None:
            tensors = (gradients[first], *self._tensors, steps[first], self._fingerprints, *call.shared)
            constants = (*call.constants, *self._own_constants, TOGETHER, self._tile)
            key = self._keys[form] = self._launcher.key(tensors, constants)
        compiled = self._launcher.compiled(key)
        columns = self._columns
        own: tuple[Any, ...] = tuple([addresses[i] for i in self._rows])
        counters: tuple[Any, ...] = tuple([counts[i] for i in self._rows])
        if compiled is None:  # the dtypes are needed
            columns = self._compiling
            own, counters = tuple(gradients[i] for i in self._rows), tuple(steps[i] for i in self._rows)
        arguments = (own, *columns, counters, self._fingerprints, self._places.read(), *call.shared, *call.numbers)
        self._launcher.launch(key, compiled, self._programs, arguments)

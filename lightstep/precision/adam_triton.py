"""AdamW and Adam on runs of parameters in one pass over memory; imported only where Triton is installed.

The kernel does the operations of torch's fused CUDA kernel in the same order, and so gives its bits: a moment is
``fma(beta, moment, fma(-beta, x, x))``, decay is one ``fma``, divisions and roots are correctly rounded, and nothing
else is contracted. Before and after, it joins and splits masters in registers, as :mod:`lightstep.precision.split`.

Several runs share a launch, one row of programs each, so that the GPU is not idle between them. The body has two
versions, for whole blocks and for the last one, because accesses under a mask are not vectorised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightstep.precision.adam_batch import AdamBatch, AdamMemory
from lightstep.precision.split_triton import TOGETHER, add_to_mark, pick, places_of
from lightstep.precision.triton_launch import Launcher, is_aligned

_BLOCK, _WARPS = 1024, 8


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    own,
    max_exp_avg_sq,
    weight,
    low,
    master,
    mark,
    shared,
    learning_rate,
    divisor,
    factor,
    start,
    left,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # What may be None is outside of the tuples: Triton takes none into one.
    gradient, exp_avg, exp_avg_sq, step = own
    corrections, lr, beta1, beta2, weight_decay, eps, length = shared
    place = tl.arange(0, BLOCK)
    inside = place < left if not WHOLE else tl.full([BLOCK], True, tl.int1)
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
    # Multiplied by -1.0, because Triton's `-x` is `0 - x`, which is +0 if x is 0.

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
        add_to_mark(mark, code.to(tl.int16).to(tl.int32), start + place, inside)
    else:
        tl.store(exp_avg_sq + place, v, mask=inside)
        tl.store(master + place, p, mask=inside)
        if weight is not None:
            rounded = p.to(weight.dtype.element_ty)
            tl.store(weight + place, rounded, mask=inside)
            add_to_mark(mark, rounded.to(tl.int16, bitcast=True).to(tl.int32), start + place, inside)


@triton.jit(do_not_specialize=["length"])
def _adam_kernel(  # type: ignore[no-untyped-def]
    gradients,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    weights,
    lows,
    masters,
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
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    n = tl.load(places + 3 * number)
    if first < n:
        gradient = pick(gradients, number, COUNT) + first
        exp_avg = pick(exp_avgs, number, COUNT) + first
        exp_avg_sq = pick(exp_avg_sqs, number, COUNT) + first
        max_exp_avg_sq = None if max_exp_avg_sqs is None else pick(max_exp_avg_sqs, number, COUNT) + first
        weight = None if weights is None else pick(weights, number, COUNT) + first
        low = None if lows is None else pick(lows, number, COUNT) + first
        master = None if masters is None else pick(masters, number, COUNT) + first
        step = pick(steps, number, COUNT)
        mark = None if fingerprints is None else fingerprints + tl.load(places + 3 * number + 1)
        start = (tl.load(places + 3 * number + 2) + first).to(tl.int32)
        left = tl.minimum(n - first, BLOCK).to(tl.int32)
        if tl.load(overflow) == 0:
            own = (gradient, exp_avg, exp_avg_sq, step)
            shared = (corrections, lr, beta1, beta2, weight_decay, eps, length)
            if left == BLOCK:
                _block(
                    own,
                    max_exp_avg_sq,
                    weight,
                    low,
                    master,
                    mark,
                    shared,
                    learning_rate,
                    divisor,
                    factor,
                    start,
                    left,
                    DECAY,
                    DECOUPLED,
                    MAXIMIZE,
                    BLOCK,
                    True,
                )
            else:
                _block(
                    own,
                    max_exp_avg_sq,
                    weight,
                    low,
                    master,
                    mark,
                    shared,
                    learning_rate,
                    divisor,
                    factor,
                    start,
                    left,
                    DECAY,
                    DECOUPLED,
                    MAXIMIZE,
                    BLOCK,
                    False,
                )
        elif mark is not None:
            place = tl.arange(0, BLOCK)
            code = tl.load(weight + place, mask=place < left, other=0).to(tl.int16, bitcast=True).to(tl.int32)
            add_to_mark(mark, code, start + place, place < left)


_launcher = Launcher(_adam_kernel, _BLOCK, _WARPS, enable_fp_fusion=False)


def update(
    batch: AdamBatch,
    gradients: Sequence[Tensor],
    steps: Sequence[Tensor],
    shared: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    *constants: bool,
) -> None:
    """See :meth:`lightstep.precision.adam_batch.AdamBatch.update`.

    Args:
        shared, numbers, constants: in the kernel's order: ``overflow``, ``corrections``, ``learning_rate``,
            ``divisor``, ``factor``; ``lr`` to ``length``; ``DECAY``, ``DECOUPLED``, ``MAXIMIZE``.
    """
    addresses = [gradient.data_ptr() for gradient in gradients]
    aligned = tuple(map(is_aligned, addresses))
    launches = batch.launches.get(aligned)
    if launches is None:
        launches = batch.launches[aligned] = [_Launch(batch, rows) for rows in _rows(batch.memories, aligned)]
    form = (constants, steps[0].data_ptr() % 16, *(None if t is None else (t.dtype, t.data_ptr() % 16) for t in shared))
    for launch in launches:
        launch(gradients, addresses, steps, form, shared, numbers, constants)


def _rows(memories: Sequence[AdamMemory], aligned: Sequence[bool]) -> Iterator[list[int]]:
    """The runs of each launch. Their lengths are similar: each gets as many programs as the longest.

    A run that is not aligned gets a launch of its own: batches would be compiled for each combination of alignments.
    """
    rows: list[int] = []
    for number in sorted(range(len(memories)), key=lambda number: -memories[number].n):
        n = memories[number].n
        if not (memories[number].aligned and aligned[number]):
            yield [number]
            continue
        if len(rows) == TOGETHER or (rows and n < 0.8 * memories[rows[0]].n):
            yield rows
            rows = []
        rows.append(number)
    if rows:
        yield rows


class _Launch:
    """Runs of a batch that share a launch, and what of its arguments stays the same from step to step."""

    def __init__(self, batch: AdamBatch, rows: Sequence[int]) -> None:
        memories = [batch.memories[number] for number in rows]
        self._rows = [*rows, *[rows[-1]] * (TOGETHER - len(rows))]
        self._count, self._n, self._tensors = len(rows), memories[0].n, memories[0].tensors
        self._fingerprints = batch.fingerprints
        self._columns = self._columns_of([batch.memories[number].addresses for number in self._rows])
        self._compiling = self._columns_of([batch.memories[number].tensors for number in self._rows])
        device = memories[0].written.device
        self._places = places_of(tuple((one.n, one.number, one.first) for one in memories), device)
        self._keys: dict[Any, Any] = {}

    def _columns_of(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        columns = zip(self._tensors, zip(*rows, strict=True), strict=True)
        return [None if tensor is None else column for tensor, column in columns]

    def __call__(
        self,
        gradients: Sequence[Tensor],
        addresses: Sequence[int],
        steps: Sequence[Tensor],
        form: Any,
        shared: tuple[Tensor | None, ...],
        numbers: Any,
        constants: Any,
    ) -> None:
        first = self._rows[0]
        key = self._keys.get(form)
        if key is None:
            tensors = (gradients[first], *self._tensors, steps[first], self._fingerprints, *shared)
            key = self._keys[form] = _launcher.key(tensors, (*constants, TOGETHER))
        if _launcher.is_compiled(key):
            columns = self._columns
            own: tuple[Any, ...] = tuple([addresses[i] for i in self._rows])
            counts: tuple[Any, ...] = tuple([steps[i].data_ptr() for i in self._rows])
        else:  # the dtypes are needed
            columns = self._compiling
            own, counts = tuple(gradients[i] for i in self._rows), tuple(steps[i] for i in self._rows)
        arguments = (own, *columns, counts, self._fingerprints, self._places, *shared, *numbers)
        _launcher.launch(key, self._n, self._count, arguments)

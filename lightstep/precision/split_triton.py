"""Fused kernels for :class:`~lightstep.precision.split.Splitter`: one for each direction.

They are used only if they give the bits of the torch version on the device. ``available`` is False without Triton.

Each kernel runs one version of its body for whole blocks and another for the last one, because accesses under a mask
are not vectorised.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.precision.shared_tables import SharedTable
from lightstep.precision.triton_launch import Launcher, is_aligned

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

WeightRow = tuple[Tensor, int, Sequence[tuple[int, int]], int]
"""``weight``, ``first`` and ``ranges`` of :meth:`Splitter.fingerprints`, and the index of the first fingerprint."""

available = triton is not None
_BLOCK, _WARPS = 1024, 4
_SUMMED, _SUMMING = 4096, 8  # larger blocks: each ends with atomic additions to the same few numbers
TOGETHER = 8
"""Runs that share a launch."""


def split(master: Tensor, weight: Tensor, low: Tensor, extra: Tensor) -> None:
    """See :meth:`Splitter.split`."""
    arguments = (master.view(torch.int32), weight.view(torch.int16), low, _bits_of(extra))
    _split(master.numel(), arguments, (), extra.dtype == torch.uint8)


def join(weight: Tensor, low: Tensor, extra: Tensor, master: Tensor) -> None:
    """See :meth:`Splitter.join`."""
    arguments = (weight.view(torch.int16), low, _bits_of(extra), master.view(torch.int32))
    _join(master.numel(), arguments, (), extra.dtype == torch.uint8)


def fingerprints(weight: Tensor, first: int, ranges: Sequence[tuple[int, int]], out: Tensor) -> None:
    """Add the sums of :meth:`Splitter.fingerprints` to ``out``."""
    edges, heads = _tables(tuple(ranges), weight.numel(), weight.device)
    _fingerprint(weight.numel(), (weight.view(torch.int16), out, edges.read(), heads.read()), (len(ranges), first))


def fingerprint_rows(rows: Sequence[WeightRow], out: Tensor) -> None:
    """Add the sums of :meth:`Splitter.fingerprint_rows` to ``out``."""
    whole = []
    for weight, first, ranges, index in rows:
        if len(ranges) == 1 and ranges[0][1] == weight.numel() and is_aligned(weight.data_ptr()):
            whole.append((weight, first, index))
        else:
            fingerprints(weight, first, ranges, out[index : index + len(ranges)])
    for start in range(0, len(whole), TOGETHER):
        _sum_rows(whole[start : start + TOGETHER], out)


def _sum_rows(rows: Sequence[tuple[Tensor, int, int]], out: Tensor) -> None:
    """Add the sums of up to ``TOGETHER`` rows of one range.

    Args:
        rows: weight, position of its first element, and index of its fingerprint.
    """
    numbers = tuple((weight.numel(), index, first) for weight, first, index in rows)
    table, programs = places_of(numbers, _row_sums.block, out.device)
    if not programs:
        return
    places = table.read()
    key = _row_sums.key((rows[0][0], places, out), (TOGETHER,))
    padded = [weight for weight, _, _ in rows] + [rows[-1][0]] * (TOGETHER - len(rows))
    compiled = _row_sums.compiled(key)
    if compiled is not None:
        weights: tuple[Any, ...] = tuple([weight.data_ptr() for weight in padded])
    else:  # the dtype is needed
        weights = tuple(weight.view(torch.int16) for weight in padded)
    _row_sums.launch(key, compiled, programs, (weights, places, out))


@functools.lru_cache(maxsize=4096)
def places_of(runs: tuple[tuple[int, ...], ...], block: int, device: torch.device) -> tuple[SharedTable, int]:
    """``[TOGETHER * (1 + k)]``: of each run the first of its programs, and its k numbers; and the number of programs.

    Each program processes ``block`` elements of one run. A run that is missing begins after the last program.

    Args:
        runs: number of elements, index of the fingerprint, position of the first element, and what a kernel needs
            beside these.
    """
    programs = [-(-elements // block) for elements, *_ in runs]
    first = itertools.accumulate(programs[:-1], initial=0)
    rows = [(begin, *numbers) for begin, numbers in zip(first, runs, strict=True)]
    rows += [(sum(programs), *[0] * len(runs[0]))] * (TOGETHER - len(runs))
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1)
    return SharedTable(table.to(device, non_blocking=True)), sum(programs)


@functools.lru_cache(maxsize=4096)
def _tables(ranges: tuple[tuple[int, int], ...], n: int, device: torch.device) -> tuple[SharedTable, SharedTable]:
    """Begin and end of each range (``[2k]``), and for each block the first range that ends after its start."""
    heads = [bisect.bisect_right(ranges, block, key=lambda one: one[1]) for block in range(0, n, _SUMMED)]
    edges = [edge for one in ranges for edge in one]
    tables = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (edges, heads))
    return tuple(SharedTable(table.to(device, non_blocking=True)) for table in tables)  # type: ignore[return-value]


def _bits_of(extra: Tensor) -> Tensor:
    return extra if extra.dtype == torch.uint8 else extra.view(torch.int32)


if available:

    @triton.jit
    def _inside(place, n, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
        return place < n if not WHOLE else tl.full(place.shape, True, tl.int1)

    @triton.jit
    def _split_block(  # type: ignore[no-untyped-def]
        master,
        weight,
        low,
        extra,
        first,
        n,
        BITMAP: tl.constexpr,
        BLOCK: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        place = first + tl.arange(0, BLOCK)
        inside = _inside(place, n, WHOLE)
        bits = tl.load(master + place, mask=inside, other=0)
        upper = bits >> 16
        rounded = (bits + 0x7FFF + (upper & 1)) >> 16
        truncated = upper + ((upper & 0x7F) == 0).to(tl.int32)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        code = tl.where(is_nan, truncated, rounded)
        tl.store(weight + place, code.to(tl.int16), mask=inside)
        tl.store(low + place, bits.to(tl.int16), mask=inside)
        went_up = (code - upper) & 1
        if BITMAP:
            columns = tl.reshape(went_up, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
            byte_place = first // 8 + tl.arange(0, BLOCK // 8)
            tl.store(extra + byte_place, tl.sum(columns, axis=1).to(tl.uint8), mask=byte_place < (n + 7) // 8)
        else:
            moment = tl.load(extra + place, mask=inside, other=0)
            tl.store(extra + place, (moment & 0x7FFFFFFF) | (went_up << 31), mask=inside)

    @triton.jit(do_not_specialize=["n"])
    def _split_kernel(  # type: ignore[no-untyped-def]
        master, weight, low, extra, n, BITMAP: tl.constexpr, BLOCK: tl.constexpr
    ):
        first = tl.program_id(0).to(tl.int64) * BLOCK
        if first + BLOCK <= n:
            _split_block(master, weight, low, extra, first, n, BITMAP, BLOCK, True)
        else:
            _split_block(master, weight, low, extra, first, n, BITMAP, BLOCK, False)

    @triton.jit
    def _join_block(  # type: ignore[no-untyped-def]
        weight, low, extra, master, first, n, BITMAP: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
    ):
        place = first + tl.arange(0, BLOCK)
        inside = _inside(place, n, WHOLE)
        code = tl.load(weight + place, mask=inside, other=0).to(tl.int32)
        lower = tl.load(low + place, mask=inside, other=0).to(tl.int32) & 0xFFFF
        if BITMAP:
            byte = tl.load(extra + place // 8, mask=inside, other=0).to(tl.int32)
            went_up = (byte >> (place % 8).to(tl.int32)) & 1
        else:
            moment = tl.load(extra + place, mask=inside, other=0)
            went_up = (moment >> 31) & 1
            tl.store(extra + place, moment & 0x7FFFFFFF, mask=inside)
        tl.store(master + place, ((code - went_up) << 16) | lower, mask=inside)

    @triton.jit(do_not_specialize=["n"])
    def _join_kernel(weight, low, extra, master, n, BITMAP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        first = tl.program_id(0).to(tl.int64) * BLOCK
        if first + BLOCK <= n:
            _join_block(weight, low, extra, master, first, n, BITMAP, BLOCK, True)
        else:
            _join_block(weight, low, extra, master, first, n, BITMAP, BLOCK, False)

    @triton.jit
    def mixed(code, place):  # type: ignore[no-untyped-def]
        """``_mixed`` of split.py, with its constants written out: a kernel cannot read globals."""
        bits = place.to(tl.int32) * 506952113 + code * 99338871
        bits = (bits ^ (bits >> 15)) * 2146121005
        bits = (bits ^ (bits >> 13)) * 74229387
        return bits ^ (bits >> 16)

    @triton.jit
    def _fingerprint_block(weight, out, edges, head, first, n, ranges, start, BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
        place = first + tl.arange(0, BLOCK)
        code = tl.load(weight + place, mask=_inside(place, n, WHOLE), other=0).to(tl.int32)
        numbers = mixed(code, place + start)
        begin = tl.load(edges + 2 * head, mask=head < ranges, other=first + BLOCK)
        while begin < first + BLOCK:
            end = tl.load(edges + 2 * head + 1)
            if begin <= first and end >= first + BLOCK:
                total = tl.sum(numbers, axis=0)
            else:
                total = tl.sum(tl.where((place >= begin) & (place < end), numbers, 0), axis=0)
            tl.atomic_add(out + head, total)
            head += 1
            begin = tl.load(edges + 2 * head, mask=head < ranges, other=first + BLOCK)

    @triton.jit(do_not_specialize=["n", "ranges", "start"])
    def _fingerprint_kernel(weight, out, edges, heads, ranges, start, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        first = tl.program_id(0).to(tl.int64) * BLOCK
        head = tl.load(heads + tl.program_id(0))
        if first + BLOCK <= n:
            _fingerprint_block(weight, out, edges, head, first, n, ranges, start, BLOCK, True)
        else:
            _fingerprint_block(weight, out, edges, head, first, n, ranges, start, BLOCK, False)

    @triton.jit
    def add_to_mark(mark, codes, place, inside):  # type: ignore[no-untyped-def]
        """Add the fingerprint of these weights (int32 from their 16 bits) to the run's, if fingerprints are kept."""
        if mark is not None:
            tl.atomic_add(mark, tl.sum(tl.where(inside, mixed(codes, place), 0)), sem="relaxed")

    @triton.jit
    def pick(pointers, number, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Element ``number`` of ``COUNT`` pointers."""
        found = pointers[0]
        for i in tl.static_range(1, COUNT):
            found = tl.where(number >= i, pointers[i], found)
        return found

    @triton.jit
    def run_of(places, COLUMNS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """The program's run, its numbers in the table of :func:`places_of`, and its first element in that run."""
        program = tl.program_id(0)
        number = 0
        for i in tl.static_range(1, COUNT):
            number += (program >= tl.load(places + COLUMNS * i)).to(tl.int32)
        own = places + COLUMNS * number
        return number, own + 1, (program - tl.load(own)) * BLOCK

    @triton.jit
    def _row_sums_kernel(weights, places, out, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        number, own, first = run_of(places, 4, COUNT, BLOCK)
        weight = pick(weights, number, COUNT) + first
        left = tl.load(own) - first
        mark = out + tl.load(own + 1)
        start = (tl.load(own + 2) + first).to(tl.int32)
        place = tl.arange(0, BLOCK)
        if left >= BLOCK:
            add_to_mark(mark, tl.load(weight + place).to(tl.int32), start + place, place < BLOCK)
        else:
            inside = place < left
            add_to_mark(mark, tl.load(weight + place, mask=inside, other=0).to(tl.int32), start + place, inside)

    _split, _join = (Launcher(kernel, _BLOCK, _WARPS) for kernel in (_split_kernel, _join_kernel))
    _fingerprint = Launcher(_fingerprint_kernel, _SUMMED, _SUMMING)
    _row_sums = Launcher(_row_sums_kernel, _SUMMED, _SUMMING)

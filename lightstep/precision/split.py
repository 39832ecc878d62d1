"""Splits an fp32 master into the bf16 weight, its 16 low bits, and one extra bit.

The bf16 weight is the master rounded to nearest even. If it was rounded down, the weight is the master's upper half; if
up, the upper half plus one. So ``(weight, low half, rounded up)`` gives the master exactly. The third is needed: low
bits ``0x8000`` with an even weight belong to two masters. This extra bit is kept in the sign of a second moment that is
never negative (Adam's ``exp_avg_sq``), or else in a bitmap.

The rule covers all 2^32 bit patterns: ±0, denormals, and finite masters that round to infinity are no special cases. A
NaN is truncated instead. If its upper half alone would be infinity, it counts as rounded up, by one, which is a NaN.
Only the payload of such NaNs in the bf16 weight differs from what ``param.copy_(master)`` writes.

fp16 parameters cannot be split this way, because their exponent is shorter.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from lightstep.crc32 import crc32
from lightstep.precision.triton_launch import checked_kernels

if TYPE_CHECKING:
    from lightstep.precision.split_triton import WeightRow

__all__ = ["Splitter"]

_CHUNK = 1 << 18  # elements per pass: the scratch memory stays small; a multiple of 8 for the bitmap
_CHUNK_ON_CPU = 1 << 15  # elements per thread and pass: they stay in the cache of its core
_SIGN = 1 << 31
# Constants of the fingerprint: odd 31-bit numbers without structure.
_PLACE, _CODE, _FIRST_MIX, _SECOND_MIX = 0x1E3779B1, 0x05EBCA77, 0x7FEB352D, 0x046CA68B


class Splitter:
    """Splits and joins masters on one device. Tensors are flat and contiguous, and results are written in place.

    Shapes are ``[n]``, except ``extra``: it is the fp32 second moment (``[n]``, its signs carry the bits) or a uint8
    bitmap (``[ceil(n / 8)]``). On CUDA each direction is one fused Triton kernel, if a check on this device finds the
    bits of the torch version; otherwise the torch version is used.

    Nothing is allocated after the first call.

    Args:
        checksums: fingerprints are CRC-32, for weights on the CPU that are never compared with those of a device. The
            sums that are equal on all devices take longer there than all other work of a step or a save on the weight.
    """

    def __init__(self, device: torch.device, checksums: bool = False) -> None:
        self.device, self._checksums = device, checksums
        self._chunk = _CHUNK_ON_CPU * torch.get_num_threads() if device.type == "cpu" else _CHUNK
        self._scratch: _Scratch | None = None
        self._fused = _checked_kernels(device) if device.type == "cuda" else None

    def nbytes(self) -> int:
        """Bytes of scratch memory on the device."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def free(self) -> None:
        """Free the scratch memory; the next use allocates it again."""
        self._scratch = None

    def split(self, master: Tensor, weight: Tensor, low: Tensor, extra: Tensor) -> None:
        """Write ``master`` (fp32) to ``weight`` (bf16), ``low`` (int16) and the bits of ``extra``.

        If the signs of ``extra`` carry the bits, its magnitudes do not change and its previous signs are ignored.
        """
        assert weight.is_contiguous()  # the fused kernels ignore strides
        if self._fused is not None:
            self._fused.split(master, weight, low, extra)
            torch.autograd.graph.increment_version(weight)  # autograd then refuses graphs that need the old weight
            return
        for a, b in self._chunks(master.numel()):
            _split(master[a:b], weight[a:b], low[a:b], _part_of(extra, a, b), self._scratch_for(b - a))

    def join(
        self, weight: Tensor, low: Tensor, extra: Tensor, master: Tensor, magnitudes: Tensor | None = None
    ) -> None:
        """Write the fp32 ``master`` that :meth:`split` was given. Signs of ``extra`` that carry bits are cleared.

        Args:
            magnitudes: if given, ``extra`` does not change, and its magnitudes are written here.
        """
        assert weight.is_contiguous()
        if self._fused is not None:
            extra = extra if magnitudes is None else magnitudes.copy_(extra)
            self._fused.join(weight, low, extra, master)
            return
        for a, b in self._chunks(master.numel()):
            cleared = None if magnitudes is None else magnitudes[a:b]
            _join(weight[a:b], low[a:b], _part_of(extra, a, b), master[a:b], cleared, self._scratch_for(b - a))

    def fingerprints(self, weight: Tensor, first: int, ranges: Sequence[tuple[int, int]], out: Tensor) -> None:
        """Write a checksum of each range of ``weight`` (16-bit, ``[n]``) to ``out`` (int32, one element per range).

        It depends on values and positions, and shows that somebody else wrote to a weight. A split master cannot show
        that, because the weight is its upper half.

        Args:
            first: position of the first element. Compare weights at equal positions only.
            ranges: in order, not overlapping.
        """
        if self._checksums:
            _write_checksums([(weight, first, ranges, 0)], out)
        else:
            self._add_fingerprints(weight, first, ranges, out.zero_())

    def fingerprint_rows(self, rows: Sequence[WeightRow], out: Tensor) -> None:
        """:meth:`fingerprints` of several rows to their places in ``out``; the others in ``out`` do not change."""
        if self._checksums:
            _write_checksums(rows, out)
            return
        if sum(len(ranges) for _, _, ranges, _ in rows) == out.numel():
            out.zero_()
        else:
            for _, _, ranges, index in rows:
                out[index : index + len(ranges)].zero_()
        if self._fused is not None:
            self._fused.fingerprint_rows(rows, out)
            return
        for weight, first, ranges, index in rows:
            self._add_fingerprints(weight, first, ranges, out[index : index + len(ranges)])

    def _add_fingerprints(self, weight: Tensor, first: int, ranges: Sequence[tuple[int, int]], out: Tensor) -> None:
        """Add the checksums of :meth:`fingerprints` to ``out``."""
        assert weight.is_contiguous()
        if self._fused is not None:
            self._fused.fingerprints(weight, first, ranges, out)
            return
        for a, b in self._chunks(weight.numel()):
            mixed, scratch = _mixed(weight[a:b], first + a, self._scratch_for(b - a)), self._scratch_for(b - a)
            begin = bisect.bisect_right(ranges, a, key=lambda one: one[1])
            end = bisect.bisect_left(ranges, b, key=lambda one: one[0])
            _add_sums(mixed, [(max(x - a, 0), min(y, b) - a) for x, y in ranges[begin:end]], out[begin:end], scratch)

    def _scratch_for(self, n: int) -> _Scratch:
        if self._scratch is None or self._scratch.a.numel() < n:
            self._scratch = _Scratch(min(self._chunk, -(-n // 8) * 8), self.device)
        return self._scratch

    def _chunks(self, n: int) -> list[tuple[int, int]]:
        return [(start, min(start + self._chunk, n)) for start in range(0, n, self._chunk)]


def _write_checksums(rows: Sequence[WeightRow], out: Tensor) -> None:
    pieces: list[Any] = []
    for weight, _, ranges, index in rows:
        # `Tensor.numpy()` would pin the storage at its size, and weights that rest on the host leave theirs.
        codes = numpy.from_dlpack(weight.detach().view(torch.int16))
        pieces += [(index + i, codes[start:stop]) for i, (start, stop) in enumerate(ranges)]
    sums = [(crc32(codes) ^ _SIGN) - _SIGN for _, codes in pieces]  # as signed numbers
    out[[place for place, _ in pieces]] = torch.tensor(sums, dtype=torch.int32, device="cpu")


class _Scratch:
    """Scratch memory of the torch version. Operands are converted to one dtype here: mixed ones would allocate."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.a, self.b, self.c = (torch.empty(n, dtype=torch.int32, device=device) for _ in range(3))
        self.flag = torch.empty(n, dtype=torch.bool, device=device)
        self.wide, self.sums = (torch.empty(n + extra, dtype=torch.int64, device=device) for extra in (0, 1))
        self.places = torch.arange(n, dtype=torch.int32, device=device).mul_(_PLACE)
        self.total = torch.empty((), dtype=torch.int64, device=device)
        self.nbytes = n * (4 * 4 + 1 + 2 * 8) + 16


def _part_of(extra: Tensor, a: int, b: int) -> Tensor:
    return extra[a // 8 : -(-b // 8)] if extra.dtype == torch.uint8 else extra[a:b]


def _split(master: Tensor, weight: Tensor, low: Tensor, extra: Tensor, scratch: _Scratch) -> None:
    n = master.numel()
    bits, upper, code = master.view(torch.int32), scratch.a[:n], scratch.b[:n]
    low.copy_(bits)  # int32 → int16 keeps the low half
    torch.bitwise_right_shift(bits, 16, out=upper)
    # Round to nearest even: add half a unit, or a hair less when the upper half is even.
    torch.bitwise_and(upper, 1, out=code)
    code.add_(bits).add_(0x7FFF).bitwise_right_shift_(16)
    _truncate_nan(master, upper, code, scratch)
    weight.view(torch.int16).copy_(code)
    _store_bits(code.sub_(upper), extra, scratch)


def _truncate_nan(master: Tensor, upper: Tensor, code: Tensor, scratch: _Scratch) -> None:
    n = master.numel()
    kept, flag = scratch.c[:n], scratch.flag[:n]
    torch.bitwise_and(upper, 0x7F, out=kept)
    torch.eq(kept, 0, out=flag)  # the payload is in the low half only
    kept.copy_(flag)
    kept.add_(upper)
    torch.ne(master, master, out=flag)
    torch.where(flag, kept, code, out=code)


def _join(
    weight: Tensor, low: Tensor, extra: Tensor, master: Tensor, magnitudes: Tensor | None, scratch: _Scratch
) -> None:
    n = master.numel()
    bits, upper = master.view(torch.int32), scratch.a[:n]
    upper.copy_(weight.view(torch.int16))
    upper.add_(_take_bits(extra, magnitudes, n, scratch)).bitwise_left_shift_(16)
    bits.copy_(low)
    bits.bitwise_and_(0xFFFF).bitwise_or_(upper)


def _store_bits(ones: Tensor, extra: Tensor, scratch: _Scratch) -> None:
    """Write ``ones`` (int32 0/1, the start of ``scratch.b``) to the signs or the bitmap of ``extra``."""
    n = ones.numel()
    if extra.dtype != torch.uint8:
        extra.view(torch.int32).bitwise_and_(0x7FFFFFFF).bitwise_or_(ones.bitwise_left_shift_(31))
        return
    columns, byte = scratch.b[: extra.numel() * 8].view(-1, 8), scratch.a[: extra.numel()]
    scratch.b[n : extra.numel() * 8].zero_()
    byte.copy_(columns[:, 0])
    for bit in range(1, 8):
        byte.add_(columns[:, bit], alpha=1 << bit)
    extra.copy_(byte)


def _take_bits(extra: Tensor, magnitudes: Tensor | None, n: int, scratch: _Scratch) -> Tensor:
    """The bits of ``extra`` as int32 0/-1 in ``scratch.b``; clears the signs in ``extra``, or in ``magnitudes``."""
    ones = scratch.b[:n]
    if extra.dtype != torch.uint8:
        signed = extra.view(torch.int32)
        torch.bitwise_right_shift(signed, 31, out=ones)
        torch.bitwise_and(signed, 0x7FFFFFFF, out=signed if magnitudes is None else magnitudes.view(torch.int32))
        return ones
    columns, byte = scratch.b[: extra.numel() * 8].view(-1, 8), scratch.c[: extra.numel()]
    byte.copy_(extra)
    for bit in range(8):
        torch.bitwise_right_shift(byte, bit, out=columns[:, bit])
    return ones.bitwise_and_(1).neg_()


def _mixed(weight: Tensor, start: int, scratch: _Scratch) -> Tensor:
    """mix(position · _PLACE + code · _CODE) mod 2^32 of each element, as signed numbers.

    ``mix`` is one-to-one, so two codes at the same position never give the same number. It is not linear in position
    or code, so edits that cancel out in a linear hash (two swapped rows) do not cancel out here.
    """
    n = weight.numel()
    mixed, shifted = scratch.a[:n], scratch.b[:n]
    mixed.copy_(weight.view(torch.int16)).mul_(_CODE)
    mixed.add_(scratch.places[:n]).add_(_wrap(start * _PLACE))
    for shift, factor in ((15, _FIRST_MIX), (13, _SECOND_MIX)):  # arithmetic shifts: torch has no others
        torch.bitwise_right_shift(mixed, shift, out=shifted)
        mixed.bitwise_xor_(shifted).mul_(factor)
    torch.bitwise_right_shift(mixed, 16, out=shifted)
    return mixed.bitwise_xor_(shifted)


def _add_sums(numbers: Tensor, ranges: Sequence[tuple[int, int]], out: Tensor, scratch: _Scratch) -> None:
    """Add the sum over each range to its element of ``out``, mod 2^32: differences of running sums."""
    wide = scratch.wide[: numbers.numel()].copy_(numbers)  # `sum` and `cumsum` of other dtypes would allocate
    if len(ranges) == 1:
        ((a, b),) = ranges
        out.add_(torch.sum(wide[a:b], dim=0, out=scratch.total))
    elif ranges:
        running = scratch.sums[: numbers.numel() + 1]
        running[0] = 0
        torch.cumsum(wide, 0, out=running[1:])
        edges = torch.tensor(ranges, dtype=torch.int64, device="cpu").to(running.device)
        sums = running[edges.view(-1)].view(-1, 2)
        out.add_(sums[:, 1]).sub_(sums[:, 0])


def _wrap(value: int) -> int:
    """``value`` modulo 2^32, as a signed 32-bit number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


@functools.cache
def _checked_kernels(device: torch.device) -> Any:
    """The fused kernels, if they give the torch version's bits on this device."""

    def load() -> ModuleType:
        from lightstep.precision import split_triton

        return split_triton

    return checked_kernels(load, _matches_torch, device, "masters are split")


def _matches_torch(kernels: ModuleType, device: torch.device) -> bool:
    """Whether ``kernels`` give the torch version's bits in split, join and fingerprints, for all kinds of numbers."""
    master = probe_masters(device)
    n = master.numel()
    generator = torch.Generator().manual_seed(1)  # its own: the user's random state does not change
    moments = torch.rand(n, generator=generator, dtype=torch.float32, device="cpu").to(device)
    for extra in (moments, torch.zeros(-(-n // 8), dtype=torch.uint8, device=device)):
        expected, found = (_round_trip(one, master, extra.clone()) for one in (_plain(device), kernels))
        if not all(torch.equal(x, y) for x, y in zip(expected, found, strict=True)):
            return False
    return True


def _plain(device: torch.device) -> Splitter:
    splitter = Splitter.__new__(Splitter)
    splitter.device, splitter._chunk, splitter._scratch, splitter._fused = device, _CHUNK, None, None
    splitter._checksums = False
    return splitter


def _round_trip(splitter: Splitter | ModuleType, master: Tensor, extra: Tensor) -> list[Tensor]:
    n, device = master.numel(), master.device
    weight, low = torch.empty(n, dtype=torch.bfloat16, device=device), torch.empty(n, dtype=torch.int16, device=device)
    ranges = [(0, n // 9), (n // 8, n // 7), (n // 7, n // 2), (n // 2, n)]
    back, marks = torch.empty_like(master), torch.zeros(5 + 14, dtype=torch.int32, device=device)
    splitter.split(master, weight, low, extra)
    stored = extra.clone()
    splitter.fingerprints(weight, 0, [(0, n)], marks[:1])
    splitter.fingerprints(weight, 1 << 40, ranges, marks[1:5])
    rows = [(weight[8 * i : n - i], (1 << 31) * i, [(0, n - 9 * i)], 13 - i) for i in range(10)]
    splitter.fingerprint_rows([*rows, (weight[3:], 5, [(0, n - 3)], 3)], marks[5:])
    splitter.join(weight, low, extra, back)
    return [
        weight.view(torch.int16),
        low,
        stored.view(torch.uint8),
        extra.view(torch.uint8),
        back.view(torch.int32),
        marks,
    ]


def probe_masters(device: torch.device) -> Tensor:
    """fp32 numbers of all kinds (``[n]``, n odd): ties, zeros, denormals, infinities, NaN, and random bits."""
    exponents = [0, 1, 2, 126, 127, 253, 254, 255]
    uppers = {(e << 7) | m for e in exponents for m in (0, 1, 2, 0x3F, 0x40, 0x7E, 0x7F)}
    uppers |= {upper | 0x8000 for upper in uppers}
    lows = [0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF]
    edges = torch.tensor(
        [_as_int32((upper << 16) | low) for upper in sorted(uppers) for low in lows], dtype=torch.int32, device="cpu"
    )
    generator = torch.Generator().manual_seed(0)
    size = (_CHUNK + 4099 - edges.numel() % 2,)
    noise = torch.randint(-(2**31), 2**31, size, generator=generator, dtype=torch.int64, device="cpu")
    return torch.cat([edges, noise.to(torch.int32)]).to(device).view(torch.float32)


def _as_int32(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits

"""Faster fingerprints for weights on the CPU, which are never compared with those of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from lightstep.crc32 import crc32
from lightstep.state.segment import MasterSplitter, WeightRow

__all__ = ["ChecksummedWeights"]

_SIGN = 1 << 31


class ChecksummedWeights:
    """A splitter with CRC-32 as fingerprints.

    A splitter's own sums are equal on all devices. On a CPU they take longer than all other work of a step or a save on
    the weight.
    """

    def __init__(self, splitter: MasterSplitter) -> None:
        self.split, self.join, self.nbytes, self.free = splitter.split, splitter.join, splitter.nbytes, splitter.free

    def fingerprints(self, weight: Tensor, first: int, ranges: Any, out: Tensor) -> None:
        self.fingerprint_rows([(weight, first, ranges, 0)], out)

    def fingerprint_rows(self, rows: Sequence[WeightRow], out: Tensor) -> None:
        pieces: list[Any] = []
        for weight, _, ranges, index in rows:
            # `Tensor.numpy()` would pin the storage at its size, and weights that rest on the host leave theirs.
            codes = numpy.from_dlpack(weight.detach().view(torch.int16))
            pieces += [(index + i, codes[start:stop]) for i, (start, stop) in enumerate(ranges)]
        sums = [(crc32(codes) ^ _SIGN) - _SIGN for _, codes in pieces]  # as signed numbers
        out[[place for place, _ in pieces]] = torch.tensor(sums, dtype=torch.int32, device="cpu")

"""Faster fingerprints for weights on the CPU, which are never compared with those of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.crc32 import crc32
from lightstep.state.staging import MasterSplitter, WeightRow

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
        places: list[int] = []
        sums: list[int] = []
        for weight, _, ranges, index in rows:
            codes: Any = weight.view(torch.int16).numpy()
            places += range(index, index + len(ranges))
            sums += [(crc32(codes[start:stop]) ^ _SIGN) - _SIGN for start, stop in ranges]  # as signed numbers
        out[places] = torch.tensor(sums, dtype=torch.int32, device="cpu")

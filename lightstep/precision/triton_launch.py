"""Launches of Triton kernels whose compiled form is known, without the search for it: 10 microseconds, not 40."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_INT32 = 1 << 31


class Launcher:
    """One kernel over flat tensors, ``block`` elements by each program.

    Its parameters are tensors (or ``None``), then numbers, then the number of elements, then constants, of which the
    last is ``BLOCK``. Numbers must not be specialised.
    """

    def __init__(self, kernel: Any, block: int, warps: int, **options: Any) -> None:
        self._kernel, self._block = kernel, block
        self._options = {"num_warps": warps, **options}
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, n: int, tensors: tuple[Tensor | None, ...], numbers: tuple[int | float, ...] = (), *constants: Any
    ) -> None:
        if not n:
            return
        dtypes, aligned = [], 0  # kernels are specialised for addresses that are multiples of 16
        for one in tensors:
            dtypes.append(None if one is None else one.dtype)
            aligned += aligned + (one is None or one.data_ptr() % 16 == 0)
        wide = n >= _INT32 or any(isinstance(one, int) and abs(one) >= _INT32 for one in numbers)
        device = tensors[0].device  # type: ignore[union-attr]
        key = (device, aligned, wide, *dtypes, *constants)
        arguments = (*tensors, *numbers, n, *constants, self._block)
        grid = (-(-n // self._block), 1, 1)
        compiled = self._compiled.get(key)
        if compiled is not None and not wide and torch.cuda.current_device() == device.index:
            compiled[grid](*arguments)
            return
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device; nothing to do on the CPU
            self._compiled[key] = self._kernel[grid](*arguments, **self._options)

"""Launches compiled Triton kernels directly, without Triton's lookup: in 10 microseconds instead of 40."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_INT32 = 1 << 31
_ALIGNMENT = 16  # kernels are specialised for addresses that are multiples of it


def is_aligned(tensor: Tensor | None) -> bool:
    """Whether a kernel compiled for aligned addresses may use the tensor."""
    return tensor is None or tensor.data_ptr() % _ALIGNMENT == 0


class Launcher:
    """Launches one kernel on flat tensors; each program processes ``block`` elements.

    The kernel's parameters are tensors (or ``None``), numbers, the number of elements, and constants, of which the last
    is ``BLOCK``. Numbers must not be specialised.
    """

    def __init__(self, kernel: Any, block: int, warps: int, **options: Any) -> None:
        self._kernel, self._block = kernel, block
        self._options = {"num_warps": warps, **options}
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, n: int, tensors: tuple[Tensor | None, ...], numbers: tuple[int | float, ...] = (), *constants: Any
    ) -> None:
        if n:
            wide = n >= _INT32 or any(isinstance(one, int) and abs(one) >= _INT32 for one in numbers)
            self.launch(n, 1, tensors, (*tensors, *numbers, n), *constants, wide=wide)

    def launch(
        self,
        n: int,
        rows: int,
        tensors: Iterable[Tensor | None],
        arguments: tuple[Any, ...],
        *constants: Any,
        wide: bool = False,
    ) -> None:
        """Launch programs for ``n`` elements in each of ``rows`` rows.

        Args:
            tensors: all tensors among the arguments, including those in tuples; at least one is not ``None``.
            wide: a number among the arguments needs 64 bits.
        """
        dtypes, aligned, first = [], 0, None
        for one in tensors:
            first = one if first is None else first
            dtypes.append(None if one is None else one.dtype)
            aligned += aligned + is_aligned(one)
        assert first is not None
        device = first.device
        key = (device, aligned, wide, *dtypes, *constants)
        grid, given = (-(-n // self._block), rows, 1), (*arguments, *constants, self._block)
        compiled = self._compiled.get(key)
        if compiled is not None and not wide and torch.cuda.current_device() == device.index:
            compiled[grid](*given)
            return
        with torch.cuda.device_of(first):  # Triton launches on the current device
            self._compiled[key] = self._kernel[grid](*given, **self._options)

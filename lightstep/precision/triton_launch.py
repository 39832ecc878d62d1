"""Launches compiled Triton kernels directly, without Triton's lookup: in 10 microseconds instead of 40."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_INT32 = 1 << 31
ALIGNMENT = 16  # kernels are specialised for addresses that are multiples of it

Key = tuple[Any, ...]


def checked_kernels(
    load: Callable[[], ModuleType], matches: Callable[[Any, torch.device], bool], device: torch.device, what: str
) -> Any:
    """The module with fused kernels if they give the torch version's bits on this device, else ``None``.

    Args:
        load: imports the module, whose ``available`` says whether there is Triton.
        matches: compares its kernels with the torch version.
        what: is done by plain torch operations otherwise, for the log.
    """
    try:
        kernels: Any = load()
        if kernels.available and matches(kernels, device):
            return kernels
        reason = "they differ from the torch version" if kernels.available else "Triton is not installed"
    except Exception as error:  # compilers and drivers fail in many ways; the torch version works
        reason = f"{type(error).__name__}: {error}"
    logger.warning("%s by plain torch operations on %s, not by fused kernels (%s)", what, device, reason)
    return None


def is_aligned(address: int) -> bool:
    """Whether a kernel compiled for aligned addresses may use this one."""
    return address % ALIGNMENT == 0


class Launcher:
    """Launches one kernel on flat tensors; each program processes ``block`` elements.

    The kernel's parameters are tensors (or ``None``), numbers, the number of elements, and constants, of which the last
    is ``BLOCK``. Numbers must not be specialised.
    """

    def __init__(self, kernel: Any, block: int, warps: int, **options: Any) -> None:
        self._kernel, self.block = kernel, block
        self._options = {"num_warps": warps, **options}
        self._compiled: dict[Key, Any] = {}

    def __call__(
        self, n: int, tensors: tuple[Tensor | None, ...], numbers: tuple[int | float, ...] = (), *constants: Any
    ) -> None:
        if n:
            wide = n >= _INT32 or any(isinstance(one, int) and abs(one) >= _INT32 for one in numbers)
            key = self.key(tensors, constants, wide)
            self.launch(key, self.compiled(key), self._programs(n), (*tensors, *numbers, n))

    def again(self, n: int, tensors: tuple[Tensor | None, ...], *constants: Any) -> Callable[..., bool]:
        """A function that repeats a launch on the memory of these tensors, with other numbers. It keeps no tensor.

        It returns ``False``, and has done nothing, if a launch by tensors is needed.
        """
        key = self.key(tensors, constants)
        addresses = tuple(None if one is None else one.data_ptr() for one in tensors)

        def launch(*numbers: int | float) -> bool:
            wide = n >= _INT32 or any(isinstance(one, int) and abs(one) >= _INT32 for one in numbers)
            compiled = None if wide else self.compiled(key)
            if compiled is None:
                return False
            self.launch(key, compiled, self._programs(n), (*addresses, *numbers, n))
            return True

        return launch

    def _programs(self, n: int) -> int:
        return -(-n // self.block)

    def key(self, tensors: Iterable[Tensor | None], constants: tuple[Any, ...], wide: bool = False) -> Key:
        """What the kernel is compiled for: device, dtypes and alignments of these tensors, and constants.

        Args:
            tensors: one for each tensor parameter, or for each tuple of tensors that are alike; not all are ``None``.
            wide: a number among the arguments needs 64 bits.
        """
        dtypes: list[torch.dtype | None] = []
        aligned, device = 0, None
        for one in tensors:
            if one is None:
                dtypes.append(None)
                continue
            device = device or one.device
            dtypes.append(one.dtype)
            aligned += aligned + is_aligned(one.data_ptr())
        return device, wide, constants, aligned, *dtypes

    def compiled(self, key: Key) -> Any:
        """The kernel for this key, which takes addresses in the place of tensors; ``None``: it is not compiled yet, is
        given wide numbers, or another device is the current one, on which Triton would launch it."""
        found = self._compiled.get(key)
        return found if found is not None and not key[1] and torch.cuda.current_device() == key[0].index else None

    def launch(self, key: Key, compiled: Any, programs: int, arguments: tuple[Any, ...]) -> None:
        """Launch so many programs.

        Args:
            key: from :meth:`key`.
            compiled: from :meth:`compiled`; if it is ``None`` the kernel is found by the dtypes of the arguments.
            arguments: all but the constants.
        """
        device, _, constants, *_ = key
        grid, given = (programs, 1, 1), (*arguments, *constants, self.block)
        if compiled is not None:
            compiled[grid](*given)
            return
        with torch.cuda.device(device):
            self._compiled[key] = self._kernel[grid](*given, **self._options)

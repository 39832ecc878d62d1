"""Running a user's optimizer class at set-up without a trace in the process's random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["undisturbed"]


class Generators:
    """The states of Python's, numpy's and torch's generators, on the host and on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._numpy = device, sys.modules.get("numpy")
        self._before = self._read()

    def _read(self) -> list[Any]:
        numpy = None if self._numpy is None else self._numpy.random.get_state()
        return [random.getstate(), torch.get_rng_state(), self._of_device(), numpy]

    def _of_device(self) -> torch.Tensor | None:
        if self._device.type in ("cpu", "meta"):
            return None
        return torch.get_device_module(self._device).get_rng_state(self._device)

    def drawn(self) -> bool:
        """Whether random numbers have been drawn."""
        return repr(self._read()[3]) != repr(self._before[3]) or not all(
            torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
            for now, then in zip(self._read()[:3], self._before[:3], strict=True)
        )

    def restore(self) -> None:
        python, host, device, numpy = self._before
        random.setstate(python)
        torch.set_rng_state(host)
        if device is not None:
            torch.get_device_module(self._device).set_rng_state(device, self._device)
        if self._numpy is not None:
            self._numpy.random.set_state(numpy)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[Generators]:
    """Afterwards all generators are as before. Inside, compiled functions run uncompiled, which saves minutes, and a
    default device of the user's (``meta`` while a model is built) does not count.

    Two bodies that draw in the same order get the same numbers.
    """
    default = torch.get_default_device().type
    before = Generators(device)
    with contextlib.ExitStack() as stack:
        stack.callback(before.restore)
        stack.enter_context(torch.inference_mode(False))
        if default not in ("cpu", device.type):
            stack.enter_context(device)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield before

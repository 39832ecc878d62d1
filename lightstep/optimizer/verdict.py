"""Whether the speculative updates of a step were right: computed on the device, read by the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Verdict"]

_COMMIT, _REDO, _DROP = range(3)
_CHANGED, _OVERRULED = 4, 8  # added to these, for :meth:`Verdict.reason`


class Verdict:
    """``commit`` (factor and gradients are those that were assumed), ``redo`` (they are not) or ``drop`` (overflow)."""

    def __init__(self) -> None:
        self._code: Tensor | None = None  # 0-dim int32 on the host
        self._event: Any = None

    def compute(
        self,
        overflow: Tensor,
        factors: Sequence[tuple[Tensor | None, Tensor | None]],
        checksums: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Queue the comparison on the current stream; nothing waits.

        Args:
            overflow: 0-dim fp32; not 0 if the step is to be dropped.
            factors: pairs of the true and the assumed factor; ``None`` is 1.
            checksums: those of the gradients now, and when they were used; ``None``: none have been used.
        """
        right = overflow == 0
        for true, assumed in factors:
            if true is not None or assumed is not None:
                right = right & ((1.0 if true is None else true) == (1.0 if assumed is None else assumed))
        changed = torch.zeros_like(right)
        if checksums is not None:
            now, then = checksums
            changed = (now != then).any().to(right.device)
        overflowed = (overflow != 0).to(torch.int32)
        code = (~right | changed).to(torch.int32) + overflowed + _CHANGED * changed.to(torch.int32)
        if code.device.type == "cpu":
            self._code, self._event = code, None
            return
        if self._code is None or self._event is None:
            self._code = torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=True)
            self._event = torch.Event(code.device)
        self._code.copy_(code, non_blocking=True)
        self._event.record(torch.accelerator.current_stream(code.device))

    def overrule(self) -> None:
        """Another rank cannot commit: a commit becomes a redo."""
        if self.read() == "commit":
            assert self._code is not None
            self._code.fill_(_REDO + _OVERRULED)

    def read(self) -> str:
        """``commit``, ``redo`` or ``drop``; the host waits for the device."""
        return {_COMMIT: "commit", _REDO: "redo", _DROP: "drop"}[self._read_code() % _CHANGED]

    def reason(self) -> str:
        """Why it is not ``commit``."""
        code = self._read_code()
        if code % _CHANGED == _DROP:
            return "overflow"
        if code & _OVERRULED:
            return "another rank cannot commit"
        return "gradients were changed after their use" if code & _CHANGED else "gradients are clipped"

    def _read_code(self) -> int:
        assert self._code is not None
        if self._event is not None:
            self._event.synchronize()
        return int(self._code)

"""fp32 memory for one unit's scaled gradients, which the base optimizer reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightstep.precision.scale_kernel import scale_into

__all__ = ["GradientStage", "as_row", "scalable_in_place"]


class Run(Protocol):
    """Parameters whose gradients are adjacent in the unit's flat order.

    ``first``, ``stop``: their range of elements; ``ranges``: the range of each, counted from ``first``.
    """

    first: int
    stop: int
    ranges: list[tuple[int, int]]

    def parts_of(self, row: Tensor) -> list[Tensor]:
        """A view of each parameter in a row, in its shape."""


class _Row:
    """Views of a run's range in the stage: all of it, each parameter, and the padding between them."""

    def __init__(self, run: Run, buffer: Tensor) -> None:
        self.flat = buffer[run.first : run.stop]
        self.parts = run.parts_of(self.flat)
        gaps = [self.flat[stop:start] for (_, stop), (start, _) in pairwise(run.ranges)]
        self.gaps = [gap for gap in gaps if gap.numel()]


class GradientStage:
    """Scaled gradients in the unit's flat order. The memory grows to the largest unit and is kept, so later steps
    allocate nothing.

    Attributes:
        is_reserved: memory is allocated.
    """

    def __init__(self) -> None:
        self.is_reserved = False
        self._buffer: Tensor | None = None
        self._rows: WeakKeyDictionary[Run, _Row] = WeakKeyDictionary()  # in the buffer

    def nbytes(self) -> int:
        """Bytes allocated between steps."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def free(self) -> None:
        """Free the memory; the next use allocates it again."""
        self._buffer, self.is_reserved = None, False
        self._rows.clear()

    def reserve(self, elements: int, device: torch.device) -> None:
        """Allocate the memory for a unit of ``elements`` elements.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        if self._buffer is not None and self._buffer.numel() >= elements and self._buffer.device == device:
            return
        if self._buffer is not None and self._buffer.device.type != "cpu":
            # Deferred updates use it on another stream than the one on which it was allocated.
            self._buffer.record_stream(torch.accelerator.current_stream(self._buffer.device))
        self.free()
        self._buffer = torch.empty(elements, dtype=torch.float32, device=device)
        self.is_reserved = True

    def gathered(self, run: Run, gradients: Sequence[Tensor]) -> Tensor:
        """The gradients of one run in one row, not scaled; the padding between them is zero.

        If the run is a single contiguous gradient, the row is that gradient, in its own dtype. Others are copied to the
        stage.
        """
        if len(gradients) == 1 and gradients[0].is_contiguous():
            return as_row(gradients[0])
        place = self._rows.get(run) or self._new_row(run, gradients[0].device)
        torch._foreach_copy_(place.parts, list(gradients))
        if place.gaps:
            torch._foreach_zero_(place.gaps)
        return place.flat

    def scaled(
        self,
        runs: Sequence[Run],
        gradients: Sequence[Sequence[Tensor]],
        divisor: Tensor | None,
        factor: Tensor | None,
        in_place: bool = True,
    ) -> list[Tensor]:
        """``gradients / divisor * factor`` in fp32, one row for each run; the padding between gradients is zero.

        If a run is a single contiguous fp32 gradient, it is scaled in place, since the step consumes it. Others are
        written to the stage.

        Args:
            gradients: for each run those of its parameters, in their shapes, of any float dtype, contiguous or not.
            divisor: 0-dim fp32 loss scale, or ``None``.
            factor: 0-dim fp32, or ``None``.
            in_place: whether gradients may be written to.
        """
        results, unscaled = [], []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for run, own in zip(runs, gradients, strict=True):
            single = own[0] if len(own) == 1 else None
            if single is not None and in_place and scalable_in_place(single):
                row = as_row(single.data)  # its version says whether somebody else writes to it
            elif single is not None and divisor is None and factor is not None:
                results.append(row := (self._rows.get(run) or self._new_row(run, single.device)).flat)
                scale_into(single.device)(single.contiguous().view(-1), factor.reshape(1), row)
                continue
            else:
                place = self._rows.get(run) or self._new_row(run, own[0].device)
                row = place.flat
                targets += place.parts
                sources += own
                if place.gaps:
                    torch._foreach_zero_(place.gaps)
            results.append(row)
            unscaled.append(row)
        if targets:
            torch._foreach_copy_(targets, sources)
        if unscaled and divisor is not None:
            torch._foreach_div_(unscaled, divisor)
        if unscaled and factor is not None:
            torch._foreach_mul_(unscaled, factor)
        return results

    def _new_row(self, run: Run, device: torch.device) -> _Row:
        self.reserve(run.stop, device)
        assert self._buffer is not None
        row = self._rows[run] = _Row(run, self._buffer)
        return row


def scalable_in_place(gradient: Tensor) -> bool:
    """Whether the gradient can be scaled in place, without memory of the stage."""
    return gradient.dtype == torch.float32 and gradient.is_contiguous()


def as_row(gradient: Tensor) -> Tensor:
    """The gradient's elements in row-major order; a copy only if they are not in this order in memory.

    ``view(-1)`` would keep the stride of up to one element, which may be any: FSDP2's empty shards have 0, and torch's
    fused kernels refuse gradients with other strides than the parameter's. ``reshape(-1)`` would keep gaps.
    """
    return gradient.contiguous().as_strided((gradient.numel(),), (1,))

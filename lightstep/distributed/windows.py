"""Positions of a shard's elements in the whole tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["Window", "window_of"]


class Window(NamedTuple):
    """Element ``e`` of a shard (row-major) is element ``start + e + e // inner * jump`` of the whole tensor.

    ``jump`` is 0 for a tensor that is sharded along its first dimension, or not at all.
    """

    start: int = 0
    inner: int = 1
    jump: int = 0
    first: int = 0
    """The first element of the range in question."""

    def at(self, elements: int) -> tuple[int, int]:
        """The position in the whole tensor of the element that many behind ``first``, and its offset in its row."""
        rows, rest = divmod(self.first + elements, self.inner)
        return self.start + self.first + elements + rows * self.jump, rest

    def numbers(self, first: int, stop: int) -> Tensor:
        """The positions in the whole tensor of elements ``first`` to ``stop``: int32 on the host, modulo 2^32."""
        elements = torch.arange(first, stop, dtype=torch.int64, device="cpu")
        return (elements + self.start + elements // self.inner * self.jump).to(torch.int32)


def window_of(parameter: Tensor) -> Window:
    """The window of this rank's shard; for a plain tensor the whole.

    Raises:
        ValueError: it is sharded along more than one dimension behind the first.
    """
    if not isinstance(parameter, DTensor):
        return Window()
    shape = parameter.shape
    local, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    if not math.prod(local):
        return Window()
    divided = [dim for dim in range(1, len(shape)) if local[dim] != shape[dim] and math.prod(local[:dim]) > 1]
    if len(divided) > 1:
        raise ValueError(f"its shape {tuple(shape)} is sharded along {len(divided)} dimensions behind the first")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    if not divided:
        return Window(start)
    (dim,) = divided
    inner, whole = local[dim] * strides[dim], shape[dim] * strides[dim]
    return Window(start, inner, whole - inner)

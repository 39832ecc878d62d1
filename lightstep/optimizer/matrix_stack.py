"""Parameters of three dimensions (the experts of a layer) as stacks of matrices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import dense_strides
from lightstep.optimizer.update import same_value
from lightstep.state.segment import Segment

__all__ = ["Matrix", "MatrixStack"]


class Matrix(NamedTuple):
    """One matrix, as the base optimizer sees it: like a segment."""

    master: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    attributes: Mapping[str, Any] = {}  # of the parameter


class MatrixStack:
    """A parameter of three dimensions (the experts of a layer), for a class that takes matrices only.

    Its state has the tensors of all matrices, stacked, and the plain values and 0-dim tensors of one.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment, self._shape = segment, segment.master.shape
        self.matrices = [
            Matrix(segment.master[number], segment.group, self._state_of(number), segment.attributes)
            for number in range(self._shape[0])
        ]

    def _state_of(self, number: int) -> dict[str, Any]:
        state = self._segment.state.items()
        return {k: v[number] if _has_elements(v) else copy.deepcopy(v) for k, v in state}

    def merge_state(self) -> None:
        """Make the segment's state from that of the matrices.

        Raises:
            ValueError: a value that is kept once is not that of all matrices.
        """
        state = self._segment.state
        if not self.matrices:  # this rank has no expert; its empty state has the same entries as the others'
            schema = self._segment.parts[0].owner.schema
            missing = (key for key, spec in schema.items() if spec.like_parameter and key not in state)
            state.update({key: torch.zeros_like(self._segment.master) for key in missing})
            return
        state.update({key: self._merged(key) for key in self.matrices[0].state})

    def _merged(self, key: str) -> Any:
        rows, known = [matrix.state[key] for matrix in self.matrices], self._segment.state.get(key)
        if not _has_elements(rows[0]):
            if not all(row is rows[0] or _is_on_accelerator(row) or same_value(row, rows[0]) for row in rows):
                raise ValueError(
                    f"state {key!r} differs between the matrices of {self._segment.parts[0].owner.name}, of shape "
                    f"{tuple(self._shape)}, and is kept once for all of them: give each matrix a parameter of its own"
                )
            return rows[0]
        if isinstance(known, Tensor) and known.dim() and all(map(_is_same_memory, rows, known)):
            return known
        strides = (rows[0].numel(), *dense_strides(rows[0]))
        new = rows[0].new_empty_strided((len(rows), *rows[0].shape), strides)
        return torch.stack(rows, out=new)


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _is_on_accelerator(value: Any) -> bool:
    """Whether comparing it would make the host wait."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    same_place = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    return same_place and one.shape == other.shape and one.stride() == other.stride()

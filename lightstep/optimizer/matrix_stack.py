"""Parameters of three dimensions (the experts of a layer) as stacks of matrices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.state.segment import Segment

__all__ = ["Matrix", "MatrixStack"]


class Matrix(NamedTuple):
    """One matrix, as the base optimizer sees it: like a segment."""

    master: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    attributes: Mapping[str, Any] = {}  # of the parameter


class MatrixStack:
    """A parameter of three dimensions (the experts of a layer), for a class that takes matrices only."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._shape = segment, segment.master.shape
        self.matrices = [
            Matrix(segment.master[number], segment.group, self._state_of(number), segment.attributes)
            for number in range(self._shape[0])
        ]

    def _state_of(self, number: int) -> dict[str, Any]:
        state = self._segment.state.items()
        return {k: v[number] if _has_shape(v, self._shape) else copy.deepcopy(v) for k, v in state}

    def merge_state(self) -> None:
        """Make the segment's state from that of the matrices."""
        state = self._segment.state
        if not self.matrices:  # this rank has no expert; its empty state has the same entries as the others'
            schema = self._segment.parts[0].owner.schema
            missing = (key for key, spec in schema.items() if spec.like_parameter and key not in state)
            state.update({key: torch.zeros_like(self._segment.master) for key in missing})
            return
        for key, value in self.matrices[0].state.items():
            rows = [matrix.state[key] for matrix in self.matrices]
            if not _has_shape(value, self._shape[1:]):
                state[key] = value
            elif key not in state:
                state[key] = torch.stack(rows)
            elif any(row.data_ptr() != current.data_ptr() for row, current in zip(rows, state[key], strict=True)):
                torch.stack(rows, out=state[key])


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape

"""Experts: parameters of three dimensions, as the matrices that they consist of."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.state.segment import Segment

__all__ = ["Matrix", "MatrixStack"]


class Matrix(NamedTuple):
    """What a class takes for a parameter."""

    master: Tensor
    group: dict[str, Any]
    state: dict[str, Any]


class MatrixStack:
    """A parameter of three dimensions (the experts of a layer), for a class that takes matrices only."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._shape = segment, segment.master.shape
        self.matrices = [
            Matrix(segment.master[number], segment.group, self._state_of(number)) for number in range(self._shape[0])
        ]

    def _state_of(self, number: int) -> dict[str, Any]:
        state = self._segment.state.items()
        return {k: v[number] if _has_shape(v, self._shape) else copy.deepcopy(v) for k, v in state}

    def put_together(self) -> None:
        """The matrices' state is the segment's."""
        state = self._segment.state
        if not self.matrices:  # this rank has no expert, and state like the others'
            likes = (key for key, spec in self._segment.parts[0].owner.schema.items() if spec.like_parameter)
            state.update({key: torch.zeros_like(self._segment.master) for key in likes if key not in state})
            return
        for key, value in self.matrices[0].state.items():
            rows = [matrix.state[key] for matrix in self.matrices]
            if not _has_shape(value, self._shape[1:]):
                state[key] = value
            elif key not in state:
                state[key] = torch.stack(rows)
            elif any(row.data_ptr() != known.data_ptr() for row, known in zip(rows, state[key], strict=True)):
                torch.stack(rows, out=state[key])


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape

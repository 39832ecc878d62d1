"""Updates of AdamW and Adam by one kernel for several segments, if that gives the bits of the class's own step.

All other updates, and every first update, which makes the state, are left to :mod:`lightstep.optimizer.arithmetic`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.optimizer.arithmetic import ADAMS
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.group_values import GroupValues
from lightstep.precision.adam_batch import AdamBatch, AdamMemory, AdamSettings, Scaling, corrections
from lightstep.precision.adam_kernel import fused_kernel_on, kind_of, runs_in_one_pass
from lightstep.precision.gradient_stage import GradientStage
from lightstep.state.record import Layout
from lightstep.state.segment import Piece, Segment

__all__ = ["OnePass"]

_ENTRIES = {"step", "exp_avg", "exp_avg_sq"}
_LARGEST = "max_exp_avg_sq"

Row = tuple[int, int | None]
"""Where a run's gradient is: segment and parameter; ``None``: all of the segment's, gathered."""


class OnePass:
    """One-pass updates for groups whose class is torch's own AdamW or Adam, fused.

    Args:
        classes: the classes of the groups.
        stage: memory in which the gradients of small parameters are gathered.
    """

    def __init__(self, classes: GroupClasses, stage: GradientStage) -> None:
        self._classes, self._stage = classes, stage

    def update(
        self,
        segments: Sequence[Segment],
        gradients: Sequence[Sequence[Tensor]],
        scaling: Scaling,
        values: GroupValues,
    ) -> list[Segment]:
        """Update the segments for which there is a kernel; returns the others.

        Args:
            gradients: for each segment those of its parameters, not scaled; they are not changed.
            scaling: on the segments' device.
        """
        kernels = fused_kernel_on(segments[0].device) if segments else None
        if kernels is None:
            return list(segments)
        settings: dict[int, AdamSettings | None] = {}
        for segment in segments:
            if id(segment.group) not in settings:
                settings[id(segment.group)] = self._settings(segment, values)
        form = _form(segments, gradients, [settings[id(segment.group)] for segment in segments], scaling)
        plan = segments[0].prepared
        if plan is None or plan.form != form or any(segment.prepared is not plan for segment in segments):
            plan = self._plan(kernels, segments, gradients, settings, scaling, form)
        if plan.batches:
            counters = [segments[i].values["step"] for i in plan.updated]
            torch._foreach_add_(counters, 1)
            for planned in plan.batches:
                rows = [
                    gradients[i][j] if j is not None else self._stage.gathered(segments[i], gradients[i])
                    for i, j in planned.rows
                ]
                steps = [segments[i].values["step"] for i, _ in planned.rows]
                own = settings[id(segments[planned.rows[0][0]].group)]
                assert own is not None
                planned.batch.update(kernels, rows, steps, own, scaling)
                fingerprinted = planned.batch.fingerprints is not None
                for i in planned.segments:
                    segments[i].written(fingerprinted)
            torch._foreach_sub_(counters, [scaling.overflow] * len(counters))
        return [segments[i] for i in plan.left]

    def _plan(
        self,
        kernels: ModuleType,
        segments: Sequence[Segment],
        gradients: Sequence[Sequence[Tensor]],
        settings: Mapping[int, AdamSettings | None],
        scaling: Scaling,
        form: Any,
    ) -> _Plan:
        """A plan for these segments. It is kept with their memory, unless some of it is gathered in every step."""
        left: list[int] = []
        found: dict[tuple[Any, ...], list[tuple[Row, AdamMemory]]] = {}  # by group and kind
        for i, (segment, own) in enumerate(zip(segments, gradients, strict=True)):
            group = settings[id(segment.group)]
            memories = None if group is None else _memories(segment, own, group.amsgrad)
            if memories is None:
                left.append(i)
                continue
            by_part = len(memories) == len(own) and all(gradient.is_contiguous() for gradient in own)
            dtype = own[0].dtype if by_part else torch.float32
            _, _, _, weight, low, _ = memories[0].tensors
            marks = segment.fingerprints if len(memories) == len(own) else None  # gathered parts have one each
            kind = dtype, None if weight is None else weight.dtype, low is None
            rows = found.setdefault((id(segment.group), *kind, marks is None), [])
            rows += [((i, j if by_part else None), memory) for j, memory in enumerate(memories) if memory.n]
        batches = []
        for (group_id, dtype, *_, unmarked), rows in found.items():
            group, numbers = settings[group_id], list(dict.fromkeys(i for (i, _), _ in rows))
            assert group is not None
            batch = AdamBatch([memory for _, memory in rows], None if unmarked else segments[numbers[0]].fingerprints)
            if runs_in_one_pass(kernels, kind_of(batch, dtype, group, scaling)):
                batches.append(_Planned(batch, [place for place, _ in rows], numbers))
            else:
                left += numbers
        plan = _Plan(form, batches, [i for one in batches for i in one.segments], sorted(left))
        kept = None if any(segment.gathers for segment in segments) else plan
        for segment in segments:
            segment.prepared = kept
        return plan

    def _settings(self, segment: Segment, values: GroupValues) -> AdamSettings | None:
        """The settings of the segment's group; ``None`` if the kernel does not support them."""
        arithmetic = self._classes.arithmetic_for(segment.group)
        group = arithmetic.resolved(values.settings(segment.group), segment.device)
        if arithmetic.optimizer_class not in ADAMS or not group.get("fused"):
            return None
        lr, (beta1, beta2), decay, eps = group["lr"], group["betas"], group["weight_decay"], group["eps"]
        on_device = isinstance(lr, Tensor) and lr.device == segment.device and lr.dtype == torch.float32
        if not (on_device or _is_number(lr)) or not all(map(_is_number, (beta1, beta2, decay, eps))):
            return None
        decoupled = group.get("decoupled_weight_decay", arithmetic.optimizer_class is torch.optim.AdamW)
        rate = lr if on_device else float(lr)
        beta1, beta2, decay, eps = map(float, (beta1, beta2, decay, eps))  # the kernel is compiled for floats
        if corrections(beta1, beta2, segment.device) is None:
            return None
        return AdamSettings(rate, beta1, beta2, decay, eps, decoupled, group["maximize"], bool(group["amsgrad"]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


class _Planned(NamedTuple):
    """A batch, the place of each run's gradient, and the segments it updates (their numbers)."""

    batch: AdamBatch
    rows: list[Row]
    segments: list[int]


class _Plan(NamedTuple):
    """How a unit's segments are updated. It refers to no segment, because their memory keeps it."""

    form: Any
    batches: list[_Planned]
    updated: list[int]
    left: list[int]


def _form(
    segments: Sequence[Segment],
    gradients: Sequence[Sequence[Tensor]],
    settings: Sequence[AdamSettings | None],
    scaling: Scaling,
) -> tuple[Any, ...]:
    """What a plan depends on, apart from the segments' memory. Values that schedulers change (learning rate, betas,
    decay) are arguments of the kernel."""
    fingerprints = next((one.fingerprints.data_ptr() for one in segments if one.fingerprints is not None), 0)
    return (
        [None if one is None else (isinstance(one.lr, Tensor), one.weight_decay == 0, *one[5:]) for one in settings],
        [segment.parts[0].keys for segment in segments],
        [(gradient.dtype, gradient.is_contiguous()) for own in gradients for gradient in own],
        (scaling.divisor is None, scaling.factor is None, fingerprints),
    )


def _memories(segment: Segment, gradients: Sequence[Tensor], amsgrad: bool) -> list[AdamMemory] | None:
    """What the kernel reads and writes of a segment; ``None`` if the segment has something else, too."""
    if not segment.has_state or segment.stop == segment.first:
        return None
    if not _is_adams(segment.layout, segment.parts[0].keys):
        return None
    state, dtype = segment.state, gradients[0].dtype
    step = state["step"]
    if step.device != segment.device or step.dtype != torch.float32 or (_LARGEST in state) != amsgrad:
        return None
    by_part = all(gradient.is_contiguous() and gradient.dtype == dtype for gradient in gradients)
    pieces = segment.pieces("exp_avg_sq", by_part)
    return None if pieces is None else [_memory_of(segment, piece) for piece in pieces]


def _memory_of(segment: Segment, piece: Piece) -> AdamMemory:
    number, start, stop, *rows = piece
    moments = (segment.state.get(key) for key in ("exp_avg", "exp_avg_sq", _LARGEST))
    own = (None if moment is None else moment.view(-1)[start:stop] for moment in moments)
    return AdamMemory(*own, *rows, segment.index + number, segment.first + start)  # type: ignore[call-arg, arg-type]


@functools.lru_cache(maxsize=256)
def _is_adams(layout: Layout, keys: tuple[str, ...]) -> bool:
    flat = all((e.dtype == torch.float32 or e.codec is not None) and e.shape is None for e in layout.entries)
    return flat and {*keys} - {_LARGEST} == _ENTRIES == {"step", *(e.key for e in layout.entries)} - {_LARGEST}

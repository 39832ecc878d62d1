"""Updates of AdamW and Adam by one kernel for several segments, if that gives the bits of the class's own step.

All other updates, and every first update, which makes the state, are left to :mod:`lightstep.optimizer.arithmetic`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.group_values import CLASS, GroupValues
from lightstep.precision.adam_batch import (
    AdamBatch,
    AdamCall,
    AdamMemory,
    AdamSettings,
    AdamTensors,
    Scaling,
    corrections,
)
from lightstep.precision.adam_kernel import CODECS, fused_kernel_on, kind_of, runs_in_one_pass
from lightstep.precision.gradient_stage import GradientStage
from lightstep.state.record import Layout
from lightstep.state.segment import Piece, Segment

__all__ = ["OnePass"]

_ENTRIES = {"step", "exp_avg", "exp_avg_sq"}
_DTYPES = (torch.float32, torch.bfloat16)
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
        self._values: GroupValues | None = None  # of the step
        self._calls: dict[tuple[int, int], AdamCall | None] = {}  # by group and scaling, in this step
        self._adams: dict[Any, type | None] = {}  # see :meth:`GroupClasses.fused_adam`

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
        if self._values is not values:
            self._values, self._calls = values, {}
        calls = [self._call_for(segment, scaling) for segment in segments]
        # A unit has a plan for each case: an update in backward assumes a factor of 1, one in the next forward has a
        # factor on the device, and the unit can have either in turn.
        form, scaled = _form(segments, gradients, calls), (scaling.divisor is not None, scaling.factor is not None)
        plan = segments[0].prepared.get(scaled)
        if plan is None or any(segment.prepared.get(scaled) is not plan for segment in segments) or plan.form != form:
            plan = self._plan(kernels, segments, gradients, calls, form, scaled)
        if any(segments[i].gather() is not row for i, row in plan.gathered):  # the memory for rows is another one
            plan = self._plan(kernels, segments, gradients, calls, form, scaled)
            for i, _ in plan.gathered:
                segments[i].gather()
        if plan.batches:
            counters = [segments[i].kept_values["step"] for i in plan.updated]
            self._run(kernels, plan, segments, gradients, calls)
            self._count(segments, plan.updated, counters, scaling)
        return [segments[i] for i in plan.left]

    def _run(
        self,
        kernels: ModuleType,
        plan: _Plan,
        segments: Sequence[Segment],
        gradients: Sequence[Sequence[Tensor]],
        calls: Sequence[AdamCall | None],
    ) -> None:
        for batch, places, numbers in plan.batches:
            call = calls[numbers[0]]
            assert call is not None
            rows = [
                gradients[i][j] if j is not None else self._stage.gathered(segments[i], gradients[i]) for i, j in places
            ]
            steps = [segments[i].kept_values["step"] for i, _ in places]
            batch.update(kernels, rows, steps, call)
            for i in numbers:
                segments[i].written(batch.fingerprints is not None)

    def _count(
        self, segments: Sequence[Segment], updated: Sequence[int], counters: list[Tensor], scaling: Scaling
    ) -> None:
        counted = [scaling.counted] * len(counters)
        if segments[0].may_write_values:
            torch._foreach_add_(counters, counted)
        else:
            for i, step in zip(updated, torch._foreach_add(counters, counted), strict=True):
                segments[i].advance({"step": step})

    def _plan(
        self,
        kernels: ModuleType,
        segments: Sequence[Segment],
        gradients: Sequence[Sequence[Tensor]],
        calls: Sequence[AdamCall | None],
        form: Any,
        scaled: tuple[bool, bool],
    ) -> _Plan:
        """A plan for these segments. It is kept with their memory."""
        left: list[int] = []
        gathered: list[tuple[int, Tensor]] = []
        found: dict[tuple[Any, ...], list[tuple[Row, AdamMemory]]] = {}  # by group and kind
        for i, (segment, own, call) in enumerate(zip(segments, gradients, calls, strict=True)):
            alike = all(gradient.is_contiguous() and gradient.dtype == own[0].dtype for gradient in own)
            memories = None if call is None else _memories(segment, call.settings.amsgrad, alike)
            if memories is None:
                left.append(i)
                continue
            by_part = len(memories) == len(own) and all(gradient.is_contiguous() for gradient in own)
            dtype = own[0].dtype if by_part else torch.float32
            head = memories[0]
            weight, low = head.tensors.weight, head.tensors.low
            if segment.gathers(alike):
                gathered.append((i, head.written))
            marks = segment.fingerprints if len(memories) == len(own) else None  # gathered parts have one each
            is_whole = head.tensors.master is not None
            kind = dtype, None if weight is None else weight.dtype, low is None, is_whole, head.block, head.noise
            rows = found.setdefault((id(segment.group), marks is None, *kind), [])
            rows += [((i, j if by_part else None), memory) for j, memory in enumerate(memories) if memory.n]
        batches = []
        for (_, unmarked, dtype, *_), rows in found.items():
            numbers = list(dict.fromkeys(i for (i, _), _ in rows))
            call = calls[numbers[0]]
            assert call is not None
            batch = AdamBatch([memory for _, memory in rows], None if unmarked else segments[numbers[0]].fingerprints)
            if runs_in_one_pass(kernels, kind_of(batch, dtype, call.settings, call.scaling)):
                batches.append(_Planned(batch, [place for place, _ in rows], numbers))
            else:
                left += numbers
        updated = [i for one in batches for i in one.segments]
        plan = _Plan(form, batches, updated, sorted(left), [one for one in gathered if one[0] in updated])
        for segment in segments:
            segment.prepared[scaled] = plan
        return plan

    def _call_for(self, segment: Segment, scaling: Scaling) -> AdamCall | None:
        """What the updates of the segment's group with this scaling have in common, in the whole step; ``None`` if the
        kernel does not support the group's settings."""
        key = id(segment.group), id(scaling)
        if key not in self._calls:
            settings = self._settings(segment)
            self._calls[key] = None if settings is None else AdamCall(settings, scaling)
        return self._calls[key]

    def _settings(self, segment: Segment) -> AdamSettings | None:
        assert self._values is not None
        device, number = segment.device, id(segment.group)
        group, kind = self._values.initial[number], self._values.kinds[number]
        key = device, kind, self._classes.version
        if key not in self._adams:
            self._adams[key] = self._classes.fused_adam({**group, CLASS: kind[0]}, device)
        adam = self._adams[key]
        if adam is None:
            return None
        lr, (beta1, beta2), decay, eps = group["lr"], group["betas"], group["weight_decay"], group["eps"]
        on_device = isinstance(lr, Tensor) and lr.device == device and lr.dtype == torch.float32
        numbers = (beta1, beta2, decay, eps) if on_device else (lr, beta1, beta2, decay, eps)
        if not all(isinstance(number, (int, float)) for number in numbers):
            return None
        decoupled = group.get("decoupled_weight_decay", adam is torch.optim.AdamW)
        rate = lr if on_device else float(lr)
        beta1, beta2, decay, eps = map(float, (beta1, beta2, decay, eps))  # the kernel is compiled for floats
        if corrections(beta1, beta2, device) is None:
            return None
        return AdamSettings(rate, beta1, beta2, decay, eps, decoupled, group["maximize"], bool(group["amsgrad"]))


class _Planned(NamedTuple):
    """A batch, the place of each run's gradient, and the segments it updates (their numbers)."""

    batch: AdamBatch
    rows: list[Row]
    segments: list[int]


class _Plan(NamedTuple):
    """How a unit's segments are updated. It refers to no segment, because their memory keeps it.

    Attributes:
        updated, left: the numbers of the segments that the kernel updates, and of those that it does not.
        gathered: those whose weights are gathered, and the rows in which the kernel expects them.
    """

    form: Any
    batches: list[_Planned]
    updated: list[int]
    left: list[int]
    gathered: list[tuple[int, Tensor]]


def _form(
    segments: Sequence[Segment],
    gradients: Sequence[Sequence[Tensor]],
    calls: Sequence[AdamCall | None],
) -> tuple[Any, ...]:
    """What a plan depends on, apart from the segments' memory and what gradients are scaled by. Values that schedulers
    change (learning rate, betas, decay) are arguments of the kernel."""
    fingerprints = next((one.fingerprints.data_ptr() for one in segments if one.fingerprints is not None), 0)
    return (
        [None if call is None else call.kind for call in calls],
        [segment.parts[0].keys for segment in segments],
        [(gradient.dtype, gradient.is_contiguous()) for own in gradients for gradient in own],
        fingerprints,
    )


def _memories(segment: Segment, amsgrad: bool, by_part: bool) -> list[AdamMemory] | None:
    """What the kernel reads and writes of a segment; ``None`` if the segment has something else, too."""
    if not segment.has_state or segment.stop == segment.first:
        return None
    kept, keys = _kept_in(segment.layout), segment.parts[0].keys
    if kept is None or {*keys} - {_LARGEST} != _ENTRIES or (_LARGEST in keys) != amsgrad:
        return None
    step = segment.kept_values["step"]
    if not isinstance(step, Tensor) or step.device != segment.device or step.dtype != torch.float32:
        return None
    pieces = segment.pieces("exp_avg_sq", by_part)
    return None if pieces is None else [_memory_of(segment, piece, *kept) for piece in pieces]


def _memory_of(segment: Segment, piece: Piece, block: int, noisy: bool) -> AdamMemory:
    planes = piece.entries
    (first, *scales), (second, *sq) = planes["exp_avg"], planes["exp_avg_sq"]
    largest, *largest_planes = planes.get(_LARGEST, (None,))
    listed = piece.numbers if isinstance(piece.numbers, Tensor) else None
    sq_scales, sq_signs = sq or (None, None)
    max_scales, max_signs = largest_planes or (None, None)
    tensors = AdamTensors(
        first,
        second,
        largest,
        piece.weight,
        piece.low,
        piece.master,
        scales[0] if scales else None,
        sq_scales,
        max_scales,
        sq_signs,
        max_signs,
        listed,
    )
    window = Window() if listed is not None else piece.numbers
    return AdamMemory(tensors, segment.index + piece.number, piece.first, block, window, noisy)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _kept_in(layout: Layout) -> tuple[int, bool] | None:
    """How all moments under a layout are kept, ``block`` and ``noisy`` of :class:`AdamMemory`; ``None``: they differ,
    there is more, or the kernel does not know the codec."""
    if {entry.key for entry in layout.entries} - {_LARGEST} != _ENTRIES - {"step"}:
        return None
    if any(entry.shape is not None or entry.dtype not in _DTYPES for entry in layout.entries):
        return None
    if any(entry.codec is not None and type(entry.codec) not in CODECS for entry in layout.entries):
        return None
    found = {
        (0, False) if entry.codec is None else (entry.codec.block, entry.codec.is_stochastic)
        for entry in layout.entries
    }
    plain = all(entry.dtype == torch.float32 for entry in layout.entries if entry.codec is None)
    return next(iter(found)) if len(found) == 1 and plain else None

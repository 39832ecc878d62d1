"""Updates of AdamW and Adam by one kernel for several segments, if that gives the bits of the class's own step.

All other updates, and every first update, which makes the state, are left to :mod:`lightstep.optimizer.arithmetic`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.optimizer.arithmetic import ADAMS
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.group_values import GroupValues
from lightstep.precision.adam_kernel import (
    AdamMemory,
    AdamRun,
    AdamSettings,
    Scaling,
    fused_kernel_on,
    kind_of,
    runs_in_one_pass,
    update,
)
from lightstep.precision.gradient_stage import GradientStage
from lightstep.state.record import Layout
from lightstep.state.segment import Piece, Segment

__all__ = ["OnePass"]

_ENTRIES = {"step", "exp_avg", "exp_avg_sq"}
_LARGEST = "max_exp_avg_sq"


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
        settings_of: dict[int, AdamSettings | None] = {}
        batches: dict[tuple[Any, ...], _Batch] = {}  # by group and form
        left = []
        for segment, own in zip(segments, gradients, strict=True):
            group = id(segment.group)
            if group not in settings_of:
                settings_of[group] = self._settings(segment, values)
            settings = settings_of[group]
            runs = None if settings is None else _runs(segment, self._stage, own, settings.amsgrad)
            if settings is None or runs is None:
                left.append(segment)
                continue
            form = group, *_form(runs[0])
            if form not in batches:
                kind = kind_of(runs[0], settings, scaling)
                batches[form] = _Batch(settings, runs_in_one_pass(kernels, kind, settings), [], [], [])
            batches[form].segments.append(segment)
            batches[form].steps.append(runs[0].step)
            batches[form].runs.extend(runs)
        supported = [batch for batch in batches.values() if batch.supported]
        left += [segment for batch in batches.values() if not batch.supported for segment in batch.segments]
        if supported:
            steps = [step for batch in supported for step in batch.steps]
            torch._foreach_add_(steps, 1)
            for batch in supported:
                update(kernels, batch.runs, batch.settings, scaling)
                for segment in batch.segments:
                    segment.written(fingerprinted=batch.runs[0].fingerprints is not None)
            torch._foreach_sub_(steps, [scaling.overflow] * len(steps))
        return left

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
        return AdamSettings(rate, beta1, beta2, decay, eps, decoupled, group["maximize"], bool(group["amsgrad"]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


class _Batch(NamedTuple):
    """Segments of one group whose updates are of one kind, and whether there is a kernel for it."""

    settings: AdamSettings
    supported: bool
    segments: list[Segment]
    steps: list[Tensor]
    runs: list[AdamRun]


def _form(run: AdamRun) -> tuple[Any, ...]:
    """What makes the updates of one group differ in kind."""
    *_, weight, low, _ = run.memory.tensors
    return run.gradient.dtype, None if weight is None else weight.dtype, low is None, run.fingerprints is None


def _runs(segment: Segment, stage: GradientStage, gradients: Sequence[Tensor], amsgrad: bool) -> list[AdamRun] | None:
    """What the kernel reads and writes of a segment; ``None`` if the segment has something else, too."""
    if not segment.has_state or segment.stop == segment.first:
        return None
    if not _is_adams(segment.layout, segment.parts[0].keys, tuple(segment.kept)):
        return None
    state, dtype = segment.state, gradients[0].dtype
    step = state["step"]
    if step.device != segment.device or step.dtype != torch.float32 or (_LARGEST in state) != amsgrad:
        return None
    by_part = all(gradient.is_contiguous() and gradient.dtype == dtype for gradient in gradients)
    pieces = segment.pieces("exp_avg_sq", by_part)
    if pieces is None:
        return None
    if len(pieces) < len(gradients):  # gathered
        memory = _memory_of(segment, pieces[0])
        return [AdamRun(memory, stage.gathered(segment, gradients), step)]
    known = segment.prepared if not segment.kept else None
    if known is None or known[0] is not pieces:
        known = segment.prepared = pieces, [_memory_of(segment, piece) for piece in pieces]
    rows = (stage.gathered(segment, gradients),) if len(gradients) == 1 else (one.view(-1) for one in gradients)
    marks = segment.fingerprints
    return [AdamRun(memory, row, step, marks) for memory, row in zip(known[1], rows, strict=True) if memory.n]


def _memory_of(segment: Segment, piece: Piece) -> AdamMemory:
    number, start, stop, *rows = piece
    moments = (segment.state.get(key) for key in ("exp_avg", "exp_avg_sq", _LARGEST))
    own = (None if moment is None else moment.view(-1)[start:stop] for moment in moments)
    return AdamMemory(*own, *rows, segment.index + number, segment.first + start)  # type: ignore[call-arg, arg-type]


@functools.lru_cache(maxsize=256)
def _is_adams(layout: Layout, keys: tuple[str, ...], widened: tuple[str, ...]) -> bool:
    flat = all((dtype == torch.float32 or key in widened) and shape is None for key, dtype, shape in layout.entries)
    return flat and {*keys} - {_LARGEST} == _ENTRIES == {"step", *(key for key, _, _ in layout.entries)} - {_LARGEST}

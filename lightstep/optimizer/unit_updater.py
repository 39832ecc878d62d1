"""The update of one unit: acquire its state → scale gradients → the base optimizer's arithmetic → write back.

Where a kernel gives the bits of the class's own step, AdamW and Adam scale and update in one pass over memory. All
other updates, and every first update, which makes the state, are left to :mod:`lightstep.optimizer.arithmetic`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.optimizer.changed_weights import ChangedWeights
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.host_gradients import HostGradients
from lightstep.optimizer.shared_updates import SharedUpdates
from lightstep.optimizer.step_guard import BrokenStep
from lightstep.optimizer.update import CLASS, Gradients, GradientStage, GroupValues, Update, scalable_in_place
from lightstep.precision.adam_batch import (
    AdamBatch,
    AdamCall,
    AdamMemory,
    AdamSettings,
    AdamTensors,
    Scaling,
    adam_call,
    corrections,
)
from lightstep.precision.adam_kernel import CODECS, fused_kernel_on, kind_of, runs_in_one_pass
from lightstep.state.record import Layout
from lightstep.state.schema import Managed, Unit
from lightstep.state.segment import Piece, Segment
from lightstep.state.store import Store

_ENTRIES = {"step", "exp_avg", "exp_avg_sq"}
_DTYPES = (torch.float32, torch.bfloat16)
_LARGEST = "max_exp_avg_sq"

Row = tuple[int, int | None]
"""Where a run's gradient is: segment and parameter; ``None``: all of the segment's, gathered."""

_NOTHING_ELSE = contextlib.nullcontext()


class UnitUpdater:
    """:meth:`begin`, then :meth:`update` for each unit in order, then :meth:`finish`; all on one stream or CPU thread.

    Args:
        broken: records what failed.
        record: called with the parameters of each unit after their update.
        host_gradients: brings gradients that are on the host.

    Attributes:
        changed: finds what updates change, if somebody asked for that.
        is_running: :meth:`run` has not come to its end.
    """

    def __init__(
        self,
        classes: GroupClasses,
        backend: Store,
        broken: BrokenStep,
        record: Callable[[Iterable[Managed]], None],
        host_gradients: HostGradients | None = None,
    ) -> None:
        self.classes = classes
        self._host_gradients = host_gradients
        self._backend = backend
        self.broken = broken
        self._record = record
        self.changed: ChangedWeights | None = None
        self.is_running = False
        self.stage = GradientStage()
        self.shared = SharedUpdates(classes, backend)
        self._adams: dict[Any, type | None] = {}  # see :meth:`GroupClasses.fused_adam`

    # -- memory

    def reserve_stage(self, gradients: Gradients | None = None) -> None:
        """Allocate the memory in which gradients are copied and scaled; nothing else changes.

        Args:
            gradients: it is needed for those of these that cannot be scaled in place; ``None``: for those of any unit.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        units = self._backend.units()
        if gradients is not None:
            staged = {item for item, gradient in gradients.items() if not scalable_in_place(gradient)}
            units = [unit for unit in units if any(owner in staged for owner in unit.owners)] if staged else []
        largest = max((unit.elements for unit in units), default=0)
        if largest:
            self.stage.reserve(largest, units[0].owners[0].local.device)

    # -- one step

    def run(self, updates: Sequence[Update]) -> None:
        """The whole step, here and now.

        Args:
            updates: one of all parameters, or one for each layer; all have the same overflow and values.
        """
        self.is_running = True
        self.begin([item for update in updates for item in update.gradients])
        units = self._backend.units()
        for unit, own in zip(units, updates_of(units, updates), strict=True):
            self.update(unit, own)
            completed = [owner for owner, _, stop in unit.parts if stop == owner.local.numel()]
            for update in own:
                update.drop_gradients(completed)
        self.finish([item for update in updates for item in update.elsewhere])
        if self.classes.may_write_groups:
            self.write_back(updates[0].values)
        self.is_running = False

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None, ahead: bool = True) -> None:
        """Begin a step.

        Args:
            managed: the parameters that it updates.
            order: the order in which units are expected; ``None``: that of the backend.
            ahead: the gradients of later units are complete when an earlier one is updated.
        """
        try:
            self._backend.begin(managed, order)
            if self.classes.exchanges or self.shared.units:
                self.shared.begin(managed, order, ahead)
                self.broken.stops_others = bool(self.shared.units)
        except BaseException as error:
            self.broken.fail("the beginning of the update", error)
            raise

    def update(self, unit: Unit, updates: Sequence[Update], speculative: bool = False) -> None:
        """Update one unit: of one layer, or of several with an update each.

        Args:
            updates: those of the unit's parameters. Units that ranks update together get all updates of the step, which
                have the same overflow.
            speculative: it can be rolled back; some parameter must have a gradient.
        """
        gradients = updates[0].gradients if len(updates) == 1 else _joined(updates)
        deferred = [update for update in updates if update.versions]
        is_plain = self._host_gradients is None and self.changed is None
        try:
            with _NOTHING_ELSE if is_plain else self._around(unit, gradients):
                for update in deferred:
                    update.refuse_written(unit.owners)
                segments = self._update(unit, gradients, updates, speculative)
                for update in deferred:
                    update.note_own_writes(unit.owners)
        except BaseException as error:
            self.broken.fail(f"the update of {unit.label}", error)
            raise
        owners = [part.owner for segment in segments for part in segment.parts]
        for owner in owners:
            owner.updated = True
        self._record(owners)

    def _update(
        self, unit: Unit, gradients: Gradients, updates: Sequence[Update], speculative: bool
    ) -> Sequence[Segment]:
        """Returns what has been updated."""
        if unit in self.shared.positions:
            segments: Sequence[Segment] = self._apply_shared(unit, gradients, updates, speculative)
        else:
            segments = self._backend.acquire(unit, gradients, speculative)
            if len(updates) == 1 and segments:
                self._apply(segments, updates[0])
            elif segments:
                for update, own in _divided(segments, updates):
                    self._apply(own, update)
        self._backend.release(unit, segments)
        return segments

    @contextlib.contextmanager
    def _around(self, unit: Unit, gradients: Gradients) -> Iterator[None]:
        """In the body the unit's gradients are on the device, and what it changes is found."""
        comparing = contextlib.nullcontext() if self.changed is None else self.changed.updating(unit)
        with self._bringing(unit, gradients), comparing:
            yield

    def _bringing(self, unit: Unit, gradients: Gradients) -> contextlib.AbstractContextManager[None]:
        """In the body the unit's gradients are on the device."""
        if self._host_gradients is None:
            return contextlib.nullcontext()
        own = {owner.param: gradients[owner] for owner in unit.owners if owner in gradients}
        return self._host_gradients.holding(own, update=True)

    def _apply_shared(
        self, unit: Unit, active: Gradients, updates: Sequence[Update], speculative: bool
    ) -> list[Segment]:
        """Update a unit together with other ranks; the communication of later units is started first."""
        values, device = updates[0].values, unit.owners[0].local.device
        scaling = {update: update.scaling_on(device) for update in updates}

        def scaled(segments: Sequence[Segment]) -> list[Tensor]:
            rows: dict[Segment, Tensor] = {}
            for update, own in _divided(segments, updates):
                gradients = [[part.slice(update.gradients[part.owner]) for part in segment.parts] for segment in own]
                rows |= zip(own, self._scaled(own, gradients, update, scaling[update]), strict=True)
            return [rows[segment] for segment in segments]

        with contextlib.ExitStack() as stack:
            for later in self.shared.upcoming(unit):
                stack.enter_context(self._bringing(later, active))
            self.shared.start_ahead(unit, active, scaled, values)
        segments = self._backend.acquire(unit, active, speculative)
        self.shared.apply(unit, segments, scaled, scaling[updates[0]].overflow, values)
        return segments

    def finish(self, elsewhere: Collection[Managed], next_order: Sequence[Unit] | None = None) -> None:
        """End the step.

        Args:
            elsewhere: parameters whose weights other replicas have sent.
            next_order: the order in which the next step is expected to update units; ``None``: that of this step.
        """
        try:
            written = self._backend.finish(next_order)
        except BaseException as error:
            self.broken.fail("the end of the update", error)
            raise
        for item in elsewhere:
            item.updated = True
        self._record([*elsewhere, *written])

    def complete(self, updates: Sequence[Update], items: list[Managed], drop: bool = True) -> None:
        """The updates of these parameters are done: drop their gradients.

        Args:
            drop: without it their gradients stay: they will be used again.

        Raises:
            RuntimeError: somebody has written to gradients or weights meanwhile; the step is marked as broken.
        """
        for update in updates:
            try:
                if update.versions:
                    update.refuse_written(items)
            except BaseException as error:
                self.broken.fail("the update", error)
                raise
            if drop:
                update.drop_gradients(items)

    def write_back(self, values: GroupValues) -> None:
        """See :meth:`GroupClasses.write_back`. Needed only if ``classes.may_write_groups``."""
        try:
            self.classes.write_back(values)
        except BaseException as error:
            self.broken.fail("the end of the update", error)
            raise

    # -- speculative updates

    def roll_back(self, unit: Unit) -> None:
        """Undo a speculative :meth:`update`."""
        if self._backend.speculative([unit]):
            try:
                self._backend.roll_back(unit)
            except BaseException as error:
                self.broken.fail(f"rolling back the update of {unit.label}", error)
                raise
            self._record(unit.owners)

    # -- the arithmetic

    def _apply(self, segments: Sequence[Segment], update: Update) -> None:
        available = update.gradients
        gradients = [
            [available[p.owner] if p.whole else p.slice(available[p.owner]) for p in segment.parts]
            for segment in segments
        ]
        scaling = update.scaling_on(segments[0].device)
        left = self._update_in_one_pass(segments, gradients, scaling, update.values)
        if left:
            unscaled = [own for segment, own in zip(segments, gradients, strict=True) if segment in left]
            scaled = self._scaled(left, unscaled, update, scaling)
            self.classes.apply(left, scaled, scaling.overflow, update.values)

    def _scaled(
        self, segments: Sequence[Segment], gradients: Sequence[list[Tensor]], update: Update, scaling: Scaling
    ) -> list[Tensor]:
        """Scaled gradients in the shapes and dtypes of the segments' masters."""
        if self._host_gradients is not None:
            self._host_gradients.wait_until_stored(part.owner.param for segment in segments for part in segment.parts)
        rows = self.stage.scaled(segments, gradients, *scaling[:2], in_place=not update.keep_gradients)
        dtypes = [segment.locals[0].dtype if segment.coding == "own" else torch.float32 for segment in segments]
        return [row.view(segment.shape).to(d) for segment, row, d in zip(segments, rows, dtypes, strict=True)]

    # -- AdamW and Adam in one pass, if there is a kernel that gives the bits of the class's own step

    def _update_in_one_pass(
        self,
        segments: Sequence[Segment],
        gradients: Sequence[Sequence[Tensor]],
        scaling: Scaling,
        values: GroupValues,
    ) -> list[Segment]:
        """Update the segments for which there is a kernel; returns the others.

        A first update, which makes the state, is left to the class.

        Args:
            gradients: for each segment those of its parameters, not scaled; they are not changed.
            scaling: on the segments' device.
        """
        kernels = fused_kernel_on(segments[0].device)
        if kernels is None:
            return list(segments)
        calls = [self._call_for(segment, scaling, values) for segment in segments]
        # A unit has a plan for each case: an update in backward assumes a factor of 1, one in the next forward has a
        # factor on the device, and the unit can have either in turn.
        form, scaled = _form(segments, gradients, calls), (scaling.divisor is not None, scaling.factor is not None)
        plan = segments[0].prepared.get(scaled)
        if plan is None or any(segment.prepared.get(scaled) is not plan for segment in segments) or plan.form != form:
            plan = _plan(kernels, segments, gradients, calls, form, scaled)
        if any(segments[i].gather() is not row for i, row in plan.gathered):  # the memory for rows is another one
            plan = _plan(kernels, segments, gradients, calls, form, scaled)
            for i, _ in plan.gathered:
                segments[i].gather()
        counters = [segments[i].kept_values["step"] for i in plan.updated]
        self._launch(kernels, plan, segments, gradients, calls)
        counted = [scaling.counted] * len(counters)
        if segments[0].may_write_values and counters:
            torch._foreach_add_(counters, counted)
        elif counters:
            for i, step in zip(plan.updated, torch._foreach_add(counters, counted), strict=True):
                segments[i].advance({"step": step})
        return [segments[i] for i in plan.left]

    def _launch(
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
                gradients[i][j] if j is not None else self.stage.gathered(segments[i], gradients[i]) for i, j in places
            ]
            steps = [segments[i].kept_values["step"] for i, _ in places]
            kernels.update(batch, rows, steps, call)
            for i in numbers:
                segments[i].written(batch.fingerprints is not None)

    def _call_for(self, segment: Segment, scaling: Scaling, values: GroupValues) -> AdamCall | None:
        """What the updates of the segment's group with this scaling have in common, in the whole step; ``None`` if the
        kernel does not support the group's settings."""
        key = id(segment.group), id(scaling)
        if key not in values.calls:
            group, kind = values.initial[id(segment.group)], values.kinds[id(segment.group)]
            asked = segment.device, kind, self.classes.version
            if asked not in self._adams:
                self._adams[asked] = self.classes.fused_adam({**group, CLASS: kind[0]}, segment.device)
            adam = self._adams[asked]
            settings = None if adam is None else _settings(adam, group, segment.device)
            values.calls[key] = None if settings is None else adam_call(settings, scaling)
        return values.calls[key]


def updates_of(units: Sequence[Unit], updates: Sequence[Update]) -> Sequence[Sequence[Update]]:
    """For each unit, the updates of its parameters.

    Units that ranks update together get all updates: the communication of later units starts with them.
    """
    if len(updates) == 1:
        return [updates] * len(units)
    update_of = {item: update for update in updates for item in update.gradients}
    shared = [any(owner.rows is not None for owner in unit.owners) for unit in units]
    own = [list(dict.fromkeys(update_of[owner] for owner in unit.owners if owner in update_of)) for unit in units]
    return [updates if together else mine for together, mine in zip(shared, own, strict=True)]


def _joined(updates: Sequence[Update]) -> Gradients:
    """The gradients of all of the updates."""
    return {item: gradient for update in updates for item, gradient in update.gradients.items()}


def _divided(segments: Sequence[Segment], updates: Sequence[Update]) -> list[tuple[Update, Sequence[Segment]]]:
    """Each update with its segments, if it has any: no segment has parts of two updates."""
    pairs = ((update, [s for s in segments if s.parts[0].owner in update.gradients]) for update in updates)
    return [(update, own) for update, own in pairs if own]


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


def _plan(
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
        by_part = alike and len(memories) == len(own)
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


def _settings(adam: type, group: Mapping[str, Any], device: torch.device) -> AdamSettings | None:
    """Those of a group of AdamW or Adam; ``None`` if the kernel does not support them."""
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

"""Updates before the norm is known: which units, what makes them valid, and the verdict on them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.queue import Job
from lightstep.optimizer.unit_updater import UnitUpdater
from lightstep.optimizer.update import Gradients, GroupValues, Update, as_row, versions_of
from lightstep.precision.adam_batch import Scaling
from lightstep.precision.split import Splitter
from lightstep.state.lanes import Lane
from lightstep.state.schema import Managed, Unit
from lightstep.state.store import Store

__all__ = ["LinkShare", "Plan", "Speculation", "UsedGradients", "Verdict", "evenly_spaced"]

logger = logging.getLogger(__name__)

_COMMIT, _REDO, _DROP = range(3)
_CHANGED, _OVERRULED = 4, 8  # added to these, for :meth:`Verdict.reason`

_STEP = 0.05
"""By so much the fraction of units in backward grows at first."""
_HELD = 16
"""Backwards before more is tried again, after one that was late: with each share other units are laid out anew."""


class UsedGradients(dict[Managed, tuple[Tensor, int]]):
    """The gradients that speculative updates use, with their versions, and whether somebody writes to them afterwards.

    Most writes increment the tensor's version. Those through ``p.grad.data``, or by kernels of other libraries, do not:
    checksums at two moments show them, whose memory is kept for all steps. Nobody else writes to gradients that go to
    the host; in place of a version they have the number of those that have gone there, with this one.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._splitter = Splitter(device, checksums=device.type == "cpu")
        self._then, self._now = (torch.empty(0, dtype=torch.int32, device=device) for _ in range(2))
        self._checked: list[Managed] = []  # with checksums

    def reserve(self, count: int) -> None:
        """Allocate memory for the checksums of ``count`` gradients."""
        if self._then.numel() < count:
            self._then, self._now = (self._then.new_empty(count) for _ in range(2))

    def add(self, gradients: Gradients) -> list[Managed]:
        """Remember these gradients; returns the parameters whose gradients have not been used before.

        On a device the checksums are queued on the current stream.
        """
        new = [item for item in gradients if item not in self]
        staying = [item for item in new if item.home is None]
        for item in new:
            gradient, home = gradients[item], item.home
            if home is None:
                self[item] = gradient, gradient._version
            else:
                leaves_later = item.param.grad is not None
                self[item] = home.gradient(gradient.dtype), home.arrivals + leaves_later
        if staying:
            first = len(self._checked)
            self._checked += staying
            self._write([gradients[item] for item in staying], self._then[first : len(self._checked)])
        return new

    def are_in(self, gradients: Gradients) -> bool:
        """Whether these are the same tensors, with the same versions."""
        for item, (then, version) in self.items():
            if item not in gradients or (then._version if item.home is None else item.home.arrivals) != version:
                return False
            now = gradients[item]
            if now is not then and not (
                item.home is None and now.data_ptr() == then.data_ptr() and now.shape == then.shape
            ):
                return False
        return True

    def checksums(self, gradients: Gradients) -> tuple[Tensor, Tensor]:
        """The checksums of these gradients now, and when they were used: int32 ``[n]``. Called once in a step."""
        count = len(self._checked)
        if count:
            self._write([gradients[item] for item in self._checked], self._now[:count])
        return self._now[:count], self._then[:count]

    def _write(self, gradients: Iterable[Tensor], out: Tensor) -> None:
        """Queue the checksums of gradients (fp32 or 16-bit) on the current stream; ``out`` has one for each."""
        codes = [g.ravel() if g.dtype.itemsize == 2 else as_row(g).view(torch.int16) for g in gradients]
        self._splitter.fingerprint_rows([(row, 0, [(0, row.shape[0])], i) for i, row in enumerate(codes)], out)

    def clear(self) -> None:
        super().clear()
        self._checked.clear()


class Plan:
    """Which units backwards update speculatively. It holds until something changes on which it depends.

    Args:
        local: units to update that this rank updates alone.
        shared: units to update that several ranks update together, in the order in which backward completes them.
        after_backward: units that ``step()`` submits first, with the true factor.
        expected: all units, in the order in which backward completes them.

    Attributes:
        shared_order: the units of ``shared``, in order.
        owners: the parameters of ``local`` and ``shared``.
        first: the parameters of the units that ``step()`` submits first.
        order: the order in which backward, and the step after it, are expected to submit units.
        made_for, candidates, ready: what it was made from.
    """

    def __init__(
        self,
        local: Collection[Unit],
        shared: Sequence[Unit],
        after_backward: Sequence[Unit],
        expected: Iterable[Unit],
    ) -> None:
        self.local, self.shared, self.shared_order = frozenset(local), frozenset(shared), tuple(shared)
        self.after_backward = after_backward
        self.owners = frozenset(owner for unit in (*local, *shared) for owner in unit.owners)
        self.first = frozenset(owner for unit in after_backward for owner in unit.owners)
        self.order = self.in_order(expected)
        self.made_for: Any = None
        self.candidates: Collection[Unit] = ()
        self.ready: Sequence[Unit] = ()

    def in_order(self, expected: Iterable[Unit]) -> list[Unit]:
        """:attr:`order` if backward completes units in the ``expected`` one. That of shared units is agreed on."""
        shared = iter(self.shared_order)
        known = (unit for unit in expected if unit in self.local or unit in self.shared)
        return [*(next(shared) if unit in self.shared else unit for unit in known), *self.after_backward]


class Speculation:
    """The speculative updates of one backward.

    Args:
        plan: which units.
        values: the hyper-parameters at the beginning of the backward.
        assumed: the assumed scaling of the gradients, and their overflow, as in :class:`Update`.
        used: the gradients that updates have used; kept for all steps.
        done: event behind the last update that has been submitted.

    Attributes:
        shared_queue: shared units that have not been submitted yet.
        gradients: the gradients that are complete.
        submitted: the units that have been submitted, in order.
        updated: stands for those of them that the verdict decides about, from ``step()`` on.
        weights_changed: a weight was written to by somebody else before its update.
        invalid: some updates have been rolled back already, so that none will be committed.
        update: the true update of the step, from ``step()`` on.
        scalings: see :class:`Update`.
    """

    def __init__(
        self,
        plan: Plan,
        values: GroupValues,
        assumed: tuple[Tensor | None, Tensor | None, Tensor],
        used: UsedGradients,
        done: Any,
    ) -> None:
        self.plan, self.values, self.assumed, self.used, self.done = plan, values, assumed, used, done
        self.shared_queue = deque(plan.shared_order)
        self.gradients: Gradients = {}
        self.submitted: list[Unit] = []
        self.updated: Job | None = None
        self.weights_changed = self.invalid = False
        self.update: Update | None = None
        self.scalings: dict[torch.device, Scaling] = {}
        self._own_versions: dict[Managed, int] = {}  # versions of weights as our own updates left them

    def run(self, updater: UnitUpdater, unit: Unit, update: Update, versions: Sequence[int]) -> None:
        """Update one unit, in the compute lane.

        A unit whose weights have been changed is skipped. A shared unit is updated nevertheless, since other ranks wait
        for it.

        Args:
            versions: those of the unit's weights when it was submitted. An earlier unit with another part of
                the same weight raises the version, too.
        """
        own, owners = self._own_versions, unit.owners
        known = versions
        if not own.keys().isdisjoint(owners):
            known = [own.get(owner, version) for owner, version in zip(owners, versions, strict=True)]
        self.weights_changed |= versions_of(owners) != known
        if not self.weights_changed or unit in self.plan.shared:
            updater.speculate(unit, update)
        own.update(zip(owners, versions_of(owners), strict=True))

    def let_go(self, items: Iterable[Managed]) -> None:
        """Their updates have been submitted: gradients that go to the host are not kept on the device."""
        for item in items:
            if item.home is not None and item in self.gradients:
                self.gradients[item] = item.home.gradient(self.gradients[item].dtype)


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
        assert self._code is not None
        if self._event is not None:
            self._event.synchronize()
        return {_COMMIT: "commit", _REDO: "redo", _DROP: "drop"}[int(self._code) % _CHANGED]

    def reason(self) -> str:
        """Why it is not ``commit``, once it has been read."""
        assert self._code is not None
        code = int(self._code)
        if code % _CHANGED == _DROP:
            return "overflow"
        if code & _OVERRULED:
            return "another rank cannot commit"
        return "gradients were changed after their use" if code & _CHANGED else "gradients are clipped"


class LinkShare:
    """The fraction of units to update in backward: as many as the link can carry meanwhile. The forward has the rest.

    The fraction is adapted after each backward, by how far the compute lane was behind at its end: the next forward has
    to wait for that. Units whose state stays on the device may be the last ones, and leave the link time until then.
    Weights and gradients that rest on the host cross the same link, and the lane may be in time
    because backward itself waits for them: so what the model waited in backward counts, too. Three measurements are
    left out:

    - units that are complete with the very last layer: they cross the link after backward in any case;
    - the first backward, which compiles kernels and allocates memory;
    - the CPU, where time says nothing about a link. All units are updated in backward there.

    Attributes:
        device: of the lanes.
    """

    def __init__(self, backend: Store) -> None:
        self._backend = backend
        self.device = torch.device("cpu")
        self.fraction = 1.0
        self._step = _STEP
        self._marks: list[Any] = []  # events, kept for later backwards
        self._used = 0  # of them
        self._held = 0  # backwards before more is tried
        self._first = True
        self._advised = False

    def mark(self, lane: Lane) -> None:
        """Measure when the lane gets here.

        The first mark is the beginning of backward, on the caller's stream, and the last one its end. Each batch of
        units has two in between: its gradients are complete there, and its updates are done in the compute lane.
        """
        if self.device.type != "cpu":
            if self._used == len(self._marks):
                self._marks.append(torch.Event(self.device, enable_timing=True))
            lane.record(self._marks[self._used])
            self._used += 1

    def adapt(self) -> None:
        """Adapt the fraction before the next backward, once all work of the last one has been waited for."""
        used, self._used = self._used, 0
        batches = used // 2 - 1
        if used % 2 or batches < 3:
            return
        begin, *pairs, end = self._marks[:used]
        ready, done = pairs[::2], pairs[1::2]
        if not (end.query() and done[-1].query()):
            return
        host_weights = self._backend.host_weights
        waited = 0.0 if host_weights is None else host_weights.waited()
        if waited is None:
            return
        if self._first:
            self._first = False
            return
        span, layer = begin.elapsed_time(end), begin.elapsed_time(ready[-1]) / batches
        last = next((n for n in range(batches - 1, 0, -1) if ready[n].elapsed_time(end) > layer / 2), 0)
        late = end.elapsed_time(done[last])
        logger.debug(
            "updated in backward: %.2f of the units; the lane was %.1f ms behind %.1f, of which the model waited %.1f",
            self.fraction,
            late,
            span,
            waited,
        )
        self._held = max(self._held - 1, 0)
        if max(late, 0.0) + waited > layer / 2:
            self._held = _HELD
            kept = (span - waited) / (span + max(late, 0.0))
            self.fraction = max(self.fraction * max(kept, 0.5), 0.05)
            self._step = _STEP
            self._advise()
        elif late < 0 and not self._held:
            self.fraction = min(self.fraction + self._step, 1.0)
            self._step = min(2 * self._step, 0.4)

    def _advise(self) -> None:
        if self._advised:
            return
        self._advised = True
        logger.info(
            "the link takes longer than backward: %.0f %% of the units are updated there, the others during the next "
            "forward. Less has to cross it with a larger optimizer_state.resident_gib",
            100 * self.fraction,
        )


def evenly_spaced(units: Sequence[Unit], fraction: float) -> list[Unit]:
    """This fraction of the units, evenly spaced. Neighbours whose weights rest on the host together stay together:
    weights and gradients of all of them cross the link for the update of one."""
    if fraction == 1:
        return list(units)
    parts = [list(part) for _, part in groupby(units, key=_what_crosses)]
    chosen = (part for n, part in enumerate(parts) if int((n + 1) * fraction + 0.5) > int(n * fraction + 0.5))
    return [unit for part in chosen for unit in part]


def _what_crosses(unit: Unit) -> int:
    home = unit.owners[0].home
    return id(unit if home is None else home.group)

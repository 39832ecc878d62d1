"""The speculative updates of one backward, and what makes them valid."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.queue import Job
from lightstep.optimizer.unit_updater import Gradients, UnitUpdater, Update
from lightstep.precision.adam_batch import Scaling
from lightstep.precision.gradient_stage import as_row
from lightstep.precision.split import Splitter
from lightstep.state.checksummed_weights import ChecksummedWeights
from lightstep.state.schema import Managed, Unit, versions_of
from lightstep.state.staging import MasterSplitter

__all__ = ["Checksums", "Speculation", "UpdatedJob", "UsedGradients"]


class Checksums:
    """Memory for checksums of gradients at two moments; kept for all steps.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        splitter = Splitter(device)
        self._splitter: MasterSplitter = ChecksummedWeights(splitter) if device.type == "cpu" else splitter
        self._device = device
        self.then, self.now = (torch.empty(0, dtype=torch.int32, device=device) for _ in range(2))

    def reserve(self, count: int) -> None:
        """Allocate memory for the checksums of ``count`` gradients."""
        if self.then.numel() < count:
            self.then, self.now = (torch.empty(count, dtype=torch.int32, device=self._device) for _ in range(2))

    def write(self, gradients: Iterable[Tensor], out: Tensor) -> None:
        """Queue the checksums of gradients (fp32 or 16-bit) on the current stream.

        Args:
            out: int32, one element for each gradient.
        """
        codes = [g.ravel() if g.dtype.itemsize == 2 else as_row(g).view(torch.int16) for g in gradients]
        self._splitter.fingerprint_rows([(row, 0, [(0, row.shape[0])], i) for i, row in enumerate(codes)], out)


class UsedGradients(dict[Managed, tuple[Tensor, int]]):
    """The gradients that speculative updates use, with their versions, and whether somebody writes to them afterwards.

    Most writes increment the tensor's version. Those through ``p.grad.data``, or by kernels of other libraries, do not:
    the checksums show them. Nobody else writes to gradients that go to the host; in place of a version they have the
    number of those that have gone there, with this one.
    """

    def __init__(self, checksums: Checksums) -> None:
        super().__init__()
        self._checksums = checksums
        self._checked: list[Managed] = []  # with checksums

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
            first, stop = len(self._checked), len(self._checked) + len(staying)
            self._checksums.write([gradients[item] for item in staying], self._checksums.then[first:stop])
            self._checked += staying
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
        now, then = self._checksums.now[:count], self._checksums.then[:count]
        if count:
            self._checksums.write([gradients[item] for item in self._checked], now)
        return now, then

    def clear(self) -> None:
        super().clear()
        self._checked.clear()


class Speculation:
    """The speculative updates of one backward.

    Args:
        local: units to update that this rank updates alone.
        shared: units to update that several ranks update together, in the order in which backward completes them.
        after_backward: units that ``step()`` submits first, with the true factor.
        values: the hyper-parameters at the beginning of the backward.
        divisor, factor: the assumed scaling of the gradients, as in :class:`Update`.
        checksums: memory for those of gradients.

    Attributes:
        first: the parameters of the units that ``step()`` submits first.
        shared_order: the units of ``shared``, in order.
        shared_queue: those of them that have not been submitted yet.
        gradients: the gradients that are complete.
        used: the gradients that updates have used.
        submitted: the units that have been submitted, in order.
        updated: stands for those of them that the verdict decides about, from ``step()`` on.
        done: event behind the last of them.
        weights_changed: a weight was written to by somebody else before its update.
        invalid: some updates have been rolled back already, so that none will be committed.
        update: the true update of the step, from ``step()`` on.
    """

    def __init__(
        self,
        local: Collection[Unit],
        shared: Collection[Unit],
        after_backward: Sequence[Unit],
        values: GroupValues,
        divisor: Tensor | None,
        factor: Tensor | None,
        checksums: Checksums,
    ) -> None:
        self.local, self.shared = frozenset(local), frozenset(shared)
        self.shared_order, self.shared_queue = tuple(shared), deque(shared)
        self.after_backward = after_backward
        self.first = frozenset(owner for unit in after_backward for owner in unit.owners)
        self.values, self.divisor, self.factor = values, divisor, factor
        self.gradients: Gradients = {}
        self.used = UsedGradients(checksums)
        self.submitted: list[Unit] = []
        self.updated: UpdatedJob | None = None
        self.done: Any = None
        self.weights_changed = self.invalid = False
        self.update: Update | None = None
        self._own_versions: dict[Managed, int] = {}  # versions of weights as our own updates left them
        self._no_overflow: Tensor | None = None
        self._scalings: dict[torch.device, Scaling] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit in self.local or unit in self.shared

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
        if not self.weights_changed or unit in self.shared:
            updater.speculate(unit, update)
        own.update(zip(owners, versions_of(owners), strict=True))

    def let_go(self, items: Iterable[Managed]) -> None:
        """Their updates have been submitted: gradients that go to the host are not kept on the device."""
        for item in items:
            if item.home is not None and item in self.gradients:
                self.gradients[item] = item.home.gradient(self.gradients[item].dtype)

    def assumed_update(self, gradients: Gradients) -> Update:
        """The update of these gradients with the assumed scaling."""
        if self._no_overflow is None:
            device = next(iter(gradients.values())).device
            self._no_overflow = torch.zeros((), dtype=torch.float32, device=device)
        scaling = self.divisor, self.factor, self._no_overflow
        return Update(gradients, *scaling, self.values, keep_gradients=True, scalings=self._scalings)


class UpdatedJob(Job):
    """Stands for units that are updated already: whoever waits for it waits for the work in the lane before it."""

    def __init__(self, units: Sequence[Unit], update: Update) -> None:
        super().__init__(None, [update])
        self.units, self.is_end = units, False
        self.owners = [owner for unit in units for owner in unit.owners]

    def run(self, updater: UnitUpdater) -> None:
        return

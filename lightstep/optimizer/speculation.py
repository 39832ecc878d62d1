"""The speculative updates of one backward, and what makes them valid."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.schedule import Job
from lightstep.optimizer.unit_updater import Gradients, UnitUpdater, Update
from lightstep.state.backend import Managed, Unit

__all__ = ["Commit", "Speculation", "UsedGradient"]


class UsedGradient:
    """A gradient that a speculative update uses. A write through ``p.grad.data`` does not increment its version: on the
    CPU it is detected by comparison."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient, self._version = gradient, gradient._version
        self._copy = gradient.clone() if gradient.device.type == "cpu" else None

    def is_same(self, now: Tensor) -> bool:
        """Whether ``now`` is the gradient, and nobody has written to it since."""
        then = self._gradient
        known = now.data_ptr() == then.data_ptr() and now.shape == then.shape and then._version == self._version
        return known and (self._copy is None or torch.equal(now, self._copy))


class Speculation:
    """The speculative updates of one backward.

    Args:
        local: units to update that this rank updates alone.
        shared: units to update that several ranks update together, in the order in which backward completes them.
        after_backward: units that ``step()`` submits first, with the true factor.
        values: the hyper-parameters at the beginning of the backward.
        divisor, factor: the assumed scaling of the gradients, as in :class:`Update`.

    Attributes:
        shared_queue: the units of ``shared`` that have not been submitted yet.
        gradients: the gradients that are complete.
        used: the gradients that updates have used.
        submitted: the units that have been submitted, in order.
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
    ) -> None:
        self.local, self.shared, self.shared_queue = frozenset(local), frozenset(shared), deque(shared)
        self.after_backward = after_backward
        self.values, self.divisor, self.factor = values, divisor, factor
        self.gradients: Gradients = {}
        self.used: dict[Managed, UsedGradient] = {}
        self.submitted: list[Unit] = []
        self.done: Any = None
        self.weights_changed = self.invalid = False
        self.update: Update | None = None
        self._own_versions: dict[Tensor, int] = {}  # versions of weights as our own updates left them
        self._no_overflow: Tensor | None = None

    def __contains__(self, unit: Unit) -> bool:
        return unit in self.local or unit in self.shared

    def run(self, updater: UnitUpdater, unit: Unit, update: Update, versions: Sequence[tuple[Tensor, int]]) -> None:
        """Update one unit, in the compute lane.

        A unit whose weights have been changed is skipped. A shared unit is updated nevertheless, since other ranks wait
        for it.

        Args:
            versions: the unit's weights with their versions when it was submitted. An earlier unit with another part of
                the same weight raises the version, too.
        """
        self.weights_changed |= any(
            weight._version != self._own_versions.get(weight, version) for weight, version in versions
        )
        if not self.weights_changed or unit in self.shared:
            updater.speculate(unit, update)
        self._own_versions.update({weight: weight._version for weight, _ in versions})

    def assumed_update(self, gradients: Gradients) -> Update:
        """The update of these gradients with the assumed scaling."""
        if self._no_overflow is None:
            device = next(iter(gradients.values())).device
            self._no_overflow = torch.zeros((), dtype=torch.float32, device=device)
        return Update(gradients, self.divisor, self.factor, self._no_overflow, self.values, keep_gradients=True)


class Commit(Job):
    """Commits the units that are updated. Their parameters are complete, unless another of their units is left.

    Args:
        done: the units that are updated already.
        left: the units that are not.
    """

    def __init__(self, done: Sequence[Unit], left: Sequence[Unit], update: Update) -> None:
        super().__init__(None, update)
        incomplete = {owner for unit in left for owner, _, _ in unit.parts}
        self._done = done
        self._owners = dict.fromkeys(o for unit in done for o, _, _ in unit.parts if o not in incomplete)
        self.is_end = False

    def owners(self) -> Iterable[Managed]:
        return self._owners

    def run(self, updater: UnitUpdater) -> None:
        updater.commit(self._done)
        self.completed.extend(self._owners)

"""What is tried in one backward, and what makes it count."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.schedule import Job
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.state.backend import Managed, Unit

__all__ = ["Commit", "Trial", "is_same"]


class Trial:
    """What is tried in one backward.

    Args:
        alone, together: units that are planned, of this rank and of ranks together, in the order in which backward
            completes them.
        last: those that ``step()`` submits, as any that is not tried.
        values: hyper-parameters at its beginning.
        divisor, factor: by which gradients are scaled.

    Attributes:
        line: those of ``together`` that were not submitted yet.
        arrived: gradients that are complete.
        used: those of them that were used, and their versions then.
        units: those that were submitted, in order.
        done: event behind the last of them.
        edited: somebody wrote to a weight before it was tried.
        spoiled: some of it was taken back already, and none of it will count.
        decided: the step's update, once ``step()`` was called.
    """

    def __init__(
        self,
        alone: Collection[Unit],
        together: Collection[Unit],
        last: Sequence[Unit],
        values: GroupValues,
        divisor: Tensor | None,
        factor: Tensor | None,
    ) -> None:
        self.alone, self.together, self.line = frozenset(alone), frozenset(together), deque(together)
        self.last = last
        self.values, self.divisor, self.factor = values, divisor, factor
        self.arrived: Gradients = {}
        self.used: dict[Managed, tuple[Tensor, int]] = {}
        self.units: list[Unit] = []
        self.done: Any = None
        self.edited = self.spoiled = False
        self.decided: Update | None = None
        self._left_at: dict[Tensor, int] = {}  # versions of weights of which a unit was tried
        self._fits: Tensor | None = None

    def __contains__(self, unit: Unit) -> bool:
        return unit in self.alone or unit in self.together

    def attempt(self, walk: UnitWalk, unit: Unit, update: Update, seen: Sequence[tuple[Tensor, int]]) -> None:
        """Try one unit, in the compute lane; ``seen``: its weights, and their versions when it was submitted.

        Where a unit before it has a part of the same weight, that one has raised the version. Other ranks wait for a
        unit that they try together, and so it is tried although it will not count.
        """
        self.edited |= any(weight._version != self._left_at.get(weight, version) for weight, version in seen)
        if not self.edited or unit in self.together:
            walk.attempt(unit, update)
        self._left_at.update({weight: weight._version for weight, _ in seen})

    def update(self, gradients: Gradients) -> Update:
        """By which units are tried."""
        if self._fits is None:
            self._fits = torch.zeros((), dtype=torch.float32, device=next(iter(gradients.values())).device)
        return Update(gradients, self.divisor, self.factor, self._fits, self.values, read_again=True)


class Commit(Job):
    """The units that were tried count; their parameters are complete, unless one of their other units is left.

    Args:
        done: units that were tried, and others that are updated already.
        left: those that are not.
    """

    def __init__(self, done: Sequence[Unit], left: Sequence[Unit], update: Update) -> None:
        super().__init__(None, update)
        waiting = {owner for unit in left for owner, _, _ in unit.parts}
        self._done = done
        self._owners = dict.fromkeys(o for unit in done for o, _, _ in unit.parts if o not in waiting)
        self.ends = False

    def owners(self) -> Iterable[Managed]:
        return self._owners

    def run(self, walk: UnitWalk) -> None:
        walk.commit(self._done)
        self.complete.extend(self._owners)


def is_same(now: Tensor, then: Tensor, version: int) -> bool:
    return now.data_ptr() == then.data_ptr() and now.shape == then.shape and then._version == version

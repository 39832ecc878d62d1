"""Updates in backward: what all of them have in common."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightstep.optimizer.arrivals import Arrivals
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.queue import AdoptWrites, EarlyStep, Queue
from lightstep.optimizer.unit_updater import Gradients, Update
from lightstep.state.schema import Managed, Unit

__all__ = ["EarlyUpdates"]


class EarlyUpdates(ABC):
    """Updates units in backward, when their gradients are complete; subclasses say which ones, and by which factor.

    Here the rest of the queue runs as if this object did not exist.

    Args:
        queue: holds this object, so this one must not hold it: a weak reference.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue, self._updater, self._backend = queue, queue.updater, queue.backend
        self._arrivals = Arrivals()

    @property
    @abstractmethod
    def is_half_done(self) -> bool: ...

    @property
    def is_speculating(self) -> bool:
        return False

    @property
    def awaits_step(self) -> bool:
        return False

    @contextlib.contextmanager
    def updating(self, step: EarlyStep, retain_graph: bool) -> Iterator[None]:
        """Other threads wait until the backward in the body ends, if units are updated in it.

        Speculatively none are if the graph is retained: a second backward would need the old weights.
        """
        if retain_graph and not self._queue.time.in_backward:
            yield
            return
        with self._queue.guard.backward, self._updating(step):
            yield

    @abstractmethod
    def _updating(self, step: EarlyStep) -> contextlib.AbstractContextManager[None]:
        """The last backward of a step runs in the body."""

    def _begin(self, values: GroupValues, in_lane: bool, order: Sequence[Unit]) -> list[Managed]:
        """Begin a step that updates all layers; returns their parameters."""
        everything = [item for layer in self._arrivals.layers for item in layer]
        values.copy_mutable()
        self._queue.begin(everything, values, in_lane, order, ahead=False)
        return everything

    def _second_gradient(self, item: Managed) -> RuntimeError:
        """For a parameter that has been updated in this backward already."""
        assert self._queue.time.without_early is not None
        return RuntimeError(
            f"a second gradient of {item.name} arrived in one backward, after it was updated: reentrant activation "
            "checkpointing does that to parameters that are used several times (use use_reentrant=False), and a loss "
            "of sharded weights themselves does it beside that of the model (give each a backward of its own); or set "
            f"optimizer_state.update: {self._queue.time.without_early.name}"
        )

    def complete(self, step: EarlyStep) -> None:
        raise AssertionError("no step has started")

    def validate(self, gradients: Gradients, groups: Sequence[dict[str, Any]], adopt_writes: AdoptWrites) -> bool:
        return False

    def start(self, updates: Sequence[Update]) -> bool:
        return False

    def overflows(self, updates: Sequence[Update]) -> bool | None:
        return None

    def skip(self) -> None:  # noqa: B027  (an optional hook)
        pass

    def resolve(self, items: Iterable[Managed] | None) -> bool:
        return True

    def drop_gradients(self) -> None:  # noqa: B027  (an optional hook)
        pass

    @abstractmethod
    def reset(self) -> None: ...

    def close(self) -> None:
        self._arrivals.close()

"""Updates in backward: what all of them have in common."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from lightstep.optimizer.arrivals import Arrivals
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.queue import Early, EarlyStep, Queue
from lightstep.state.schema import Managed, Unit

__all__ = ["EarlyUpdates"]


class EarlyUpdates(Early):
    """Counts gradients and begins a step in backward; subclasses say which units are updated, and by which factor.

    Args:
        queue: holds this object, so this one must not hold it: a weak reference.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue, self._updater, self._backend = queue, queue.updater, queue.backend
        self._arrivals = Arrivals()

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

    def close(self) -> None:
        self._arrivals.close()

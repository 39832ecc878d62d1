"""``update: in_backward``: each layer is updated when its gradients are complete, while backward goes on.

Nobody holds all gradients: a layer's go when its update is done. So whatever needs all of them first (the global norm
for clipping, skipping a whole step) is not to be had here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.arrivals import Arrivals, Take
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.schedule import Job, Schedule
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.state.backend import Managed, StateBackend

__all__ = ["InBackward"]

Decide = Callable[[int, Gradients, GroupValues], Update | None]


class InBackward(Schedule):
    """Units of a layer are lined up with its last gradient; a step that did not begin in backward runs in ``step()``.

    On an accelerator the stream that brings a layer's gradients waits for the update of the layer before it, so that
    the gradients of two layers are in memory at a time. The host does not wait. Small layers that a backend stages
    together are updated when all of them are complete; each is still clipped, or left out, by itself.
    """

    in_backward = True

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        super().__init__(walk, backend)
        self._arrivals = Arrivals()
        self._decide: Decide | None = None
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._incomplete: Gradients = {}
        self._newest: Tensor | None = None  # FSDP2's other gradients are found through it: they share its memory
        self._done: set[Managed] = set()
        self._touched = False
        self._newest_batch = 0  # number of its first unit
        self._decided: dict[int, list[Update]] = {}  # of batches that wait for other layers
        self._arrivals.forget()

    @property
    def pending(self) -> bool:
        return bool(self._queued)

    @property
    def _half_done(self) -> bool:
        return self._touched or super()._half_done

    @contextlib.contextmanager
    def running(
        self, layers: Sequence[Sequence[Managed]], groups: Sequence[dict[str, Any]], take: Take, decide: Decide
    ) -> Iterator[None]:
        """A step begins, and the backward in here completes gradients.

        Args:
            layers: the parameters that are updated together, in the order of the model.
            groups: their hyper-parameters.
            take: called with a parameter whose gradient is complete; returns it, or ``None`` without one.
            decide: called with a layer's number, its gradients and hyper-parameters when they are there; ``None``
                leaves the layer alone.
        """
        with self._failing_once("the backward in which layers are updated"):
            self._arrivals.lay_out(layers, self._backend.units(), together=self._backend.in_lanes)
            self._backend.keep_first(self._arrivals.complete_last())
            self.started, self._decide = True, decide
            everything = [item for layer in self._arrivals.layers for item in layer]
            self._begin(everything, GroupValues(groups), self._backend.in_lanes, self._arrivals.in_order())
            try:
                with self._arrivals.listening(lambda item: self._collect(item, take)):
                    yield
                    for batch in list(self._decided):  # some of their layers have got no gradient
                        self._run(batch)
            finally:
                self._decide = None

    def _collect(self, item: Managed, take: Take) -> None:
        gradient = take(item)
        if gradient is not None:
            self.arrived(item, gradient)

    def arrived(self, item: Managed, gradient: Tensor) -> None:
        """The whole gradient of a parameter: its layer is updated with the last of them.

        Raises:
            RuntimeError: the parameter was updated in this step already.
        """
        if item in self._done:
            raise RuntimeError(
                f"a second gradient of {item.name} arrived in one backward, after it was updated: reentrant activation "
                "checkpointing does that to parameters that are used several times; use use_reentrant=False, or "
                "optimizer_state.update: at_step"
            )
        self._done.add(item)
        self._incomplete[item] = self._newest = gradient
        number = self._arrivals.number_of(item)
        if self._arrivals.is_last(number):
            self._update(number)

    def _update(self, number: int) -> None:
        """All gradients of the layer are there: its batch is updated with the last of its layers."""
        layer, batch = self._arrivals.layers[number], self._arrivals.batch_of(number)
        gradients = {item: self._incomplete.pop(item) for item in layer if item in self._incomplete}
        assert self._decide is not None and self._values is not None
        update = self._decide(number, gradients, self._values) if gradients else None
        del gradients
        if update is not None:
            update.drop_gradients(update.elsewhere)
            self._decided.setdefault(batch, []).append(update)
        if self._arrivals.is_last_of_batch(number):
            del update
            self._run(batch)

    def _run(self, batch: int) -> None:
        """Update what is decided of it."""
        if batch not in self._decided:
            return
        self._touched = True
        self._newest_batch = self._lined_up
        if self._in_lane:
            self._follow_caller()
        update = Update.of_layers(self._decided.pop(batch))
        self._line_up(Job(unit, update) for unit in reversed(self._arrivals.units_of(batch)))
        self._submit(self._lined_up)
        self._wait(self._newest_batch - 1)

    def wait_for_update(self, items: Iterable[Managed] | None = None) -> None:
        """A block that is recomputed in backward waits for the layers before the last one that is complete, which
        bounds the gradients in memory, and for its own parameters if they have been updated already."""
        if items is None:
            self._wait(self._lined_up)
            return
        wanted = frozenset(items)
        own = (job.number for job in self._queued if not wanted.isdisjoint(job.owners()))
        self._wait(max(own, default=self._newest_batch - 1))

    def wait_on_stream(self, items: Iterable[Managed]) -> None:
        """A forward finds all done: ``step()``, and whoever comes before it, has waited."""

    def complete(self, managed: Sequence[Managed], take: Take, decide: Decide) -> None:
        """Take what is left, update layers that got no gradient for some parameter, and end the step.

        The caller's next work finds everything updated.
        """
        with self._failing_once("the update"):
            self._decide = decide
            with torch.no_grad():
                for item in managed:
                    self._collect(item, take)
            for number in reversed(range(len(self._arrivals.layers))):
                if not self._arrivals.is_complete(number):
                    self._update(number)
            for batch in list(self._decided):
                self._run(batch)
            assert self._values is not None
            overflow = torch.zeros((), dtype=torch.float32, device="cpu")
            end = Update({}, None, None, overflow, self._values, [])
            end.elsewhere = [item for item in managed if item.elsewhere]
            if self._in_lane:
                self._follow_caller()
            self._line_up([Job(None, end)])
            self._submit(self._lined_up)
            self._wait(self._lined_up)
            self._end()

    def drop(self) -> None:
        self._incomplete.clear()

    def forget(self) -> None:
        super().forget()
        self._end()

    def _end(self) -> None:
        self.started, self._decide = False, None
        self._forget_gradients()

    def close(self) -> None:
        """Take the hooks off."""
        self._arrivals.close()

"""``update: in_backward``: each layer is updated when its gradients are complete, while backward goes on.

A layer's gradients are freed with its update, so all gradients never exist at once. What needs all of them first (the
global norm for clipping, skipping a whole step) is not available here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.arrivals import Arrivals, Take, second_gradient
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.schedule import Job, Schedule, refuse_older_graphs
from lightstep.optimizer.unit_updater import Gradients, UnitUpdater, Update
from lightstep.state.backend import StateBackend
from lightstep.state.schema import Managed

__all__ = ["InBackward"]

MakeUpdate = Callable[[int, Gradients, GroupValues], Update | None]
"""Called with a layer's number, gradients and hyper-parameters; returns ``None`` if the layer is to be skipped."""


class InBackward(Schedule):
    """Schedules the units of a layer with its last gradient. A step that did not begin in backward runs in ``step()``.

    On an accelerator the stream that produces a layer's gradients waits for the update of the layer before, so that the
    gradients of two layers are in memory at a time. The host does not wait. Small layers that a backend stages together
    are updated when all of them are complete; each is still clipped, or skipped, by itself.
    """

    in_backward = True

    def __init__(self, updater: UnitUpdater, backend: StateBackend) -> None:
        super().__init__(updater, backend)
        self._arrivals = Arrivals()
        self._make_update: MakeUpdate | None = None
        self._hooks_run = False  # in backward
        self._reset_step()

    def _reset_step(self) -> None:
        self.started, self._make_update = False, None
        self._incomplete: Gradients = {}  # gradients of incomplete layers
        self._newest: Tensor | None = None  # FSDP2's other gradients are found through it: they share its memory
        self._arrived: set[Managed] = set()
        self._any_updated = False
        self._newest_batch = 0  # number of its first job
        self._updates: dict[int, list[Update]] = {}  # of complete layers, by batch, until the batch is complete
        self._arrivals.reset()

    @property
    def pending(self) -> bool:
        return bool(self._submitted)

    @property
    def _is_half_done(self) -> bool:
        return self._any_updated or super()._is_half_done

    @contextlib.contextmanager
    def updating(
        self, layers: Sequence[Sequence[Managed]], groups: Sequence[dict[str, Any]], take: Take, make_update: MakeUpdate
    ) -> Iterator[None]:
        """A step begins; the last backward runs in the body, and layers are updated as it completes their gradients.

        Args:
            layers: the parameters of each layer, in the order of the model.
            groups: their hyper-parameters.
            take: called with parameters whose gradient is complete; takes it, and returns ``None`` without one.
            make_update: called with each layer that is complete.
        """
        with self._aborting("the backward in which layers are updated"):
            self._arrivals.set_layers(layers, self._backend.units(), batched=self._backend.supports_lanes)
            self._backend.prefer_resident(self._arrivals.last_in_backward())
            self.started, self._make_update = True, make_update
            everything = [item for layer in self._arrivals.layers for item in layer]
            values = GroupValues(groups)
            values.copy_mutable()
            order = self._arrivals.backward_order()
            self.guard.work("backward()", self._begin, everything, values, self._backend.supports_lanes, order)
            self._hooks_run = True
            try:
                with self._arrivals.listening(lambda item: self._take_gradient(item, take)):
                    yield
                    self.guard.work("backward()", self._flush)
            finally:
                self._make_update, self._hooks_run = None, False

    def _take_gradient(self, item: Managed, take: Take) -> None:
        gradient = take(item)
        if gradient is not None:
            self.add_gradient(item, gradient)

    def add_gradient(self, item: Managed, gradient: Tensor) -> None:
        """The whole gradient of a parameter: its layer is updated with the last one of the layer.

        Raises:
            RuntimeError: the parameter has been updated in this step already.
        """
        if item in self._arrived:
            raise second_gradient(item, instead="at_step")
        self._arrived.add(item)
        self._incomplete[item] = self._newest = gradient
        layer = self._arrivals.layer_of[item]
        if not self._arrivals.count_gradient(layer):
            return
        if self._hooks_run:
            self.guard.work("backward()", self._complete_layer, layer)
        else:  # it is part of step()
            self._complete_layer(layer)

    def _complete_layer(self, layer: int) -> None:
        """All gradients of the layer have arrived: its batch is updated with the last of its layers."""
        items, batch = self._arrivals.layers[layer], self._arrivals.batch_of[layer]
        gradients = {item: self._incomplete.pop(item) for item in items if item in self._incomplete}
        assert self._make_update is not None and self._values is not None
        update = self._make_update(layer, gradients, self._values) if gradients else None
        del gradients
        if update is not None:
            update.drop_gradients(update.elsewhere)
            self._updates.setdefault(batch, []).append(update)
        if self._arrivals.count_layer(layer):
            del update
            self._update_batch(batch)

    def _update_batch(self, batch: int) -> None:
        """Update the layers of a batch, apart from those that are skipped."""
        if batch not in self._updates:
            return
        self._any_updated = True
        self._newest_batch = self._num_jobs
        if self._in_lane:
            self._wait_for_caller()
        updates = self._updates.pop(batch)
        if self._in_lane:
            refuse_older_graphs(item for update in updates for item in update.gradients)
        self._schedule(Job(unit, updates) for unit in reversed(self._arrivals.units_of[batch]))
        self._submit(self._num_jobs)
        self._wait(self._newest_batch - 1)

    def _flush(self) -> None:
        """Update the batches in which some layer has no gradient."""
        for batch in list(self._updates):
            self._update_batch(batch)

    def wait_for_update(self, items: Iterable[Managed] | None = None) -> None:
        """A block that is recomputed in backward waits for its own parameters if they have been updated already.

        It also waits for the layers before the newest complete one, which bounds the gradients in memory.
        """
        if items is None:
            self._wait(self._num_jobs)
            return
        wanted = frozenset(items)
        own = (job.number for job in self._submitted if not wanted.isdisjoint(job.owners))
        self._wait(max(own, default=self._newest_batch - 1))

    def wait_on_stream(self, items: Iterable[Managed]) -> None:
        """Does nothing: by the next forward, ``step()`` or an earlier reader has waited."""

    def refuse_changed_settings(self, groups: Sequence[dict[str, Any]], moved: bool) -> None:
        """Refuse hyper-parameters that were changed between the last backward and ``step()``.

        Args:
            moved: parameters have come to another group since.

        Raises:
            RuntimeError: the updates in backward had the earlier ones. Nothing has been changed: with these set again,
                ``step()`` may be called again.
        """
        changed = [] if self._values is None else [*self._values.changed(groups), *["params"] * moved]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} of a parameter group changed between backward() and step(), and backward has "
                "updated weights with the earlier values (optimizer_state.update: in_backward). Change them "
                "after step() or before the last backward, or set update: at_step"
            )

    def refuse_written(self, written: Sequence[Managed]) -> None:
        """Refuse weights that somebody else wrote to between the last backward and ``step()``.

        Raises:
            RuntimeError: some were: whether before or after their update is not known, and the step counts as failed.
        """
        if not written:
            return
        with self._aborting("the update"):
            raise RuntimeError(
                f"{written[0].name} was written to between backward() and step(), and backward has updated weights "
                "(optimizer_state.update: in_backward). Write to weights after step() or before the last backward, or "
                "set update: at_step"
            )

    def complete(self, managed: Sequence[Managed], take: Take, make_update: MakeUpdate) -> None:
        """End the step: take the remaining gradients, update layers in which some are missing, and wait."""
        with self._aborting("the update"):
            self._make_update = make_update
            with torch.no_grad():
                for item in managed:
                    self._take_gradient(item, take)
            for layer in reversed(range(len(self._arrivals.layers))):
                if not self._arrivals.is_complete(layer):
                    self._complete_layer(layer)
            self._flush()
            if self._in_lane:
                self._wait_for_caller()
            self._schedule([Job(None, (), [item for item in managed if item.is_remote])])
            self._submit(self._num_jobs)
            self._wait(self._num_jobs)
            self._reset_step()

    def drop_gradients(self) -> None:
        self._incomplete.clear()

    def reset(self) -> None:
        super().reset()
        self._reset_step()

    def close(self) -> None:
        """Remove the hooks."""
        self._arrivals.close()

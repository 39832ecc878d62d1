"""``update: in_backward``: each layer is updated when its gradients are complete, while backward goes on.

A layer's gradients are freed with its update, so all gradients never exist at once. What needs all of them first (the
global norm for clipping, skipping a whole step) is not available here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightstep.optimizer.queue import AT_STEP, Early, EarlyStep, Job, Queue, UpdateTime, refuse_older_graphs
from lightstep.optimizer.update import Gradients, GroupValues, Update
from lightstep.state.schema import Managed

__all__ = ["IN_BACKWARD", "FinalUpdates"]


class FinalUpdates(Early):
    """Schedules the units of a layer with its last gradient. A step that did not begin in backward runs in ``step()``.

    On an accelerator the stream that produces a layer's gradients waits for the update of the layer before, so that the
    gradients of two layers are in memory at a time. The host does not wait. Small layers that a backend stages together
    are updated when all of them are complete; each is still clipped, or skipped, by itself.
    """

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue)
        self._hooks_run = False  # in backward
        self.reset()

    def reset(self) -> None:
        self._queue.started = self._any_updated = False
        self._step: EarlyStep | None = None  # while gradients are taken
        self._incomplete: Gradients = {}  # gradients of incomplete layers
        self._newest: Tensor | None = None  # FSDP2's other gradients are found through it: they share its memory
        self._arrived: set[Managed] = set()
        self._updates: dict[int, list[Update]] = {}  # of complete layers, by batch, until the batch is complete
        self._elsewhere: list[Managed] = []  # what other replicas update
        self._arrivals.reset()

    @property
    def is_half_done(self) -> bool:
        return self._any_updated

    @contextlib.contextmanager
    def updating(self, step: EarlyStep) -> Iterator[None]:
        """A step begins; the last backward runs in the body, and layers are updated as it completes their gradients."""
        queue = self._queue
        if queue.started:
            raise RuntimeError(
                "a second backward() before step(): the first one has updated the weights already "
                "(optimizer_state.update: in_backward). Run all backwards of a step but the last under "
                "strategy.accumulate(model, last=False)"
            )
        prepared = step.prepare_backward(final=True)
        if prepared is None:
            yield
            return
        (layers, _), values = prepared, GroupValues(step.param_groups, deferred=True)
        values.note_tensors()
        try:
            in_lane = self._backend.supports_lanes
            self._arrivals.set_layers(layers, self._backend.units(), batched=in_lane)
            self._backend.prefer_resident(self._arrivals.last_in_backward())
            queue.started, self._step = True, step
            managed, order = self._arrivals.layer_of.keys(), self._arrivals.backward_order()
            queue.guard.work("backward()", queue.begin, managed, values, in_lane, order, ahead=False)
            self._hooks_run = True
            with self._arrivals.listening(partial(self._take_gradient, step)):
                yield
                queue.guard.work("backward()", self._flush)
        except BaseException as error:
            queue.abort("the backward in which layers are updated", error)
            raise
        finally:
            self._step, self._hooks_run = None, False

    def _take_gradient(self, step: EarlyStep, item: Managed) -> None:
        gradient = step.take(item)
        if gradient is not None:
            self.add_gradient(item, gradient)

    def add_gradient(self, item: Managed, gradient: Tensor) -> None:
        """The whole gradient of a parameter: its layer is updated with the last one of the layer.

        Raises:
            RuntimeError: the parameter has been updated in this step already.
        """
        if item in self._arrived:
            raise self._second_gradient(item) if self._hooks_run else self._late_gradient(item)
        layer = self._arrivals.add_gradient(item, gradient, self._incomplete)
        self._arrived.add(item)
        self._newest = gradient
        if layer is None:
            return
        if self._hooks_run:
            self._queue.guard.work("backward()", self._complete_layer, layer)
        else:  # it is part of step()
            self._complete_layer(layer)

    def _late_gradient(self, item: Managed) -> RuntimeError:
        """For a parameter that has been updated, and had another gradient when ``step()`` was called."""
        return RuntimeError(
            f"{item.name} has a gradient that came after its update, as from a second backward before step(): the "
            "first one has updated the weights already (optimizer_state.update: in_backward). Run all backwards of a "
            "step but the last under strategy.accumulate(model, last=False)"
        )

    def _complete_layer(self, layer: int) -> None:
        """All gradients of the layer have arrived: its batch is updated with the last of its layers."""
        items, batch = self._arrivals.layers[layer], self._arrivals.batch_of[layer]
        gradients = {item: self._incomplete.pop(item) for item in items if item in self._incomplete}
        step, values = self._step, self._queue.values
        assert step is not None and values is not None
        update = step.make_layer_update(layer, gradients, values) if gradients else None
        del gradients
        if update is not None:
            self._elsewhere += update.elsewhere
            update.drop_gradients(update.elsewhere)
            self._updates.setdefault(batch, []).append(update)
        if self._arrivals.count_layer(layer):
            del update
            self._update_batch(batch)

    def _update_batch(self, batch: int) -> None:
        """Update the layers of a batch, apart from those that are skipped; wait for the batches before it."""
        if batch not in self._updates:
            return
        queue, self._any_updated = self._queue, True
        first_job = queue.num_jobs
        if queue.lanes is not None:
            queue.wait_for_caller()
        updates = self._updates.pop(batch)
        if queue.lanes is not None:
            refuse_older_graphs(item for update in updates for item in update.gradients)
        queue.schedule([Job([unit], updates) for unit in reversed(self._arrivals.units_of[batch])])
        queue.submit(queue.num_jobs)
        queue.wait(first_job - 1)

    def _flush(self) -> None:
        """Update the batches in which some layer has no gradient.

        If other processes get the weights, that is left to ``step()``, which updates the rest of such a batch, too:
        they get each unit once.
        """
        if self._hooks_run and self._backend.peers_wait:
            return
        for batch in list(self._updates):
            self._update_batch(batch)

    def drop_gradients(self) -> None:
        self._incomplete.clear()

    # -- step

    def complete(self, step: EarlyStep) -> None:
        """End the step: take the remaining gradients, update layers in which some are missing, and wait.

        Raises:
            RuntimeError: hyper-parameters or weights have been changed since backward.
        """
        managed, queue = list(step.managed), self._queue
        self._refuse_changed_settings(step.param_groups, step.managed.in_other_groups(step.param_groups))
        queue.wait_for_update()
        self._refuse_written(step.managed.find_written(managed))
        try:
            self._complete(step, managed)
        except BaseException as error:
            queue.abort("the update", error)
            raise

    def _complete(self, step: EarlyStep, managed: Sequence[Managed]) -> None:
        queue, self._step = self._queue, step
        for item in managed:
            self._take_gradient(step, item)
        for layer in reversed(range(len(self._arrivals.layers))):
            if not self._arrivals.is_complete(layer):
                self._complete_layer(layer)
        self._flush()
        if queue.lanes is not None:
            queue.wait_for_caller()
        refuse_older_graphs(self._elsewhere)
        queue.schedule([Job((), (), end=(self._elsewhere, None))])
        queue.submit(queue.num_jobs)
        queue.wait(queue.num_jobs)
        self.reset()

    def _refuse_changed_settings(self, groups: Sequence[dict[str, Any]], moved: bool) -> None:
        """Refuse hyper-parameters that were changed between the last backward and ``step()``.

        Args:
            moved: parameters have come to another group since.

        Raises:
            RuntimeError: the updates in backward had the earlier ones. Nothing has been changed: with these set again,
                ``step()`` may be called again.
        """
        values = self._queue.values
        changed = [] if values is None else [*values.changed(groups), *["params"] * moved]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} of a parameter group changed between backward() and step(), and backward has "
                "updated weights with the earlier values (optimizer_state.update: in_backward). Change them "
                "after step() or before the last backward, or set update: at_step"
            )

    def _refuse_written(self, written: Sequence[Managed]) -> None:
        """Refuse weights that somebody else wrote to between the last backward and ``step()``.

        Raises:
            RuntimeError: some were: whether before or after their update is not known, and the step counts as failed.
        """
        if written:
            error = RuntimeError(
                f"{written[0].name} was written to between backward() and step(), and backward has updated weights "
                "(optimizer_state.update: in_backward). Write to weights after step() or before the last backward, or "
                "set update: at_step"
            )
            self._queue.abort("the update", error)
            raise error


IN_BACKWARD = UpdateTime("in_backward", early=FinalUpdates, in_backward=True, without_early=AT_STEP)
"""Each layer is updated when its gradients are complete."""

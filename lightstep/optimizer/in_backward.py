"""``update: in_backward``: each layer is updated when its gradients are complete, while backward goes on.

Nobody holds all gradients: a layer's go when its update is done. So whatever needs all of them first (the global norm
for clipping, skipping a whole step) is not to be had here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.arithmetic import GroupValues
from lightstep.optimizer.schedule import Schedule
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.precision.leaf_hooks import LeafHooks
from lightstep.state.backend import Managed, StateBackend, Unit

__all__ = ["InBackward"]

Take = Callable[[Managed], Tensor | None]
Decide = Callable[[int, Gradients, GroupValues], Update | None]


class InBackward(Schedule):
    """Units of a layer are lined up with its last gradient; a step that did not begin in backward runs in ``step()``.

    On an accelerator the stream that brings a layer's gradients waits for the update of the layer before it, so that
    the gradients of two layers are in memory at a time. The host does not wait. Small layers that a backend stages
    together are a *batch*, and are updated when all of them are complete; each is still clipped, or left out, by
    itself.
    """

    in_backward = True

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        super().__init__(walk, backend)
        self._layers: list[list[Managed]] = []
        self._items: dict[Tensor, Managed] = {}
        self._layer_of: dict[Managed, int] = {}
        self._batch_of: list[int] = []  # of each layer: the first one in its batch
        self._units_of: list[list[Unit]] = []  # of each batch, under its first layer
        self._hooks = LeafHooks()
        self._arrives: list[Callable[[Tensor], None]] = []  # called by the hooks, while a backward of ours runs
        self._decide: Decide | None = None
        self.started = False
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._incomplete: Gradients = {}
        self._newest: Tensor | None = None  # FSDP2's other gradients are found through it: they share its memory
        self._done: set[Managed] = set()
        self._touched = False
        self._left: list[int] = []  # parameters of each layer
        self._layers_left: Counter[int] = Counter()  # layers of each batch
        self._decided: dict[int, list[Update]] = {}  # of batches that wait for other layers

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
            self._lay_out(layers)
            self.started, self._decide = True, decide
            self._left = [len(layer) for layer in self._layers]
            self._layers_left = Counter(self._batch_of)
            everything = [item for layer in self._layers for item in layer]
            self._begin(everything, GroupValues(groups), self._backend.in_lanes, backwards=True)
            self._arrives.append(lambda parameter: self._collect(self._items[parameter], take))
            try:
                yield
                for batch in list(self._decided):  # some of their layers have got no gradient
                    self._run(batch)
            finally:
                self._arrives.clear()
                self._decide = None

    def _lay_out(self, layers: Sequence[Sequence[Managed]]) -> None:
        listed = [list(layer) for layer in layers]
        units = list(self._backend.units())
        if listed == self._layers and units == self._units:
            return
        self._layers, self._units = listed, units
        self._layer_of = {item: number for number, layer in enumerate(listed) for item in layer}
        self._items = {item.param: item for item in self._layer_of}
        self._hooks.carry(self._items, after=lambda _: _telling(self._arrives))
        in_unit = [sorted({self._layer_of[owner] for owner, _, _ in unit.parts}) for unit in units]
        self._batch_of = _batches(len(listed), in_unit if self._backend.in_lanes else ())
        self._units_of = [[] for _ in listed]
        for unit, layers_in_it in zip(units, in_unit, strict=True):
            for batch in dict.fromkeys(self._batch_of[number] for number in layers_in_it):
                self._units_of[batch].append(unit)

    @torch.no_grad()
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
        number = self._layer_of[item]
        self._done.add(item)
        self._incomplete[item] = self._newest = gradient
        self._left[number] -= 1
        if self._left[number] == 0:
            self._update(number)

    def _update(self, number: int) -> None:
        """All gradients of the layer are there: its batch is updated with the last of its layers."""
        layer, batch = self._layers[number], self._batch_of[number]
        gradients = {item: self._incomplete.pop(item) for item in layer if item in self._incomplete}
        assert self._decide is not None and self._values is not None
        update = self._decide(number, gradients, self._values) if gradients else None
        del gradients
        if update is not None:
            update.drop_gradients(update.elsewhere)
            self._decided.setdefault(batch, []).append(update)
        self._layers_left[batch] -= 1
        if self._layers_left[batch] == 0:
            del update
            self._run(batch)

    def _run(self, batch: int) -> None:
        """Update what is decided of it."""
        if batch not in self._decided:
            return
        self._touched = True
        before = self._lined_up
        if self._in_lane:
            self._follow_caller()
        self._line_up(reversed(self._units_of[batch]), Update.of_layers(self._decided.pop(batch)))
        self._submit(self._lined_up)
        self._wait(before - 1)

    def wait_for_update(self, items: Iterable[Managed] | None = None) -> None:
        self._wait(self._lined_up)

    def wait_on_stream(self, items: Iterable[Managed]) -> None:
        """A forward finds all done: ``step()``, and whoever comes before it, has waited."""

    def complete(self, managed: Sequence[Managed], take: Take, decide: Decide) -> None:
        """Take what is left, update layers that got no gradient for some parameter, and end the step.

        The caller's next work finds everything updated.
        """
        with self._failing_once("the update"):
            self._decide = decide
            for item in managed:
                self._collect(item, take)
            for number in reversed(range(len(self._layers))):
                if self._left[number]:
                    self._update(number)
            for batch in list(self._decided):
                self._run(batch)
            assert self._values is not None
            overflow = torch.zeros((), dtype=torch.float32, device="cpu")
            end = Update({}, None, None, overflow, self._values, [])
            end.elsewhere = [item for item in managed if item.elsewhere]
            if self._in_lane:
                self._follow_caller()
            self._line_up([None], end)
            self._submit(self._lined_up)
            self._wait(self._lined_up)
            self._end()

    def drop(self) -> None:
        """Gradients that wait for others of their layer are given up (``zero_grad``)."""
        self._incomplete.clear()

    def forget(self) -> None:
        super().forget()
        self._end()

    def _end(self) -> None:
        self.started, self._decide = False, None
        self._forget_gradients()

    def close(self) -> None:
        """Take the hooks off."""
        self._hooks.carry(())


def _batches(layers: int, in_unit: Iterable[Sequence[int]]) -> list[int]:
    """For each layer the first one of those that share units with it."""
    first = list(range(layers))
    for numbers in in_unit:
        joined = {first[number] for number in numbers}
        if len(joined) > 1:
            first = [min(joined) if own in joined else own for own in first]
    return first


def _telling(arrives: list[Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if arrives:
            arrives[0](parameter)

    return hook

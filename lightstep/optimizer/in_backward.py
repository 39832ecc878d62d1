"""``update: in_backward``: each layer is updated when its gradients are complete, while backward goes on.

Nobody holds all gradients: a layer's go when its update is done. So whatever needs all of them first (the global norm
for clipping, skipping a whole step) is not to be had here.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.arithmetic import GroupValues
from lightstep.optimizer.updates import AtStep
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.state.backend import Managed, StateBackend, Unit

__all__ = ["InBackward"]

Take = Callable[[Managed], Tensor | None]
Decide = Callable[[int, Gradients, GroupValues], Update | None]


class InBackward(AtStep):
    """Updates of a step that has begun in backward; one that has not is done as a whole, in ``step()``.

    On an accelerator the stream that brings a layer's gradients waits for the update of the layer before it, so that
    the gradients of two layers are in memory at a time. The host does not wait.
    """

    in_backward = True

    def __init__(self, walk: UnitWalk, backend: StateBackend) -> None:
        super().__init__(walk, backend)
        self._layers: list[list[Managed]] = []
        self._layer_of: dict[Managed, int] = {}
        self._units: list[list[Unit]] = []
        self._events: dict[int, Any] = {}
        self._ready: Any = None
        self._forget()

    def _forget(self) -> None:
        self._values: GroupValues | None = None
        self._take: Take | None = None
        self._decide: Decide | None = None
        self._waiting: Gradients = {}
        self._newest: Tensor | None = None  # FSDP2's other gradients are found through it: they share its memory
        self._done: set[Managed] = set()
        self._touched = False
        self._left: list[int] = []
        self._outstanding: deque[tuple[Any, Update]] = deque()

    @property
    def started(self) -> bool:
        """Whether this step's updates have begun."""
        return self._values is not None

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
        with self._guarded("the backward in which layers are updated"):
            self.begin(layers, GroupValues(groups), take, decide)
            with self._listening():
                yield

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """After an error in here some layers are updated and others are not."""
        try:
            yield
        except BaseException as error:
            broken = self._walk.broken
            if self._touched and not broken:
                broken.note(what, error)
            self._abandon()
            raise

    def begin(self, layers: Sequence[Sequence[Managed]], values: GroupValues, take: Take, decide: Decide) -> None:
        """The first part of :meth:`running`."""
        self._lay_out(layers)
        everything = [item for layer in self._layers for item in layer]
        self._values, self._take, self._decide = values, take, decide
        self._left = [len(layer) for layer in self._layers]
        self._in_lane(partial(self._walk.begin, everything, True))

    def _lay_out(self, layers: Sequence[Sequence[Managed]]) -> None:
        listed = [list(layer) for layer in layers]
        units = list(self._backend.units())
        if listed == self._layers and [u for own in self._units for u in own] == units:
            return
        self._layers = listed
        self._layer_of = {item: number for number, layer in enumerate(listed) for item in layer}
        self._units = [[] for _ in listed]
        for unit in units:
            for number in dict.fromkeys(self._layer_of[owner] for owner, _, _ in unit.parts):
                self._units[number].append(unit)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Gradients are collected as a backward in here completes them."""
        trained = [item for layer in self._layers for item in layer if item.param.requires_grad]
        hooks = [item.param.register_post_accumulate_grad_hook(_told(self._collect, item)) for item in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _collect(self, item: Managed) -> None:
        assert self._take is not None
        gradient = self._take(item)
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
        self._waiting[item] = self._newest = gradient
        self._left[number] -= 1
        if self._left[number] == 0:
            self._update(number)

    def _update(self, number: int) -> None:
        layer = self._layers[number]
        gradients = {item: self._waiting.pop(item) for item in layer if item in self._waiting}
        assert self._decide is not None and self._values is not None
        update = self._decide(number, gradients, self._values) if gradients else None
        if update is None:
            return
        self._touched = True
        update.drop_gradients(update.elsewhere)
        units = list(reversed(self._units[number]))
        del gradients
        if not self._backend.in_lanes:
            self._carry_out(units, update)
            return
        self._in_lane(partial(self._carry_out, units, update))
        lanes = self._backend.lanes
        if number not in self._events:
            self._events[number] = lanes.event()
        self._outstanding.append((lanes.compute.record(self._events[number]), update))
        self._wait_until(1)

    def _carry_out(self, units: Sequence[Unit], update: Update) -> None:
        for unit in units:
            self._walk.unit(unit, update)

    def _wait_until(self, left: int) -> None:
        """The caller waits for all updates but the last few; their gradients are given up, in the caller's order."""
        while len(self._outstanding) > left:
            done, update = self._outstanding[0]
            self._backend.lanes.caller().wait(done)
            self._outstanding.popleft()  # not before: an interrupt while waiting would lose it
            update.gradients.clear()

    def _in_lane(self, job: Callable[[], None]) -> None:
        """In the compute lane behind the caller's work so far; without lanes here and now."""
        if not self._backend.in_lanes:
            job()
            return
        lanes = self._backend.lanes
        if self._ready is None:
            self._ready = lanes.event()
        lanes.compute.wait(lanes.caller().record(self._ready))
        lanes.compute.run(job)

    def land(self, items: Iterable[Managed] | None = None) -> None:
        self._wait_until(0)

    def complete(self, managed: Sequence[Managed]) -> None:
        """Take what is left, update layers that got no gradient for some parameter, and end the step.

        The caller's next work finds everything updated.
        """
        with self._guarded("the update"):
            self._complete(managed)

    def _complete(self, managed: Sequence[Managed]) -> None:
        for item in managed:
            self._collect(item)
        for number in reversed(range(len(self._layers))):
            if self._left[number]:
                self._update(number)
        self._in_lane(partial(self._walk.finish, [item for item in managed if item.elsewhere]))
        if self._backend.in_lanes:
            lanes = self._backend.lanes
            if -1 not in self._events:
                self._events[-1] = lanes.event()
            lanes.caller().wait(lanes.compute.record(self._events[-1]))
        self._wait_until(0)
        assert self._values is not None
        self._values.give_back()
        self._forget()

    def drop(self) -> None:
        """Gradients that wait for others of their layer are given up (``zero_grad``)."""
        self._waiting.clear()

    def _abandon(self) -> None:
        """The step broke off."""
        if self._backend.in_lanes:
            self._backend.lanes.compute.synchronize()
        self._forget()
        self._backend.abandon()


def _told(take: Callable[[Managed], None], item: Managed) -> Callable[[Tensor], None]:
    return lambda _: take(item)

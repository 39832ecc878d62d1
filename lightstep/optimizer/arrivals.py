"""Layers whose gradients arrive while backward runs, and the units that are updated with each."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightstep.precision.leaf_hooks import LeafHooks
from lightstep.state.backend import Managed, Unit

__all__ = ["Arrivals"]

Take = Callable[[Managed], Tensor | None]


class Arrivals:
    """Counts gradients as they arrive, layer by layer.

    Small layers that a backend stages together are a *batch*, and are updated when all of them are complete.

    Attributes:
        layers: the parameters that are complete together, in the order of the model.
    """

    def __init__(self) -> None:
        self.layers: list[list[Managed]] = []
        self._units: list[Unit] = []
        self._items: dict[Tensor, Managed] = {}
        self._layer_of: dict[Managed, int] = {}
        self._batch_of: list[int] = []  # of each layer: the first one in its batch
        self._units_of: list[list[Unit]] = []  # of each batch, under its first layer
        self._hooks = LeafHooks()
        self._hooked = False  # for these layers
        self._listeners: list[Callable[[Tensor], None]] = []  # called by the hooks, while a backward of ours runs
        self._left: list[int] = []  # parameters of each layer
        self._layers_left: Counter[int] = Counter()  # layers of each batch
        self._completed: list[int] = []  # batches, in the order of this backward
        self._completed_before: list[int] = []  # of the one before it

    def lay_out(self, layers: Sequence[Sequence[Managed]], units: Sequence[Unit], together: bool) -> None:
        """Which layers there are; ``together``: those that share a unit are a batch."""
        listed = [list(layer) for layer in layers]
        if listed != self.layers or list(units) != self._units:
            self.layers, self._units = listed, list(units)
            self._layer_of = {item: number for number, layer in enumerate(listed) for item in layer}
            self._items = {item.param: item for item in self._layer_of}
            self._hooked = False
            in_unit = [sorted({self._layer_of[owner] for owner, _, _ in unit.parts}) for unit in units]
            self._batch_of = _batches(len(listed), in_unit if together else ())
            self._units_of = [[] for _ in listed]
            self._completed, self._completed_before = [], []
            for unit, layers_in_it in zip(units, in_unit, strict=True):
                for batch in dict.fromkeys(self._batch_of[number] for number in layers_in_it):
                    self._units_of[batch].append(unit)
        self.await_gradients(frozenset())

    def await_gradients(self, absent: Collection[Managed]) -> None:
        """A backward begins; of those that are ``absent`` no gradient is expected."""
        if self._completed:
            self._completed_before, self._completed = self._completed, []
        self._left = [sum(item not in absent for item in layer) for layer in self.layers]
        self._layers_left = Counter(batch for batch, left in zip(self._batch_of, self._left, strict=True) if left)

    @contextlib.contextmanager
    def listening(self, arrive: Callable[[Managed], None]) -> Iterator[None]:
        """``arrive`` is called with each parameter when autograd is done with its gradient."""
        if not self._hooked:
            self._hooks.carry(self._items, after=lambda _: _telling(self._listeners))
            self._hooked = True
        self._listeners.append(torch.no_grad()(lambda parameter: arrive(self._items[parameter])))
        try:
            yield
        finally:
            self._listeners.clear()

    def number_of(self, item: Managed) -> int:
        """Of its layer."""
        return self._layer_of[item]

    def batch_of(self, number: int) -> int:
        """Of a layer."""
        return self._batch_of[number]

    def units_of(self, batch: int) -> list[Unit]:
        """In the order of the model."""
        return self._units_of[batch]

    def in_order(self) -> list[Unit]:
        """All units in the order in which this backward will complete them: that of the one before it.

        The reversed order of the model, which the first one goes by, is not always that: the parameters outside of
        FSDP2's blocks come at the end of backward, in the order of the model.
        """
        batches = dict.fromkeys([*self._completed_before, *reversed(range(len(self.layers)))])
        return list(dict.fromkeys(unit for batch in batches for unit in reversed(self._units_of[batch])))

    def complete_last(self) -> list[Unit]:
        """The units of the layers that this backward will complete at its very end and a forward needs first, in the
        order of their use: an embedding, what FSDP2 reduces with the outermost module.

        What is complete at one time comes in the order of the model, unlike all before it.
        """
        completed = self._completed_before or list(reversed(range(len(self.layers))))
        used = dict.fromkeys(self.batch_of(self.number_of(unit.parts[0][0])) for unit in self._units)
        first = [batch for batch in used if batch in completed]
        last = [batch for batch in completed if batch in used]
        count = next((n for n in range(len(first), 0, -1) if first[:n] == last[-n:]), 0)
        return list(dict.fromkeys(unit for batch in first[:count] for unit in self._units_of[batch]))

    def is_last(self, number: int) -> bool:
        """Counts one gradient of a layer; whether it was the last that was missing."""
        self._left[number] -= 1
        return self._left[number] == 0

    def is_complete(self, number: int) -> bool:
        """Whether all gradients of a layer were counted."""
        return self._left[number] <= 0

    def is_last_of_batch(self, number: int) -> bool:
        """Counts a complete layer; whether it was the last that its batch was waiting for."""
        batch = self._batch_of[number]
        self._layers_left[batch] -= 1
        if self._layers_left[batch] != 0:
            return False
        self._completed.append(batch)
        return True

    def forget(self) -> None:
        """Nothing is waited for."""
        self._left, self._layers_left = [], Counter()

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


def _telling(listeners: list[Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if listeners:
            listeners[0](parameter)

    return hook

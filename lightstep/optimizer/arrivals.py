"""Layers whose gradients arrive during backward, and the units to update when each layer is complete."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightstep.precision.gradients import LeafHooks
from lightstep.state.schema import Managed, Unit

__all__ = ["Arrivals"]


class Arrivals:
    """Counts gradients as they arrive, layer by layer.

    Layers that share a unit (small layers that a backend stages together) form a *batch*. A batch is updated when all
    of its layers are complete. A batch has the index of its first layer.

    Attributes:
        layers: the parameters of each layer, in the order of the model.
        layer_of: the layer of each parameter.
        batch_of: the batch of each layer.
        units_of: the units of each batch, in the order of the model; none for a layer that is not the first of its
            batch.
        completed: batches, in the order in which this backward has completed them.
        previously_completed: the same for the backward before.
        changes: how often layers or units were others than before, or were completed in another order.
    """

    def __init__(self) -> None:
        self.layers: list[list[Managed]] = []
        self._units: list[Unit] = []
        self._items: dict[int, Managed] = {}  # by the parameter's id: hashing a tensor is slower
        self.layer_of: dict[Managed, int] = {}
        self.batch_of: list[int] = []
        self.units_of: list[list[Unit]] = []
        self._hooks = LeafHooks()
        self._hooked = False  # the hooks are on the parameters of these layers
        self._listeners: list[tuple[dict[int, Managed], Callable[[Managed], None]]] = []
        """What the hooks look up, and call; empty outside of `listening`."""
        self._missing: list[int] = []  # gradients missing, by layer
        self._missing_layers: Counter[int] = Counter()  # incomplete layers, by batch
        self._all_missing: tuple[list[int], Counter[int], frozenset[Managed]] = [], Counter(), frozenset()
        """Both before the first gradient, and the parameters for which no gradient is expected."""
        self.changes = 0
        self._newest_streams: dict[torch.device, torch.Stream] = {}  # that finished the newest gradient
        self._events: dict[torch.device, torch.Event] = {}
        self.completed: list[int] = []
        self.previously_completed: list[int] = []

    def set_layers(
        self,
        layers: Sequence[Sequence[Managed]],
        units: Sequence[Unit],
        batched: bool,
        without_gradient: Iterable[Managed] = (),
    ) -> None:
        """Set the layers and units of the next backward, and start counting.

        Args:
            batched: layers that share a unit form a batch; otherwise each layer is its own batch.
            without_gradient: no gradient is expected for these parameters.
        """
        listed, missing = [list(layer) for layer in layers], frozenset(without_gradient)
        is_new = listed != self.layers or list(units) != self._units
        if is_new:
            self.layers, self._hooked = [], False  # not these yet: an interrupt would leave the rest as it was
            self.layer_of = {item: layer for layer, items in enumerate(listed) for item in items}
            self._items = {id(item.param): item for item in self.layer_of}
            in_unit = [sorted({self.layer_of[owner] for owner in unit.owners}) for unit in units]
            self.batch_of = _batches(len(listed), in_unit if batched else ())
            self.units_of = [[] for _ in listed]
            self.completed, self.previously_completed = [], []
            for unit, layers_in_unit in zip(units, in_unit, strict=True):
                for batch in dict.fromkeys(self.batch_of[layer] for layer in layers_in_unit):
                    self.units_of[batch].append(unit)
            self.changes += 1
        if is_new or missing != self._all_missing[2]:
            in_layers = [len({*layer} - missing) for layer in listed]
            incomplete = (batch for batch, count in zip(self.batch_of, in_layers, strict=True) if count)
            self._all_missing = in_layers, Counter(incomplete), missing
        if is_new:
            self.layers, self._units = listed, list(units)
        if self.completed:
            self.changes += self.completed != self.previously_completed
            self.previously_completed, self.completed = self.completed, []
        self._missing, self._missing_layers = self._all_missing[0].copy(), self._all_missing[1].copy()

    @contextlib.contextmanager
    def listening(self, on_gradient: Callable[[Managed], None]) -> Iterator[None]:
        """Call ``on_gradient`` with each parameter whose gradient autograd has finished in the body.

        If a device finishes gradients on several streams, each first waits for the one before it. So what
        ``on_gradient`` queues comes behind all gradients that it has been called with.
        """
        if not self._hooked:
            parameters = [item.param for item in self._items.values()]
            self._hooks.set_parameters(parameters, after=_make_hook(self._listeners))
            self._hooked = True
        self._hooks.restore()
        self._hooks.put_last()
        self._newest_streams.clear()

        def after_other_streams(item: Managed) -> None:
            device = item.local.device
            if device.type != "cpu":
                stream = torch.accelerator.current_stream(device.index)  # quicker than with the device
                if stream != self._newest_streams.setdefault(device, stream):
                    self._wait_for_other_stream(device, stream)
            on_gradient(item)  # gradients are off: autograd calls hooks so, and FSDP2 too

        on_devices = [item for item in self._items.values() if item.local.device.type != "cpu"]
        self._listeners.append((self._items, after_other_streams if on_devices else on_gradient))
        try:
            yield
        finally:
            self._listeners.clear()

    def _wait_for_other_stream(self, device: torch.device, stream: torch.Stream) -> None:
        """This stream finishes gradients from now on: it waits for the one before it."""
        if device not in self._events:
            self._events[device] = torch.Event(device)
        self._newest_streams[device].record_event(self._events[device])
        stream.wait_event(self._events[device])
        self._newest_streams[device] = stream

    def backward_order(self) -> list[Unit]:
        """All units in the order in which a backward is expected to complete them: that of the last one.

        The first backward is expected in the reverse order of the model. That is not always right: under FSDP2 the
        parameters outside the blocks come at the end of backward, in the order of the model.
        """
        last = self.completed or self.previously_completed
        batches = dict.fromkeys([*last, *reversed(range(len(self.layers)))])
        return list(dict.fromkeys(unit for batch in batches for unit in reversed(self.units_of[batch])))

    def last_in_backward(self) -> list[Unit]:
        """The units that backward completes at its very end and the next forward needs first, in forward order.

        Examples: an embedding, or what FSDP2 reduces with the outermost module. Batches that backward completes at the
        same time arrive in the order of the model, all others in the reverse order.
        """
        completed = self.previously_completed or list(reversed(range(len(self.layers))))
        used = dict.fromkeys(self.batch_of[self.layer_of[unit.owners[0]]] for unit in self._units)
        first = [batch for batch in used if batch in completed]
        last = [batch for batch in completed if batch in used]
        count = next((n for n in range(len(first), 0, -1) if first[:n] == last[-n:]), 0)
        return list(dict.fromkeys(unit for batch in first[:count] for unit in self.units_of[batch]))

    def add_gradient(self, item: Managed, gradient: Tensor, arrived: dict[Managed, Tensor]) -> int | None:
        """Add a gradient to those that have ``arrived``; returns the layer that is complete with it."""
        layer, is_first = self.layer_of[item], item not in arrived
        arrived[item] = gradient
        self._missing[layer] -= is_first
        return layer if is_first and self._missing[layer] == 0 else None

    def is_complete(self, layer: int) -> bool:
        return self._missing[layer] <= 0

    def count_layer(self, layer: int) -> bool:
        """Count one complete layer; returns whether its batch is complete with it."""
        batch = self.batch_of[layer]
        self._missing_layers[batch] -= 1
        if self._missing_layers[batch] != 0:
            return False
        self.completed.append(batch)
        return True

    def reset(self) -> None:
        """Stop waiting for gradients."""
        self._missing, self._missing_layers = [], Counter()

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.set_parameters(())


def _batches(layers: int, in_unit: Iterable[Sequence[int]]) -> list[int]:
    """For each layer, the first of the layers that share units with it."""
    first = list(range(layers))
    for numbers in in_unit:
        joined = {first[number] for number in numbers}
        if len(joined) > 1:
            first = [min(joined) if batch in joined else batch for batch in first]
    return first


def _make_hook(listeners: list[tuple[dict[int, Managed], Callable[[Managed], None]]]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        for items, listener in listeners:
            listener(items[id(parameter)])

    return hook

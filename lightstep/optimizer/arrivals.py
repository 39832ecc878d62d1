"""Gradients that arrive in backward, and updates that use them at once.

:class:`Arrivals` knows which layers are complete, :class:`Verdict` whether the updates that used their gradients were
right, and :class:`LinkShare` how many units the link can carry meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.update import Gradients, as_row
from lightstep.precision.gradients import LeafHooks
from lightstep.precision.split import Splitter
from lightstep.state.lanes import Lane
from lightstep.state.schema import Managed, Unit
from lightstep.state.store import Store

__all__ = ["Arrivals", "LinkShare", "Verdict", "evenly_spaced"]

logger = logging.getLogger(__name__)

_COMMIT, _REDO, _DROP = range(3)
_CHANGED, _OVERRULED = 4, 8  # added to these, for :meth:`Verdict.reason`

_STEP = 0.05
"""By so much the fraction of units in backward grows at first."""
_HELD = 16
"""Backwards before more is tried again, after one that was late: with each share other units are laid out anew."""


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
        self._hooks.restore(last=True)
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


class Verdict(dict[Managed, tuple[Tensor, int]]):
    """The gradients that speculative updates use, and whether these updates were right.

    It is ``commit`` (factor and gradients are those that were assumed), ``redo`` (they are not) or ``drop`` (overflow).

    Gradients are kept with their versions: most writes increment these. Writes through ``p.grad.data``, or by kernels
    of other libraries, do not: checksums at two moments show them, whose memory is kept for all steps. Nobody else
    writes to gradients that go to the host. In place of a version they have the number of gradients that have gone
    there, including this one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._splitter: Splitter | None = None
        self._then = self._now = torch.empty(0, dtype=torch.int32, device="cpu")
        self._checked: list[Managed] = []  # with checksums
        self._code: Tensor | None = None  # 0-dim int32 on the host
        self._event: Any = None

    def reserve(self, count: int, device: torch.device) -> None:
        """Allocate memory for the checksums of ``count`` gradients."""
        if self._splitter is None or self._splitter.device != device:
            self._splitter = Splitter(device, checksums=device.type == "cpu")
            self._then = torch.empty(0, dtype=torch.int32, device=device)
        if self._then.numel() < count:
            self._then, self._now = (self._then.new_empty(count) for _ in range(2))

    def add(self, gradients: Gradients) -> list[Managed]:
        """Remember these gradients; returns the parameters whose gradients have not been used before.

        On a device the checksums are queued on the current stream.
        """
        new = [item for item in gradients if item not in self]
        staying = [item for item in new if item.home is None]
        for item in new:
            gradient, home = gradients[item], item.home
            if home is None:
                self[item] = gradient, gradient._version
            else:
                leaves_later = item.param.grad is not None
                self[item] = home.gradient(gradient.dtype), home.arrivals + leaves_later
        if staying:
            first = len(self._checked)
            self._checked += staying
            self._write([gradients[item] for item in staying], self._then[first : len(self._checked)])
        return new

    def are_in(self, gradients: Gradients) -> bool:
        """Whether these are the same tensors, with the same versions."""
        for item, (then, version) in self.items():
            if item not in gradients or (then._version if item.home is None else item.home.arrivals) != version:
                return False
            now = gradients[item]
            if now is not then and not (
                item.home is None and now.data_ptr() == then.data_ptr() and now.shape == then.shape
            ):
                return False
        return True

    def _write(self, gradients: Iterable[Tensor], out: Tensor) -> None:
        """Queue the checksums of gradients (fp32 or 16-bit) on the current stream; ``out`` has one for each."""
        codes = [g.ravel() if g.dtype.itemsize == 2 else as_row(g).view(torch.int16) for g in gradients]
        assert self._splitter is not None
        self._splitter.fingerprint_rows([(row, 0, [(0, row.shape[0])], i) for i, row in enumerate(codes)], out)

    def clear(self) -> None:
        super().clear()
        self._checked.clear()

    def compute(
        self,
        overflow: Tensor,
        factors: Sequence[tuple[Tensor | None, Tensor | None]],
        gradients: Gradients | None,
    ) -> None:
        """Queue the comparison on the current stream; nothing waits.

        Args:
            overflow: 0-dim fp32; not 0 if the step is to be dropped.
            factors: pairs of the true and the assumed factor; ``None`` is 1.
            gradients: those of the step; ``None``: none have been used.
        """
        right = overflow == 0
        for true, assumed in factors:
            if true is not None or assumed is not None:
                right = right & ((1.0 if true is None else true) == (1.0 if assumed is None else assumed))
        changed = torch.zeros_like(right)
        if gradients is not None and self._checked:
            count = len(self._checked)
            self._write([gradients[item] for item in self._checked], self._now[:count])
            changed = (self._now[:count] != self._then[:count]).any().to(right.device)
        overflowed = (overflow != 0).to(torch.int32)
        code = (~right | changed).to(torch.int32) + overflowed + _CHANGED * changed.to(torch.int32)
        if code.device.type == "cpu":
            self._code, self._event = code, None
            return
        if self._code is None or self._event is None:
            self._code = torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=True)
            self._event = torch.Event(code.device)
        self._code.copy_(code, non_blocking=True)
        self._event.record(torch.accelerator.current_stream(code.device))

    def overrule(self) -> None:
        """Another rank cannot commit: a commit becomes a redo."""
        if self.read() == "commit":
            assert self._code is not None
            self._code.fill_(_REDO + _OVERRULED)

    def read(self) -> str:
        """``commit``, ``redo`` or ``drop``; the host waits for the device."""
        assert self._code is not None
        if self._event is not None:
            self._event.synchronize()
        return {_COMMIT: "commit", _REDO: "redo", _DROP: "drop"}[int(self._code) % _CHANGED]

    def reason(self) -> str:
        """Why it is not ``commit``, once it has been read."""
        assert self._code is not None
        code = int(self._code)
        if code % _CHANGED == _DROP:
            return "overflow"
        if code & _OVERRULED:
            return "another rank cannot commit"
        return "gradients were changed after their use" if code & _CHANGED else "gradients are clipped"


class LinkShare:
    """The fraction of units to update in backward: as many as the link can carry meanwhile. The forward has the rest.

    The fraction is adapted after each backward, by how far the compute lane was behind at its end: the next forward has
    to wait for that. If the state of the last units stays on the device, the link has time until backward ends. Weights
    and gradients that rest on the host cross the same link, and the lane may be in time because backward itself waits
    for them: so what the model waited in backward counts, too. Three measurements are left out:

    - units that are complete with the very last layer: they cross the link after backward in any case;
    - the first backward, which compiles kernels and allocates memory;
    - the CPU, where time says nothing about a link. All units are updated in backward there, and nothing is measured.

    Attributes:
        device: of the lanes.
    """

    def __init__(self, backend: Store) -> None:
        self._backend = backend
        self.device = torch.device("cpu")
        self.fraction = 1.0
        self._step = _STEP
        self._marks: list[Any] = []  # events, kept for later backwards
        self._used = 0  # of them
        self._held = 0  # backwards before more is tried
        self._first = True
        self._advised = False

    @contextlib.contextmanager
    def measuring(self, lane: Lane) -> Iterator[None]:
        """A backward runs in the body; its work is queued in this lane."""
        host_weights = self._backend.host_weights
        if host_weights is not None:
            host_weights.measure_waits(begin=True)
        try:
            self.mark(lane)
            yield
            self.mark(lane)
        finally:
            if host_weights is not None:
                host_weights.measure_waits(begin=False)

    def mark(self, lane: Lane) -> None:
        """Measure when the lane gets here.

        The first mark is the beginning of backward, on the caller's stream, and the last one its end. Each batch of
        units has two in between: its gradients are complete there, and its updates are done in the compute lane.
        """
        if self._used == len(self._marks):
            self._marks.append(torch.Event(self.device, enable_timing=True))
        lane.record(self._marks[self._used])
        self._used += 1

    def adapt(self) -> None:
        """Adapt the fraction before the next backward, once all work of the last one has been waited for."""
        used, self._used = self._used, 0
        batches = used // 2 - 1
        if used % 2 or batches < 3:
            return
        begin, *pairs, end = self._marks[:used]
        ready, done = pairs[::2], pairs[1::2]
        if not (end.query() and done[-1].query()):
            return
        host_weights = self._backend.host_weights
        waited = 0.0 if host_weights is None else host_weights.waited()
        if waited is None:
            return
        if self._first:
            self._first = False
            return
        span, layer = begin.elapsed_time(end), begin.elapsed_time(ready[-1]) / batches
        last = next((n for n in range(batches - 1, 0, -1) if ready[n].elapsed_time(end) > layer / 2), 0)
        late = end.elapsed_time(done[last])
        logger.debug(
            "updated in backward: %.2f of the units; the lane was %.1f ms behind %.1f, of which the model waited %.1f",
            self.fraction,
            late,
            span,
            waited,
        )
        self._held = max(self._held - 1, 0)
        if max(late, 0.0) + waited > layer / 2:
            self._held = _HELD
            kept = (span - waited) / (span + max(late, 0.0))
            self.fraction = max(self.fraction * max(kept, 0.5), 0.05)
            self._step = _STEP
            self._advise()
        elif late < 0 and not self._held:
            self.fraction = min(self.fraction + self._step, 1.0)
            self._step = min(2 * self._step, 0.4)

    def _advise(self) -> None:
        if self._advised:
            return
        self._advised = True
        logger.info(
            "the link takes longer than backward: %.0f %% of the units are updated there, the others during the next "
            "forward. Less has to cross it with a larger optimizer_state.resident_gib",
            100 * self.fraction,
        )


def evenly_spaced(units: Sequence[Unit], fraction: float) -> list[Unit]:
    """This fraction of the units, evenly spaced. Neighbours whose weights rest on the host together stay together:
    weights and gradients of all of them cross the link for the update of one."""
    if fraction == 1:
        return list(units)
    parts = [list(part) for _, part in groupby(units, key=_what_crosses)]
    chosen = (part for n, part in enumerate(parts) if int((n + 1) * fraction + 0.5) > int(n * fraction + 0.5))
    return [unit for part in chosen for unit in part]


def _what_crosses(unit: Unit) -> int:
    home = unit.owners[0].home
    return id(unit if home is None else home.group)

"""Segments: runs of a unit's parts that the base optimizer updates as one parameter.

An element-wise optimizer class sees one flat fp32 tensor per segment. The weights of its parts are gathered into one
row, joined to masters, updated, split and scattered, each by one operation, in memory that all units share
(:class:`Staging`). A part is a segment of its own if it is large (its weight is then read and written in place), if the
class needs whole tensors, or if a flat update would not give torch's own bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.state.record import (
    History,
    Layout,
    Part,
    Record,
    Run,
    Slot,
    coded_entries,
    coded_in,
    is_record_entry,
    make_layout,
)
from lightstep.state.schema import Coded, Managed, aligned

__all__ = [
    "LARGE",
    "MasterSplitter",
    "Piece",
    "Segment",
    "Sizes",
    "Staging",
    "Views",
    "WeightRow",
    "is_own_segment",
    "segments_of",
]

_FEW = 8
"""Segments of at most so many parts are updated part by part by kernels that take several at once."""

_PLACES = 64
"""Of weights that rest on the host: a device's allocator returns few different addresses for them."""

_PLAIN = (bool, int, float, str, type(None))

_CLOSED: dict[Any, Any] = {}
"""What a segment that is not open has prepared."""

LARGE = 1 << 18
"""Parts with at least so many elements are segments of their own: gathering them would cost more than a launch."""

CPU_VECTOR = 16
"""A part whose size is not a multiple of this ends its segment on the CPU. torch's fused kernels compute the elements
after the last whole vector with other instructions, which give other bits."""


WeightRow = tuple[Tensor, int, Sequence[tuple[int, int]], int]
"""16-bit weights whose fingerprints are wanted: weights, position of the first one, ranges, and index of the first
range's fingerprint."""


Sizes = tuple[int, dict[torch.dtype, int], tuple[int, int], int]
"""Elements of masters, of gathered weights by dtype, the number and length of rows for moments, and the elements of the
largest unit."""


class MasterSplitter(Protocol):
    """Splits fp32 masters into bf16 weights and the remaining bits, and joins them; see
    ``lightstep.precision.split``."""

    def split(self, master: Tensor, weight: Tensor, low: Tensor, extra: Tensor) -> None: ...
    def join(
        self, weight: Tensor, low: Tensor, extra: Tensor, master: Tensor, magnitudes: Tensor | None = None
    ) -> None: ...
    def fingerprints(self, weight: Tensor, first: int, ranges: Any, out: Tensor) -> None: ...
    def fingerprint_rows(self, rows: Sequence[WeightRow], out: Tensor) -> None: ...
    def nbytes(self) -> int: ...
    def free(self) -> None: ...


class Staging:
    """Device memory for one unit in its flat order: joined masters, gathered weights, and fp32 copies of entries that
    are stored in a shorter dtype."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        masters, rows, (count, length), self._largest = sizes
        self.masters = torch.empty(masters, dtype=torch.float32, device=device)
        self.moments = [torch.zeros(length, dtype=torch.float32, device=device) for _ in range(count)]
        self._rows = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in rows.items() if n}
        self._numbers: WeakKeyDictionary[Part, Tensor] = WeakKeyDictionary()
        self.was_used = False  # masters were joined, or moments widened
        self._gather_rows: WeakKeyDictionary[Run, tuple[Tensor, list[Tensor], list[Tensor]]] = WeakKeyDictionary()

    def element_numbers(self, run: Run) -> Tensor | Window:
        """The positions of its elements in their whole parameters: a window for one part, a list (int32, modulo 2^32)
        for several."""
        head = run.parts[0]
        if len(run.parts) == 1:
            return self.window_of(head)
        length, known = run.stop - run.first, self._numbers.get(head)
        if known is None or known.numel() < length:
            row = torch.zeros(length, dtype=torch.int32, device="cpu")
            for part, (a, b) in zip(run.parts, run.ranges, strict=True):
                row[a:b] = part.owner.window.numbers(part.start, part.stop)
            known = self._numbers[head] = row.to(run.device)
        return known[:length]

    @staticmethod
    def window_of(part: Part) -> Window:
        """Where its elements are in their whole parameter."""
        return part.owner.window._replace(first=part.start)

    def masters_for(self, run: Run) -> Tensor:
        """The row for a run's joined masters."""
        self.was_used = True
        if self.masters.numel() < run.stop:  # for all units at once: another stream may use what would be replaced
            self.masters = torch.empty(max(run.stop, self._largest), dtype=torch.float32, device=run.device)
        return self.masters[run.first : run.stop]

    def moments_for(self, run: Run, index: int) -> Tensor:
        """The row for one of a run's widened moments."""
        self.was_used = True
        while len(self.moments) <= index:
            self.moments.append(self.masters.new_empty(0))
        if self.moments[index].numel() < run.stop:
            self.moments[index] = torch.zeros(max(run.stop, self._largest), dtype=torch.float32, device=run.device)
        return self.moments[index][run.first : run.stop]

    def gather_row(self, run: Run) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The row for a run's gathered weights, views of its parts, and of the padding between them. The row of a run
        with ``flat`` weights is those, and needs no parts."""
        place = self._gather_rows.get(run)
        if place is None and run.flat is not None:
            place = self._gather_rows[run] = run.flat, [], []
        elif place is None:
            local = run.locals[0]
            rows = self._rows.get(local.dtype)  # None if all shards of this dtype are empty
            row = local.new_empty(0) if rows is None else rows[run.first : run.stop]
            gaps = [row[b : a + aligned(b - a)] for a, b in run.ranges[:-1] if b - a != aligned(b - a)]
            place = self._gather_rows[run] = row, run.parts_of(row), gaps
        return place

    def nbytes(self) -> int:
        held = (self.masters, *self.moments, *self._rows.values(), *self._numbers.values())
        return sum(row.nbytes for row in held)

    def free(self) -> None:
        """Free the memory, for good."""
        self.masters, self._rows, self.moments = self.masters.new_empty(0), {}, []
        self._gather_rows.clear()
        self._numbers.clear()


class Views:
    """Views of a segment's fields in one slot."""

    def __init__(self, segment: Segment, slot: Slot) -> None:
        rows = segment.parts[0].block.rows(slot.buffer, segment.first, segment.stop)
        layout = segment.layout
        self._memory = slot.buffer.untyped_storage().data_ptr()
        self.low, self.master = rows.get("low half"), rows.get("master")
        self.extra = rows.get(layout.carrier or "bitmap")  # not used if the carrier is coded
        self.entries: dict[str, Tensor] = {}
        self.coded: dict[str, Coded] = {}
        for entry in layout.entries:
            if entry.codec is not None:
                self.coded[entry.key] = coded_in(rows, entry)
            else:
                row = rows[entry.key]
                self.entries[entry.key] = row if entry.shape is not None else row.view(segment.shape)
        self.masters = [] if self.master is None else segment.parts_of(self.master)
        self.prepared: dict[Any, Any] = {}

    def share_memory_with(self, value: Any) -> bool:
        """Whether a value is a tensor in the slot."""
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == self._memory


class Piece(NamedTuple):
    """Weights, masters and moments of a range of a segment, flat. Split masters are ``weight`` and ``low``; whole ones
    are ``master``. A weight without either is rounded.

    Attributes:
        number: position of its first part among the segment's parts.
        first: position of its first element in the unit.
        entries: as they are in the record: one tensor, or the planes of a codec.
        numbers: the elements' numbers in their whole parameters, if something is rounded with noise.
    """

    number: int
    first: int
    weight: Tensor | None
    low: Tensor | None
    master: Tensor | None
    entries: dict[str, Sequence[Tensor]]
    numbers: Tensor | Window | None


class Segment(Run):
    """A run of parts with one group and history, too. It is open during an update.

    Attributes:
        shape: of its master: flat, or the parameter's shape if the class needs whole tensors.
        coded: entries that the record keeps coded, and the index of the staging row in which the base optimizer has
            each in fp32.
        group: the live entry of ``optimizer.param_groups``.
        prepared: what the update has made of :meth:`pieces`, by its own keys, without a reference to segments. It is
            kept as long as the record is at the same place; nothing while the segment is closed.
        kept_values: the base optimizer's entries that are not in the record, as they were before the update.
        may_write_values: they may be written to, because the update is not rolled back.
        fingerprints: the unit's fingerprints (int32) while the segment is open; those of its parts begin at
            :attr:`index`. ``None`` if none are kept.
        fingerprinted: they are those of the present weights: there are none, the update has written them, or it has
            changed no weights.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts)
        head = parts[0]
        self.group, self.layout, self.coding = head.owner.group, head.block.layout, head.coding
        self.has_master = head.has_master
        self.shape = head.shape if head.owner.whole_tensors else (self.stop - self.first,)
        self.coded = coded_entries(head.owner)
        if len(parts) == 1 and self.locals[0].is_contiguous() and is_own_segment(head):
            self.flat = self.locals[0].view(-1)
        self._in_place_by_part = len(parts) <= _FEW and all(local.is_contiguous() for local in self.locals)
        self._views_in: WeakKeyDictionary[Slot, Views] = WeakKeyDictionary()
        self._has_homes = any(part.owner.home is not None for part in parts)
        self._views_with_weights: WeakKeyDictionary[Slot, dict[tuple[int, ...], Views]] = WeakKeyDictionary()
        self._views: Views | None = None
        self._history: History | None = None
        self.prepared: dict[Any, Any] = _CLOSED
        self.kept_values: dict[str, Any] = {}
        self.may_write_values = True
        self._values: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None
        self._staging: Staging
        self._splitter: MasterSplitter
        self._initial: Mapping[Managed, Tensor] = {}
        self._master: Tensor | None = None
        self._written = self._gathered = False
        self.fingerprints: Tensor | None = None
        self.fingerprinted = False

    @property
    def has_state(self) -> bool:
        return self.parts[0].history is not None

    def views_in(self, slot: Slot) -> Views:
        """Views of its fields in a slot that holds its record."""
        if self._has_homes:
            return self._views_by_weights(slot)
        views = self._views_in.get(slot)
        if views is None:
            views = self._views_in[slot] = Views(self, slot)
        return views

    def _views_by_weights(self, slot: Slot) -> Views:
        """The same for weights that rest on the host: what is prepared with the views has their present addresses."""
        known = self._views_with_weights.setdefault(slot, {})
        addresses = tuple([local.data_ptr() for local in self.locals])
        views = known.get(addresses)
        if views is None:
            if len(known) == _PLACES:
                known.clear()
            views = known[addresses] = Views(self, slot)
        return views

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that users have set on the parameters, the same on all of them if the class may read them."""
        return {key: value for key, value in vars(self.parts[0].owner.param).items() if key != "_is_param"}

    # -- masters

    def weights(self, staging: Staging) -> Tensor:
        """The weights in one row, in the parameters' dtype: the parameter's own memory, or a gathered copy."""
        row, parts, gaps = staging.gather_row(self)
        if parts:
            torch._foreach_copy_(parts, self.locals)
        if gaps:
            torch._foreach_zero_(gaps)
        return row

    def open(
        self,
        slot: Slot,
        staging: Staging,
        splitter: MasterSplitter,
        initial: Mapping[Managed, Tensor],
        fingerprints: Tensor | None,
        *,
        copy_history: bool = False,
    ) -> None:
        """Make masters and entries available to the base optimizer.

        Args:
            fingerprints: those of the unit's parts; ``None`` if none are kept.
            copy_history: give the base optimizer copies of the entries that are not in the record, so that the update
                can be rolled back.
        """
        self._views = views = self.views_in(slot)
        self.prepared = views.prepared
        history = self.parts[0].history
        self._master, self._written, self._gathered, self.fingerprinted = None, False, False, False
        self.fingerprints = fingerprints if self.has_master else None
        self._staging, self._splitter, self._initial = staging, splitter, initial
        self._values, self._state = None, None
        if history is not None and history.parts > len(self.parts):
            history = self._split_history(history)
        self._history, self.may_write_values = history, not copy_history
        self.kept_values = {} if history is None else history.values

    def advance(self, counted: Mapping[str, Any]) -> None:
        """These are the entries that are not in the record, and all of them."""
        self._values = dict(counted)

    @property
    def state(self) -> dict[str, Any]:
        """The base optimizer's entries while the segment is open; empty before the first update, which fills it."""
        if self._state is None:
            self._state = self._read_state()
        return self._state

    def _read_state(self) -> dict[str, Any]:
        if self._history is None:
            return {}
        assert self._views is not None, "the segment is not open"
        # The class gets tensors of its own: it may assign to their data, and the views are kept.
        entries = {key: row.detach() for key, row in self._views.entries.items()}
        for key, coded in self._views.coded.items():
            row = self._decoded_row(key)  # its signs still carry bits of masters
            coded.decode(row)
            entries[key] = row.view(self.shape)
        if self._values is None:
            self._values = self.kept_values if self.may_write_values else self._history.copy_values()
        return {key: entries[key] if key in entries else self._values[key] for key in self.parts[0].keys}

    def _decoded_row(self, key: str) -> Tensor:
        return self._staging.moments_for(self, self.coded[key])

    def _extra_bits(self, views: Views) -> Tensor:
        """The tensor with the extra bits of split masters while the segment is open."""
        carrier = self.layout.carrier
        found = self._decoded_row(carrier) if carrier is not None and carrier in views.coded else views.extra
        assert found is not None
        return found

    @property
    def master(self) -> Tensor:
        """The fp32 masters on the device while the segment is open; joined at the first access."""
        if self._master is None:
            assert self._views is not None, "the segment is not open"
            self._master = self._join_master(self._views, self._staging)
        return self._master

    def _join_master(self, views: Views, staging: Staging) -> Tensor:
        if self.coded:
            self._state = self.state  # decoded: it holds the extra bits of masters
        if self.coding == "own":
            return self.weights(staging).view(self.shape)
        if not self.has_state:
            return self._initial_master()
        if self.coding == "whole":
            assert views.master is not None
            return views.master.view(self.shape)
        flat = staging.masters_for(self)
        if self.coding == "rounded":
            return flat.copy_(self.weights(staging)).view(self.shape)
        self._splitter.join(self.weights(staging), views.low, self._extra_bits(views), flat)  # type: ignore[arg-type]
        return flat.view(self.shape)

    def pieces(self, carrier: str, by_part: bool) -> list[Piece] | None:
        """Weights, masters and moments for an update that uses neither :attr:`master` nor :attr:`state`, gathers
        weights with :meth:`gather`, and calls :meth:`written` when done.

        Args:
            carrier: the entry in whose signs that update keeps the extra bits of split masters.
            by_part: the update can take each part by itself. It does so if they are few; their weights are then updated
                in place. Otherwise there is one piece, with a gathered copy of the weights.

        Returns:
            ``None`` if those bits are somewhere else, or if the masters are not fp32.
        """
        if self.coding == "split" and self.layout.carrier != carrier:
            return None
        if self.coding == "own" and self.locals[0].dtype != torch.float32:
            return None
        if not self.gathers(by_part):
            return [self._piece(n, place, self.locals[n].view(-1)) for n, place in enumerate(self.ranges)]
        row = self._staging.gather_row(self)[0]
        return [self._piece(0, (0, self.stop - self.first), row)]

    def gathers(self, by_part: bool) -> bool:
        """Whether :meth:`pieces` has a gathered copy of the weights."""
        return self.flat is None and not (by_part and self._in_place_by_part)

    def gather(self) -> Tensor:
        """Gather the weights; the copy is written back with the segment. Returns the row, which is the same one as long
        as the memory for it is kept."""
        self._gathered = True
        return self.weights(self._staging)  # even if it is only written: an overflow leaves it as it is

    def _piece(self, number: int, place: tuple[int, int], weight: Tensor) -> Piece:
        views, (start, stop) = self._views, place
        assert views is not None, "the segment is not open"
        entries: dict[str, Sequence[Tensor]] = {key: [row.view(-1)[start:stop]] for key, row in views.entries.items()}
        numbers: Tensor | Window | None = None
        is_stochastic = self.coding == "rounded"
        for entry in self.layout.entries:
            if entry.codec is None:
                continue
            planes = zip(views.coded[entry.key].planes, entry.codec.planes, strict=True)
            entries[entry.key] = [plane[start // per : -(-stop // per)] for plane, (_, _, per) in planes]
            is_stochastic = is_stochastic or entry.codec.is_stochastic
        if is_stochastic:
            part = self.parts[number]
            whole = part.elements != stop - start  # several parts
            numbers = self._staging.element_numbers(self) if whole else self._staging.window_of(part)
        if self.coding == "own":
            return Piece(number, self.first + start, None, None, weight, entries, numbers)
        low, master = (None if row is None else row[start:stop] for row in (views.low, views.master))
        return Piece(number, self.first + start, weight, low, master, entries, numbers)

    def written(self, fingerprinted: bool) -> None:
        """The update has written weights, masters and entries of all :meth:`pieces`, and their fingerprints or not."""
        self._written, self.fingerprinted = True, fingerprinted

    def _initial_master(self) -> Tensor:
        """The weights in fp32, or the masters that were given for the first update."""
        master = self.weights(self._staging).float()
        for part, (a, b) in zip(self.parts, self.ranges, strict=True):
            if part.owner in self._initial:
                value = self._initial[part.owner]
                master[a:b].copy_(part.slice(value).reshape(-1))
                if value.device.type != "cpu":  # it is dropped before this stream has read it
                    value.record_stream(torch.accelerator.current_stream(value.device))
        return master.view(self.shape)

    def _split_history(self, shared: History) -> History:
        """A history for these parts alone, because others that share it are not updated with them."""
        shared.parts -= len(self.parts)
        own = History(shared.copy_values(), len(self.parts))
        for part in self.parts:
            part.history = own
        return own

    # -- after the update

    def update_history(self) -> dict[Part, Layout]:
        """Store the entries that are not in the record. Returns new layouts for parts whose entries do not fit."""
        if self._written:  # only values have changed
            assert self._history is not None
            values = self.kept_values if self._values is None else self._values
            self._history.values, self._history.origin = values, None
            return {}
        if self._keeps_layout():
            return {}
        schema = self.parts[0].owner.schema
        rows = {k: v for k, v in self.state.items() if is_record_entry(k, v, schema)}
        layout = make_layout(self.coding, rows, self.shape, self.parts[0].owner)
        if layout.has_own_shapes and (len(self.parts) > 1 or not self.parts[0].whole):
            key, _, shape, _ = next(layout.others())
            raise ValueError(
                f"state {key!r} of {self.parts[0].owner.name} has shape {shape} for a piece of "
                f"{self.stop - self.first} elements: this optimizer needs whole tensors; declare that in its class "
                "(whole_tensors = True)"
            )
        values = {k: v for k, v in self.state.items() if k not in rows}
        history = self.parts[0].history
        if history is None:
            history = History(values, len(self.parts))
        history.values, history.origin = values, None
        keys = tuple(self.state)
        for part in self.parts:
            part.keys, part.history = keys, history
        return {} if layout.entries == self.layout.entries else dict.fromkeys(self.parts, layout)

    def _keeps_layout(self) -> bool:
        """Store the entries that are not in the record, if all entries are laid out as before."""
        state, history = self.state, self._history
        if self._views is None or history is None or tuple(state) != self.parts[0].keys:
            return False
        others = {}
        for key, value in state.items():
            row = self._views.entries.get(key)
            if row is None and key not in self._views.coded:
                if isinstance(value, Tensor) and value.dim():
                    return False
                others[key] = value
                continue
            shape, dtype = (self.shape, torch.float32) if row is None else (row.shape, row.dtype)
            if not isinstance(value, Tensor) or value.shape != torch.Size(shape) or value.dtype != dtype:
                return False
            if row is not None and value.stride() != row.stride():
                return False
        history.values, history.origin = others, None
        return True

    def copy_out(self) -> None:
        """Copy everything out of the slot: the record is about to get another layout."""
        assert self._views is not None
        if self._written:
            for weight, updated in zip(*self._pending_weight_copies(), strict=True):
                weight.copy_(updated)
            self._written = False
        self._master = self.master.clone() if self.coding == "whole" else self.master
        for key, value in self.state.items():
            if self._views.share_memory_with(value):
                self.state[key] = value.clone()

    def rebind(self, slot: Slot) -> None:
        """Use the record's new layout in ``slot``; :meth:`write` copies the values there."""
        self.layout = self.parts[0].block.layout
        self._views = Views(self, slot)

    def write(self) -> tuple[list[Tensor], list[Tensor]]:
        """Write masters, and entries that the base optimizer has replaced, to the record; close the segment.

        Returns:
            Weights, and the tensors that remain to be copied to them.
        """
        assert self._views is not None, "the segment is not open"
        left = self._pending_weight_copies() if self._written else self._write_class(self._views)
        is_modified = self._written or self._master is not None
        has_state = self.parts[0].history is not None
        self.fingerprinted = self.fingerprinted or not (is_modified and self.has_master and has_state)
        self._state, self._views, self._master, self.prepared = {}, None, None, _CLOSED  # they refer to the slot
        return left

    def _write_class(self, views: Views) -> tuple[list[Tensor], list[Tensor]]:
        """:meth:`write` after an update by the class: it used :attr:`master` and :attr:`state`, or nothing."""
        has_entries = self.has_state and self._state is not None
        if has_entries:
            decoded = {key: self._decoded_row(key).view(self.shape) for key in views.coded}
            pairs = [(place, self.state[key]) for key, place in (views.entries | decoded).items()]
            moved = [(to, one) for to, one in pairs if one.data_ptr() != to.data_ptr()]
            # A class may exchange its entries: they are read before any is written.
            values = [one.clone() if views.share_memory_with(one) else one for _, one in moved]
            for (place, _), value in zip(moved, values, strict=True):
                place.copy_(value)
        left = self._write_master(views)
        if has_entries:
            self._encode_entries(views)
        return left

    def _write_master(self, views: Views) -> tuple[list[Tensor], list[Tensor]]:
        master = self._master
        if master is None or not self.has_state:  # the update did not use it
            return [], []
        if self.coding == "whole":
            assert views.master is not None
            if views.master.data_ptr() != master.data_ptr():  # the first update
                views.master.copy_(master.view(-1))
            return self.locals, views.masters
        row, parts, _ = self._staging.gather_row(self)
        if self.coding == "split":
            self._splitter.split(master.view(-1), row, views.low, self._extra_bits(views))  # type: ignore[arg-type]
        if self.coding == "rounded":
            self._round(master.view(-1), row)
        return (self.locals, parts) if parts else ([], [])

    def _round(self, master: Tensor, row: Tensor) -> None:
        """Round the result of the update to the weights, which do not change if the step is skipped on the device."""
        rounding = self.parts[0].owner.rounding
        assert rounding is not None
        rounding.at([row]).encode_update(master, "weight", self.state["step"], self._staging.element_numbers(self))
        torch.autograd.graph.increment_version(row)  # a kernel does not

    def _pending_weight_copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """The copies that remain after :meth:`written`: gathered weights are still in a row."""
        if not self._gathered:
            return [], []
        parts = self._staging.gather_row(self)[1]
        return (self.locals, parts) if parts else ([], [])

    def _encode_entries(self, views: Views) -> None:
        """Write coded entries to the record. Their signs may carry bits of masters."""
        for entry in self.layout.entries:
            if entry.codec is None:
                continue
            coded, value = views.coded[entry.key], self._decoded_row(entry.key)
            if entry.codec.is_stochastic:
                coded.encode_update(value, entry.key, self.state["step"], self._staging.element_numbers(self))
            else:
                coded.encode(value)

    def weight_row(self, staging: Staging) -> WeightRow:
        """The 16-bit weights, for fingerprints; after :meth:`write` or :meth:`weights`."""
        row = self.weights(staging) if self.coding == "whole" else staging.gather_row(self)[0]
        return row, self.first, self.ranges, self.index


def is_own_segment(part: Part) -> bool:
    """Whether a part must be a segment of its own: it is large, or a 16-bit parameter that is its own master, which
    torch's CPU kernels round vector by vector."""
    return part.elements >= LARGE or (part.coding == "own" and part.owner.local.dtype != torch.float32)


def segments_of(record: Record, active: Collection[Managed]) -> list[Segment]:
    """The segments of a record's active parts; the same objects as long as the same parts are active."""
    divisions: list[_Division] = record.divisions
    for known in divisions:
        if _fits(known.facts, record, active):
            return known.segments
    facts = [_facts_of(part) if part.owner in active else None for part in record.parts]
    division = _Division(facts, [Segment(run) for run in _runs(record, facts)])
    # The one before it is kept, too, unless that keeps replaced weights alive.
    record.divisions = [division, *(one for one in divisions[:1] if not any(own.outdated for own in one.segments))]
    return division.segments


class _Facts(NamedTuple):
    """What decides about a part's segment; the first three are compared by identity."""

    group: dict[str, Any]
    local: Tensor
    history: History | None
    has_its_weight: bool
    norm_group: int | None
    attributes: tuple[Any, ...]


class _Division(NamedTuple):
    """A record's segments, and the facts about its parts that they depend on; ``None``: the part is not active."""

    facts: Sequence[_Facts | None]
    segments: list[Segment]


def _facts_of(part: Part) -> _Facts:
    owner = part.owner
    attributes = _attributes_of(owner.param) if owner.reads_attributes else ()
    return _Facts(owner.group, owner.local, part.history, part.expected_weight is None, owner.norm_group, attributes)


def _fits(known: Sequence[_Facts | None], record: Record, active: Collection[Managed]) -> bool:
    """Whether the facts are still the same. This runs for every part in every step: it calls nothing."""
    for part, facts in zip(record.parts, known, strict=True):
        owner = part.owner
        if owner not in active:
            if facts is not None:
                return False
            continue
        if facts is None:
            return False
        group, local, history, has_its_weight, norm_group, attributes = facts
        if owner.group is not group or owner.local is not local or part.history is not history:
            return False
        if (part.expected_weight is None) is not has_its_weight:
            return False
        if owner.norm_group != norm_group:
            return False
        if owner.reads_attributes and _attributes_of(owner.param) != attributes:
            return False
    return True


def _attributes_of(parameter: Tensor) -> tuple[Any, ...]:
    """What is equal for parameters with the same attributes."""
    own = vars(parameter).items()
    return tuple((key, value if type(value) in _PLAIN else id(value)) for key, value in own) if own else ()


def _runs(record: Record, facts: Sequence[_Facts | None]) -> Iterator[list[Part]]:
    run: list[Part] = []
    last: _Facts | None = None
    for part, own in zip(record.parts, facts, strict=True):
        if run and not (own is not None and last is not None and _can_merge(part, own, run[-1], last)):
            yield run
            run = []
        if own is not None:
            run.append(part)
            last = own
    if run:
        yield run


def _can_merge(part: Part, facts: _Facts, last: Part, last_facts: _Facts) -> bool:
    """Whether a part can join the segment that ends with ``last``."""
    if part.owner.whole_tensors or is_own_segment(part) or is_own_segment(last) or part.block is not last.block:
        return False
    if last.owner.local.dtype != part.owner.local.dtype:
        return False
    device = part.owner.local.device.type
    if device == "cpu" and last.elements % CPU_VECTOR:
        return False
    return (
        facts.group is last_facts.group
        and facts.history is last_facts.history
        and facts.has_its_weight == last_facts.has_its_weight
        and facts.norm_group == last_facts.norm_group
        and facts.attributes == last_facts.attributes
    )

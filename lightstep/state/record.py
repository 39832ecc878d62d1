"""The record of a unit: the bytes of its state in one contiguous buffer, so that one copy moves them.

The parts of a unit have a fixed flat order. Each part starts at a multiple of ``ALIGNMENT`` elements. Gathered
weights, joined masters and scaled gradients use the same order.

Consecutive parts with equal layouts form a :class:`Block`, which the record holds field by field: ``low half or whole
master [n] | entry [n] | entry [n] … | bitmap``. With Adam-like state that is 10 bytes per bf16 parameter, 12 where
the master is whole, and 8 per fp32 parameter; moments in bf16 save 4. The record does not hold 0-dim entries
(``step``) and plain values: parts that had the same updates share those in a :class:`History`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import dense_strides
from lightstep.state.host_memory import HostSlab
from lightstep.state.schema import Codec, Coded, Managed, Schema, Unit, aligned, entry_dtype

__all__ = [
    "Block",
    "Entry",
    "ExpectedLayouts",
    "History",
    "Layout",
    "Part",
    "Record",
    "Records",
    "Run",
    "Slot",
    "coding_of",
]

_FIELD_ALIGNMENT = 16  # bytes

Coding = Literal["own", "rounded", "split", "whole"]
"""Where the master is: ``own``: it is the parameter; ``split``: its low half is in the record; ``whole``: all of it.
``rounded``: there is none between updates; the weight is widened for an update, and its result is rounded."""


def coding_of(owner: Managed) -> Coding:
    """How the master is stored on the host: that of a bf16 weight is split, because the weight is its upper half."""
    if owner.own_master:
        return "own" if owner.rounding is None else "rounded"
    return "split" if owner.local.dtype == torch.bfloat16 else "whole"


class Entry(NamedTuple):
    """One of the base optimizer's entries.

    Attributes:
        dtype: in which it is read and loaded.
        shape: ``None``: that of the parameter, in row-major order.
        codec: how it is kept; ``None``: in its dtype.
        strides: of an entry with a shape here, as ``torch.Tensor.clone`` keeps them. Sums over it depend on them.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    codec: Codec | None = None
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The fields of a part.

    Attributes:
        carrier: the entry whose sign bits hold the split masters' extra bits; ``None``: a bitmap holds them.
    """

    coding: Coding
    entries: tuple[Entry, ...]
    carrier: str | None = None

    @property
    def has_own_shapes(self) -> bool:
        """Whether an entry has another shape or other strides than the master. Such a part shares no field with
        others."""
        return any(entry.shape is not None for entry in self.entries)

    def fields(self) -> Iterator[tuple[str, torch.dtype, int]]:
        """Name, dtype and elements for each item of the fields, but for entries of other shapes."""
        if self.coding == "split":
            yield "low half", torch.int16, 1
        if self.coding == "whole":
            yield "master", torch.float32, 1
        for entry in self.entries:
            if entry.codec is not None:
                yield from ((entry.key + suffix, dtype, per) for suffix, dtype, per in entry.codec.planes)
            elif entry.shape is None:
                yield entry.key, entry.dtype, 1
        if self.coding == "split" and self.carrier is None:
            yield "bitmap", torch.uint8, 8

    def others(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]]]:
        """Name, dtype, shape and strides of the entries of other shapes or strides."""
        yield from ((one.key, one.dtype, one.shape, one.strides) for one in self.entries if one.shape is not None)

    def nbytes(self, elements: int) -> int:
        own = sum(dtype.itemsize * -(-elements // per) for _, dtype, per in self.fields())
        return own + sum(dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape, _ in self.others())


def _field_bytes(dtype: torch.dtype, size: int) -> int:
    return -(-dtype.itemsize * size // _FIELD_ALIGNMENT) * _FIELD_ALIGNMENT


def make_layout(coding: Coding, entries: Mapping[str, Tensor], shape: Sequence[int], owner: Managed) -> Layout:
    """The layout of parts of ``owner`` with entries like these; ``shape`` is that of their master."""
    kinds = tuple(_entry_like(key, value, shape, owner) for key, value in entries.items())
    return Layout(coding, kinds, _find_carrier(coding, kinds, owner.schema))


def _entry_like(key: str, value: Tensor, shape: Sequence[int], owner: Managed) -> Entry:
    codec = owner.schema[key].codec if key in coded_entries(owner) else None
    strides = dense_strides(value)
    is_row_major = strides == torch.empty(shape, device="meta").stride()
    if value.shape != torch.Size(shape) or (owner.whole_tensors and codec is None and not is_row_major):
        return Entry(key, value.dtype, tuple(value.shape), None, strides)
    if codec is None or value.dtype not in (torch.float32, codec.dtype):
        return Entry(key, value.dtype)
    return Entry(key, codec.dtype, None, codec)


def _find_carrier(coding: Coding, kinds: Iterable[Entry], schema: Schema) -> str | None:
    able = (one.key for one in kinds if one.dtype in (torch.float32, torch.bfloat16) and one.shape is None)
    if coding != "split":
        return None
    return next((key for key in able if key in schema and schema[key].never_negative), None)


class ExpectedLayouts:
    """Layouts expected from the probes at set-up: one object for all parts that are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Coding, torch.dtype], tuple[Layout, Schema]] = {}

    def layout_for(self, owner: Managed, coding: Coding) -> Layout:
        key = id(owner.schema), coding, owner.local.dtype
        if key not in self._known:
            coded, kinds = coded_entries(owner), []
            for name, spec in owner.schema.items():
                dtype = entry_dtype(spec, owner) if spec.like_parameter else None
                if dtype is not None:
                    kinds.append(Entry(name, dtype, None, spec.codec if name in coded else None))
            layout = Layout(coding, tuple(kinds), _find_carrier(coding, kinds, owner.schema))
            self._known[key] = layout, owner.schema
        return self._known[key][0]

    def record_bytes(self, owner: Managed, elements: int) -> int:
        """Bytes that a part of ``elements`` elements will take up in a record on the host."""
        return self.layout_for(owner, coding_of(owner)).nbytes(aligned(elements))


def coded_entries(owner: Managed) -> dict[str, int]:
    """The entries that a record keeps otherwise than the base optimizer has them, numbered."""
    if not owner.has_fp32_updates:
        return {}
    listed = (key for key, spec in owner.schema.items() if spec.like_parameter and spec.codec is not None)
    return {key: number for number, key in enumerate(listed)}


def is_loaded_to_record(key: str, value: Any, owner: Managed) -> bool:
    """:func:`is_record_entry` for an entry that is loaded: that of a 0-dim parameter is 0-dim, and had one dimension
    in the updates of an element-wise class. It may be one that the first update does not make."""
    spec = owner.schema.get(key)
    is_new = isinstance(value, Tensor) and (spec is None or spec.dtype is None)
    may_be_like_it = not owner.local.dim() and not owner.whole_tensors
    return (is_new and may_be_like_it) or is_record_entry(key, value, owner.schema)


def is_record_entry(key: str, value: Any, schema: Schema) -> bool:
    """Whether an entry belongs in the record. A 0-dim tensor does only if the parameter is 0-dim."""
    if not isinstance(value, Tensor):
        return False
    return value.dim() > 0 or (key in schema and schema[key].like_parameter)


class History:
    """The entries that are not in the record, shared by all parts that had the same updates.

    Attributes:
        parts: the number of parts that share it.
        origin: the values that were loaded, until an update changes them. Parts that load equal values share it.
    """

    def __init__(self, values: dict[str, Any], parts: int, origin: object = None) -> None:
        self.values, self.parts, self.origin = values, parts, origin

    def copy_values(self) -> dict[str, Any]:
        """The values, independent of the other parts'."""
        return {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in self.values.items()}


@dataclass(eq=False)
class Part:
    """A parameter in one unit, or a contiguous range of one.

    Attributes:
        index, first: its position among the unit's parts, and its first element in the flat order.
        coding: how its master is stored.
        elements: their number.
        whole: it is all of the parameter.
        keys: names of the base optimizer's entries, in its order.
        history: the entries that are not in the record; ``None`` while the part has no state. Its master is the
            parameter itself then, and the record's bytes for it are undefined.
        expected_weight: the 16-bit weights (int16, on the host) that the record belongs to, while the parameter has
            other values because its state was loaded before the model.
    """

    owner: Managed
    start: int
    stop: int
    index: int
    first: int
    coding: Coding
    elements: int = field(init=False)
    whole: bool = field(init=False)
    block: Block = field(init=False, repr=False)
    keys: tuple[str, ...] = ()
    history: History | None = None
    expected_weight: Tensor | None = None

    def __post_init__(self) -> None:
        self.elements = self.stop - self.start
        self.whole = self.elements == self.owner.local.numel()

    def clear_state(self) -> None:
        """Remove the part's state."""
        if self.history is not None:
            self.history.parts -= 1
        self.keys, self.history, self.expected_weight = (), None, None

    @property
    def has_master(self) -> bool:
        """Whether the record has its master, or a part of it, which must follow a weight that somebody else writes."""
        return self.coding in ("split", "whole")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its master, and of the entries that have the parameter's shape."""
        return tuple(self.owner.local.shape) if self.whole else (self.elements,)

    def slice(self, tensor: Tensor) -> Tensor:
        """This part of a tensor of the parameter's local shape."""
        return tensor if self.whole else tensor.reshape(-1)[self.start : self.stop]

    def flat_weight(self) -> Tensor:
        """This part of the weight, flat; a copy if the weight is not contiguous."""
        return self.slice(self.owner.resting).contiguous().view(-1)


class Block:
    """Consecutive parts with one layout, and the offsets of their fields in the record."""

    def __init__(self, layout: Layout, parts: Sequence[Part], base: int) -> None:
        self.layout = layout  # but not the parts: they refer to the block
        self.first, self.stop = parts[0].first, parts[-1].first + aligned(parts[-1].elements)
        self._fields: dict[str, tuple[int, torch.dtype, int]] = {}
        self._others: dict[str, tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = {}
        self.base, cursor = base, base
        for name, dtype, per in layout.fields():
            self._fields[name] = cursor, dtype, per
            cursor += _field_bytes(dtype, -(-(self.stop - self.first) // per))
        for name, dtype, shape, strides in layout.others():
            self._others[name] = cursor, dtype, torch.Size(shape), strides
            cursor += _field_bytes(dtype, torch.Size(shape).numel())
        self.end = cursor

    def rows(self, buffer: Tensor, first: int, stop: int) -> dict[str, Tensor]:
        """The fields in ``buffer`` (uint8), flat, from element ``first`` of the unit to ``stop``."""
        a, b = first - self.first, stop - self.first
        found = {}
        for name, (offset, dtype, per) in self._fields.items():
            begin, end = a // per * dtype.itemsize, -(-b // per) * dtype.itemsize
            found[name] = buffer[offset + begin : offset + end].view(dtype)
        for name, (offset, dtype, shape, strides) in self._others.items():
            flat = buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype)
            found[name] = flat.as_strided(shape, strides)
        return found


def coded_in(rows: Mapping[str, Tensor], entry: Entry) -> Coded:
    """A coded entry whose fields are among ``rows``."""
    assert entry.codec is not None
    return entry.codec.at([rows[entry.key + suffix] for suffix, _, _ in entry.codec.planes])


class Run:
    """Consecutive parts of a unit that have one layout.

    Attributes:
        first, stop: its range in the unit's flat order.
        index: of its first part in the unit.
        ranges: the range of each part, counted from ``first``.
        locals: the weights of each part, in its shape.
        device: of weights, masters and entries.
        flat: the weights, if they are used where they are, and not gathered.
    """

    flat: Tensor | None = None

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.first, self.stop = parts[0].first, parts[-1].first + parts[-1].elements
        self.index = parts[0].index
        self.ranges = [(part.first - self.first, part.first - self.first + part.elements) for part in parts]
        self._known = [part.owner.local for part in parts]
        self.locals = [part.slice(local) for part, local in zip(parts, self._known, strict=True)]
        self.device = self.locals[0].device

    @property
    def outdated(self) -> bool:
        """Whether a weight has been replaced by another tensor. The run keeps the old one alive."""
        return any(part.owner.local is not known for part, known in zip(self.parts, self._known, strict=True))

    def parts_of(self, row: Tensor) -> list[Tensor]:
        """A view of each part in a row, in the part's shape."""
        return [row[a:b].view(part.shape) for (a, b), part in zip(self.ranges, self.parts, strict=True)]


class Slot:
    """Device memory that holds a record.

    Attributes:
        staged: event of the last copy into it; ``None`` if no lane copies into it.
        arriving: a lane copies the record into it, and nobody has waited for that yet.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.staged: Any = None
        self.arriving = False


class Record:
    """The state of one unit and its memory. It lives on the device (in :attr:`slot`) or on the host.

    Attributes:
        on_host: where its memory is allocated.
        has_masters: some of its parameters are not their own masters.
        slot: the device memory in which it lives; ``None`` if it lives on the host.
        slab: host memory. It is kept while the record lives on the device, if it has lived on the host before.
        host: the record in the slab (uint8).
        written_back: event of the last copy to ``host``; ``None`` before the first.
        histories: those that were loaded and not updated since, by :attr:`History.origin`.
        divisions: how :func:`~lightstep.state.segment.segments_of` has divided its parts in the last two updates that
            needed different segments.
        fingerprints: of the 16-bit weights, by part (int32, on the parameters' device). Comparing weights with them
            shows edits. ``None`` if the masters are whole; all records of a store have them, or none has.
    """

    def __init__(
        self, unit: Unit, parts: Sequence[Part], layouts: Sequence[Layout], on_host: bool, fingerprinted: bool
    ) -> None:
        self.unit, self.parts, self.on_host = unit, parts, on_host
        self.device = parts[0].owner.local.device
        self.has_masters = any(part.has_master for part in parts)
        self.slot: Slot | None = None
        self.slab: HostSlab | None = None
        self.host: Tensor | None = None
        self.written_back: Any = None
        self.histories: dict[object, History] = {}
        self.divisions: list[Any] = []
        self.fingerprints: Tensor | None = None
        if fingerprinted:
            self.fingerprints = torch.zeros(len(parts), dtype=torch.int32, device=self.device)
        self._build_blocks(layouts)

    @property
    def bytes(self) -> Tensor | None:
        """The memory in which it lives (uint8); ``None`` before :meth:`allocate`, and if it is empty on the host."""
        return self.host if self.slot is None else self.slot.buffer

    def _build_blocks(self, layouts: Sequence[Layout]) -> None:
        """Lay out the parts in blocks."""
        self.nbytes, self.divisions = 0, []
        pairs = zip(self.parts, layouts, strict=True)
        for _, run in groupby(pairs, lambda one: (one[1], one[0].index if one[1].has_own_shapes else -1)):
            parts, (layout, *_) = zip(*run, strict=True)
            block = Block(layout, parts, self.nbytes)
            self.nbytes = block.end
            for part in parts:
                part.block = block

    def relayout(self, layouts: Mapping[Part, Layout]) -> None:
        """Give parts new layouts; all other parts keep their values. Nothing may be under way."""
        if all(part.block.layout == layout for part, layout in layouts.items()):
            return
        others = [part for part in self.parts if part not in layouts and part.history and self.bytes is not None]
        kept = {part: {name: row.clone() for name, row in self.rows(part).items()} for part in others}
        self._build_blocks([layouts.get(part, part.block.layout) for part in self.parts])
        self.host = None
        if self.slot is not None:
            self.slot = self._new_slot()
        self.allocate()
        for part, rows in kept.items():
            for name, row in self.rows(part).items():
                row.copy_(rows[name])

    def allocate(self) -> None:
        """Allocate the memory if there is none."""
        if self.bytes is not None:
            return
        if self.on_host:
            self.allocate_on_host()
        else:
            self.slot = self._new_slot()

    def allocate_on_host(self) -> None:
        """Allocate host memory if there is none. A slab that is large enough is reused."""
        if self.host is not None or not self.nbytes:
            return
        if self.slab is None or self.slab.nbytes < self.nbytes:
            if self.slab is not None:
                self.slab.close()
            self.slab = HostSlab(self.nbytes, device=self.device, what=f"optimizer state of {self.unit.label}")
        self.host = self.slab.tensor(torch.uint8, self.nbytes)

    def _new_slot(self) -> Slot:
        return Slot(torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device))

    def rows(self, part: Part) -> dict[str, Tensor]:
        """The part's fields where the record lives."""
        buffer = torch.empty(0, dtype=torch.uint8, device="cpu") if self.bytes is None else self.bytes
        return part.block.rows(buffer, part.first, part.first + part.elements)

    def shadow(self) -> Record:
        """A record on the host, without parts, that refers to the same slab."""
        shadow = copy.copy(self)
        shadow.parts, shadow.histories, shadow.divisions = (), {}, []
        shadow.slot = shadow.fingerprints = None
        return shadow

    def close(self) -> None:
        """Free the memory."""
        if self.slab is not None:
            self.slab.close()
        self.slot, self.slab, self.host = None, None, None


def make_record(
    unit: Unit,
    layouts: ExpectedLayouts,
    coding: Callable[[Managed], Coding],
    large: int,
    *,
    on_host: bool,
    fingerprinted: bool,
) -> Record:
    """A record without state. Parts that can form one segment are adjacent: ordered by coding, size and group.

    Args:
        large: parts of at least so many elements are segments of their own.
        fingerprinted: keep fingerprints of the weights.
    """
    groups = {key: number for number, key in enumerate(dict.fromkeys(id(owner.group) for owner in unit.owners))}

    def order(part: tuple[Managed, int, int]) -> tuple[Any, ...]:
        owner, start, stop = part
        alone = owner.rows is not None or stop - start >= large
        return owner.own_master, alone, str(owner.local.dtype), groups[id(owner.group)]

    parts: list[Part] = []
    first = 0
    for owner, start, stop in sorted(unit.parts, key=order):
        parts.append(Part(owner, start, stop, len(parts), first, coding(owner)))
        first += aligned(stop - start)
    expected = [layouts.layout_for(part.owner, part.coding) for part in parts]
    return Record(unit, parts, expected, on_host, fingerprinted)


class Records:
    """All records of a store, and which parameter has which parts of them. Iterates over them in update order.

    Attributes:
        by_unit: the record of each unit.
        parts: of each parameter, in order.
        of_part: the record of each part.
        initial_masters: fp32 values that masters start from in their first update, where they are not the weights.
    """

    def __init__(self) -> None:
        self.by_unit: dict[Unit, Record] = {}
        self.parts: dict[Managed, list[Part]] = {}
        self.of_part: dict[Part, Record] = {}
        self.initial_masters: dict[Managed, Tensor] = {}

    def __iter__(self) -> Iterator[Record]:
        return iter(self.by_unit.values())

    def __len__(self) -> int:
        return len(self.by_unit)

    def replace(self, managed: Sequence[Managed], records: Iterable[Record]) -> list[Record]:
        """Use exactly these records, in model order; returns those that are no longer used."""
        place = {item: number for number, item in enumerate(managed)}
        listed = sorted(records, key=lambda record: place[record.unit.owners[0]])
        leaving = [record for record in self if record not in listed]
        self.by_unit, self.parts, self.of_part = {}, {}, {}
        for index, record in enumerate(listed):
            record.unit.index = index
            self.by_unit[record.unit] = record
            for part in sorted(record.parts, key=lambda part: part.start):
                self.parts.setdefault(part.owner, []).append(part)
                self.of_part[part] = record
        self.initial_masters = {item: master for item, master in self.initial_masters.items() if item in place}
        return leaving

    def unaffected_by(self, managed: Sequence[Managed]) -> list[Record]:
        """Records whose parameters, and all that share units with those, are still listed."""
        gone = set(self.parts) - set(managed)
        records = list(self)
        while True:
            hit = [record for record in records if any(part.owner in gone for part in record.parts)]
            if not hit:
                return records
            records = [record for record in records if record not in hit]
            gone |= {part.owner for record in hit for part in record.parts}

    def drop_initial_masters(self, record: Record) -> None:
        """The record has been updated: forget the initial masters of parameters that all have state now."""
        for owner in self.initial_masters.keys() & set(record.unit.owners):
            if self.parts_with_state(owner):  # its parts may be in several units
                del self.initial_masters[owner]

    def parts_with_state(self, managed: Managed) -> list[Part]:
        """The parts of a parameter; none before all of them have state."""
        parts = self.parts.get(managed, [])
        return [] if any(part.history is None for part in parts) else parts

    def of(self, managed: Managed) -> list[Record]:
        """The records with parts of a parameter."""
        return list(dict.fromkeys(self.of_part[part] for part in self.parts.get(managed, ())))

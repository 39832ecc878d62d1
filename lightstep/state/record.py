"""The record of a unit: exactly the bytes that its state needs, in one stretch, so that one copy moves it.

A unit has a flat order: its parts one behind the other, each beginning at a multiple of :data:`ALIGNMENT` elements and
staying there for good. Gathered weights, joined masters and scaled gradients stand in that order too.

Parts with equal layouts that follow each other make a :class:`Block`, in the record field after field: ``low half or
whole master [n] | entry [n] | entry [n] … | bitmap``. With Adam-like state that is 10 bytes per bf16 parameter, 12
where the master is whole and 8 per fp32 parameter, and 4 less with moments in bf16. 0-dim entries (``step``) and plain
values are not in the record: parts with one past share them in a :class:`History`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightstep.state.backend import Managed, Schema, Unit, entry_dtype, storage_dtype
from lightstep.state.host_memory import HostSlab

if TYPE_CHECKING:
    from lightstep.state.segment import Segment, Views

__all__ = ["ALIGNMENT", "Block", "ExpectedLayouts", "History", "Layout", "Part", "Record", "Slot", "coding_of"]

ALIGNMENT = 16  # elements; keeps vectorised kernels on their fast path, and bitmaps of parts on whole bytes
_FIELD_ALIGNMENT = 16  # bytes

Coding = Literal["own", "split", "whole"]
"""The master is the parameter itself; its low half is in the record; all of it is."""


def aligned(elements: int) -> int:
    """Elements that a part takes up in its unit's flat order."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def coding_of(owner: Managed) -> Coding:
    """How a master that travels is kept: bf16 weights are its upper half."""
    if owner.own_master:
        return "own"
    return "split" if owner.local.dtype == torch.bfloat16 else "whole"


@dataclass(frozen=True)
class Layout:
    """The fields of a part.

    Attributes:
        entries: name, dtype and shape of the base optimizer's entries; ``None`` is the shape of the parameter.
        carrier: the entry whose signs hold the split master's extra bits; without one a bitmap holds them.
    """

    coding: Coding
    entries: tuple[tuple[str, torch.dtype, tuple[int, ...] | None], ...]
    carrier: str | None = None

    @property
    def has_own_shapes(self) -> bool:
        """Whether an entry has a shape of its own: its part shares no field with others."""
        return any(shape is not None for _, _, shape in self.entries)

    def fields(self, elements: int) -> Iterator[tuple[str, torch.dtype, int]]:
        """Name, dtype and size of each for parts that take up ``elements``."""
        if self.coding == "split":
            yield "low half", torch.int16, elements
        if self.coding == "whole":
            yield "master", torch.float32, elements
        for key, dtype, shape in self.entries:
            yield key, dtype, elements if shape is None else torch.Size(shape).numel()
        if self.coding == "split" and self.carrier is None:
            yield "bitmap", torch.uint8, -(-elements // 8)

    def nbytes(self, elements: int) -> int:
        return sum(dtype.itemsize * size for _, dtype, size in self.fields(elements))


def _field_bytes(dtype: torch.dtype, size: int) -> int:
    return -(-dtype.itemsize * size // _FIELD_ALIGNMENT) * _FIELD_ALIGNMENT


def make_layout(coding: Coding, entries: Mapping[str, Tensor], shape: Sequence[int], schema: Schema) -> Layout:
    """The layout of parts whose entries look like these; ``shape`` is that of their master."""
    kinds = tuple(_entry_field(k, v, shape, schema) for k, v in entries.items())
    return Layout(coding, kinds, _find_carrier(coding, kinds, schema))


def _entry_field(key: str, value: Tensor, shape: Sequence[int], schema: Schema) -> tuple[str, torch.dtype, Any]:
    if value.shape != torch.Size(shape):
        return key, value.dtype, tuple(value.shape)
    return key, storage_dtype(schema.get(key), value.dtype) or value.dtype, None


def _find_carrier(coding: Coding, kinds: Iterable[tuple[str, torch.dtype, Any]], schema: Schema) -> str | None:
    able = (key for key, dtype, shape in kinds if dtype in (torch.float32, torch.bfloat16) and shape is None)
    if coding != "split":
        return None
    return next((key for key in able if key in schema and schema[key].never_negative), None)


class ExpectedLayouts:
    """Layouts as far as the probe at set-up tells: the same object for parts that are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Coding, torch.dtype], tuple[Layout, Schema]] = {}

    def layout_for(self, owner: Managed, coding: Coding) -> Layout:
        key = id(owner.schema), coding, owner.local.dtype
        if key not in self._known:
            found = ((name, entry_dtype(spec, owner)) for name, spec in owner.schema.items() if spec.like_parameter)
            kinds = tuple((name, dtype, None) for name, dtype in found if dtype is not None)
            self._known[key] = Layout(coding, kinds, _find_carrier(coding, kinds, owner.schema)), owner.schema
        return self._known[key][0]

    def record_bytes(self, owner: Managed, elements: int) -> int:
        """Bytes that a part of ``elements`` elements will take up in a record that travels."""
        return self.layout_for(owner, coding_of(owner)).nbytes(aligned(elements))


def rounded_entries(owner: Managed) -> dict[str, int]:
    """The entries that a record keeps in another dtype than the base optimizer has them, numbered."""
    if owner.own_master and owner.local.dtype != torch.float32:
        return {}
    listed = (key for key, spec in owner.schema.items() if spec.like_parameter and spec.kept is not None)
    return {key: number for number, key in enumerate(listed)}


def is_record_entry(key: str, value: Any, schema: Schema) -> bool:
    """Whether an entry belongs into the record; 0-dim tensors do only for a 0-dim parameter."""
    if not isinstance(value, Tensor):
        return False
    return value.dim() > 0 or (key in schema and schema[key].like_parameter)


class History:
    """The entries that are not in the record, for all parts that had the same updates.

    Attributes:
        parts: how many share it.
        origin: what was loaded into it, until an update changes it; parts loaded with the same share again.
    """

    def __init__(self, values: dict[str, Any], parts: int, origin: object = None) -> None:
        self.values, self.parts, self.origin = values, parts, origin

    def copy_values(self) -> dict[str, Any]:
        """Nothing in it is the others'."""
        return {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in self.values.items()}


@dataclass(eq=False)
class Part:
    """A parameter, or a contiguous range of one, as it stands in one unit.

    Attributes:
        index, first: its place among the unit's parts, and its first element in their flat order.
        coding: how its master is kept.
        keys: names of the base optimizer's entries, in its order.
        history: those of them that are not in the record; ``None`` until the part has state: its master is the
            parameter itself until then, and its place in the record means nothing.
        codes: the 16-bit weights (int16, on the host) that the record belongs to, while the parameter has others: state
            was loaded before the model was.
    """

    owner: Managed
    start: int
    stop: int
    index: int
    first: int
    coding: Coding
    block: Block = field(init=False, repr=False)
    keys: tuple[str, ...] = ()
    history: History | None = None
    expected_weight: Tensor | None = None

    def clear_state(self) -> None:
        """Back to a part without state."""
        if self.history is not None:
            self.history.parts -= 1
        self.keys, self.history, self.expected_weight = (), None, None

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.elements == self.owner.local.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its master and of entries like it."""
        return tuple(self.owner.local.shape) if self.whole else (self.elements,)

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor of the parameter's local shape."""
        return tensor if self.whole else tensor.reshape(-1)[self.start : self.stop]

    def flat_weight(self) -> Tensor:
        """The parameter's part in one row: a copy where it is not so in memory."""
        return self.of(self.owner.local).contiguous().view(-1)


class Block:
    """Parts with one layout, and where their fields lie in the record."""

    def __init__(self, layout: Layout, parts: Sequence[Part], base: int) -> None:
        self.layout = layout  # and not the parts, which refer to it
        self.first, self.stop = parts[0].first, parts[-1].first + aligned(parts[-1].elements)
        self._fields: dict[str, tuple[int, torch.dtype, int]] = {}
        self.base, cursor = base, base
        for name, dtype, size in layout.fields(self.stop - self.first):
            self._fields[name] = cursor, dtype, size
            cursor += _field_bytes(dtype, size)
        self.end = cursor

    def rows(self, buffer: Tensor, first: int, stop: int) -> dict[str, Tensor]:
        """Its fields in ``buffer`` (uint8), each as one row, from element ``first`` of the unit to ``stop``."""
        shapes = {key: shape for key, _, shape in self.layout.entries if shape is not None}
        a, b = first - self.first, stop - self.first
        found = {}
        for name, (offset, dtype, size) in self._fields.items():
            row = buffer[offset : offset + size * dtype.itemsize].view(dtype)
            if name in shapes:
                found[name] = row.view(shapes[name])
            else:
                found[name] = row[a // 8 : -(-b // 8)] if name == "bitmap" else row[a:b]
        return found


class Slot:
    """Device memory that holds a record, and what segments look at in it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.views: WeakKeyDictionary[Segment, Views] = WeakKeyDictionary()


class Record:
    """The state of one unit, and the memory in which it lives: on the host in a slab, or on the device.

    Attributes:
        bytes: all of it (uint8); ``None`` before :meth:`allocate`, and without a single byte.
        written_back: event of the last copy to ``bytes``; ``None`` before the first.
        histories: those that were loaded and not updated since, by what was loaded.
    """

    def __init__(self, unit: Unit, parts: Sequence[Part], layouts: Sequence[Layout], on_host: bool) -> None:
        self.unit, self.parts, self.on_host = unit, parts, on_host
        self.device = parts[0].owner.local.device
        self.slab: HostSlab | None = None
        self.bytes: Tensor | None = None
        self.written_back: Any = None
        self.histories: dict[object, History] = {}
        self._segments: list[tuple[object, list[Segment]]] = []
        self._build_blocks(layouts)

    @property
    def elements(self) -> int:
        """Length of the flat order."""
        return self.parts[-1].first + aligned(self.parts[-1].elements)

    def segments(self, key: object, make: Callable[[], list[Segment]]) -> list[Segment]:
        """Those that were made for this ``key`` in one of the last calls, or new ones."""
        for known, segments in self._segments:
            if known == key:
                return segments
        current = [one for one in self._segments[:1] if not any(segment.outdated for segment in one[1])]
        self._segments = [(key, make()), *current]
        return self._segments[0][1]

    def _build_blocks(self, layouts: Sequence[Layout]) -> None:
        """One block behind the other."""
        self.nbytes, self._segments = 0, []
        neighbours = zip(self.parts, layouts, strict=True)
        for _, run in groupby(neighbours, lambda one: (one[1], one[0].index if one[1].has_own_shapes else -1)):
            parts, (layout, *_) = zip(*run, strict=True)
            block = Block(layout, parts, self.nbytes)
            self.nbytes = block.end
            for part in parts:
                part.block = block

    def relayout(self, layouts: Mapping[Part, Layout]) -> None:
        """Give parts new layouts and keep the bytes of all others; nothing may be under way."""
        if all(part.block.layout == layout for part, layout in layouts.items()):
            return
        others = [part for part in self.parts if part not in layouts and part.history and self.bytes is not None]
        kept = {part: {name: row.clone() for name, row in self.rows(part).items()} for part in others}
        self._build_blocks([layouts.get(part, part.block.layout) for part in self.parts])
        self.bytes = None
        self.allocate()
        for part, rows in kept.items():
            for name, row in self.rows(part).items():
                row.copy_(rows[name])

    def allocate(self) -> None:
        """Take the memory, unless it is there; a slab that is large enough is kept."""
        if self.bytes is not None or not self.nbytes:
            return
        if not self.on_host:
            self.bytes = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
            return
        if self.slab is None or self.slab.nbytes < self.nbytes:
            self.close()
            self.slab = HostSlab(self.nbytes, device=self.device, what=f"optimizer state of {self.unit.label}")
        self.bytes = self.slab.tensor(torch.uint8, self.nbytes)

    def rows(self, part: Part) -> dict[str, Tensor]:
        """The part's fields where the record lives."""
        buffer = torch.empty(0, dtype=torch.uint8, device="cpu") if self.bytes is None else self.bytes
        return part.block.rows(buffer, part.first, part.first + part.elements)

    def twin(self) -> Record:
        """One without parts that has the same memory now."""
        twin = copy.copy(self)
        twin.parts, twin.histories, twin._segments = (), {}, []
        return twin

    def close(self) -> None:
        """Give the memory back."""
        if self.slab is not None:
            self.slab.close()
        self.slab, self.bytes = None, None


def make_record(
    unit: Unit, layouts: ExpectedLayouts, coding: Callable[[Managed], Coding], large: int, *, on_host: bool = True
) -> Record:
    """A record without state. Parts that can be one segment stand together: by coding and group, small ones first.

    Args:
        large: parts of so many elements or more are updated by themselves.
    """
    groups = {key: number for number, key in enumerate(dict.fromkeys(id(owner.group) for owner, _, _ in unit.parts))}

    def order(part: tuple[Managed, int, int]) -> tuple[Any, ...]:
        owner, start, stop = part
        alone = owner.rows is not None or stop - start >= large
        return owner.own_master, alone, str(owner.local.dtype), groups[id(owner.group)]

    parts: list[Part] = []
    first = 0
    for owner, start, stop in sorted(unit.parts, key=order):
        parts.append(Part(owner, start, stop, len(parts), first, coding(owner)))
        first += aligned(stop - start)
    return Record(unit, parts, [layouts.layout_for(part.owner, part.coding) for part in parts], on_host)

"""The host record of a unit: exactly the bytes its state needs, in one stretch, so that one copy moves it.

Part after part: ``[low half or whole master | entries of the base optimizer | bitmap]``. With Adam-like state that is
10 bytes per bf16 parameter, 12 per fp16 parameter and 8 per fp32 parameter. 0-dim entries (``step``) are not in the
record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightstep.state.backend import Managed, Schema, Unit, entry_dtype
from lightstep.state.host_memory import HostSlab

__all__ = [
    "Field",
    "Layout",
    "MasterSplitter",
    "Part",
    "Record",
    "coding_of",
    "is_staged",
    "kinds_of",
    "lay_out",
    "plain_values",
    "record_bytes",
]

ALIGNMENT = 16  # bytes; keeps vectorised kernels on their fast path

Coding = Literal["own", "split", "whole"]
Kind = tuple[torch.dtype, tuple[int, ...]]


class MasterSplitter(Protocol):
    """fp32 masters as bf16 weights and what is missing, and back; see ``lightstep.precision.split``."""

    def split(self, master: Tensor, weight: Tensor, low: Tensor, extra: Tensor, mark: Tensor | None = None) -> None: ...
    def join(self, weight: Tensor, low: Tensor, extra: Tensor, master: Tensor) -> None: ...
    def fingerprint(self, weight: Tensor, out: Tensor) -> None: ...
    def nbytes(self) -> int: ...
    def free(self) -> None: ...


@dataclass(frozen=True)
class Field:
    """Where one (contiguous) tensor lies, counted from the beginning of its part."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def view(self, buffer: Tensor, base: int) -> Tensor:
        """This tensor in ``buffer`` (uint8), whose part begins at byte ``base``."""
        return buffer[base + self.offset : base + self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """The fields of one part.

    Attributes:
        entries: those of the base optimizer, by name.
        low: the master's low half (split masters).
        master: the whole fp32 master (fp16 parameters).
        carrier: the entry whose signs hold the split master's extra bits.
        bitmap: where they are when no entry can carry them.
        nbytes: of all, aligned.
    """

    entries: Mapping[str, Field]
    low: Field | None = None
    master: Field | None = None
    carrier: str | None = None
    bitmap: Field | None = None
    nbytes: int = 0

    def kinds(self) -> dict[str, Kind]:
        return {key: (entry.dtype, entry.shape) for key, entry in self.entries.items()}


@dataclass(eq=False)
class Part:
    """A parameter, or a contiguous range of one, as it stands in one unit.

    Attributes:
        layout: ``None`` until the part has state; its master is then the parameter itself.
        keys: names of the base optimizer's entries, in its order.
        values: those of them that are not in the record: 0-dim tensors and plain values, one per part.
        mark: fingerprint (0-dim int64, on the device) of the 16-bit weights that the record belongs to.
        codes: those weights (int16, on the host) while the parameter has others: loaded before the model was.
    """

    owner: Managed
    start: int
    stop: int
    mark: Tensor
    layout: Layout | None = None
    keys: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    codes: Tensor | None = None

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.elements == self.owner.local.numel()

    @property
    def coding(self) -> Coding:
        return coding_of(self.owner)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its master and of entries like it."""
        return tuple(self.owner.local.shape) if self.whole else (self.elements,)

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor of the parameter's local shape."""
        return tensor if self.whole else tensor.reshape(-1)[self.start : self.stop]

    def flat_weight(self) -> Tensor:
        """The parameter's part in one row, which kernels walk through: a copy where it is not so in memory."""
        return self.of(self.owner.local).contiguous().view(-1)

    def forget(self) -> None:
        """Back to a part without state."""
        self.layout, self.keys, self.values, self.codes = None, (), {}, None


def coding_of(owner: Managed) -> Coding:
    if owner.own_master:
        return "own"
    return "split" if owner.local.dtype == torch.bfloat16 else "whole"


def is_staged(key: str, value: Any, schema: Schema) -> bool:
    """Whether an entry belongs into the record; 0-dim tensors do only for a 0-dim parameter."""
    if not isinstance(value, Tensor):
        return False
    spec = schema.get(key)
    return value.dim() > 0 or (spec is not None and spec.like_parameter)


def kinds_of(state: Mapping[str, Any], schema: Schema) -> dict[str, Kind]:
    """Dtypes and shapes of the entries that belong into the record."""
    return {k: (v.dtype, tuple(v.shape)) for k, v in state.items() if is_staged(k, v, schema)}


def plain_values(state: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """The other entries: 0-dim tensors and plain values."""
    return {key: value for key, value in state.items() if not is_staged(key, value, schema)}


def expected_kinds(owner: Managed, shape: tuple[int, ...], schema: Schema) -> dict[str, Kind]:
    """What the record will hold for a part of this shape, as far as the probe at set-up tells."""
    return {
        key: (dtype, shape)
        for key, spec in schema.items()
        if spec.like_parameter and (dtype := entry_dtype(spec, owner)) is not None
    }


def record_bytes(owner: Managed, elements: int, schema: Schema) -> int:
    """Bytes that a part of ``elements`` elements will take up."""
    kinds = expected_kinds(owner, (elements,), schema)
    return _layout(coding_of(owner), elements, kinds, _never_negative(schema)).nbytes


def lay_out(part: Part, kinds: Mapping[str, Kind], schema: Schema, *, bits_in_signs: bool = True) -> Layout:
    """The fields of ``part`` with these entries; ``bits_in_signs=False`` keeps the extra bits in a bitmap."""
    if not part.whole:
        for key, (_, shape) in kinds.items():
            if torch.Size(shape).numel() != part.elements:
                raise ValueError(
                    f"state {key!r} of {part.owner.name} has shape {shape} for a piece of {part.elements} "
                    "elements: this optimizer needs whole tensors; let its class say so (whole_tensors = True)"
                )
    carriers = _never_negative(schema) if bits_in_signs else ()
    return _layout(part.coding, part.elements, kinds, carriers)


def _never_negative(schema: Schema) -> Collection[str]:
    return [key for key, spec in schema.items() if spec.never_negative and spec.like_parameter]


def _layout(coding: Coding, elements: int, kinds: Mapping[str, Kind], carriers: Collection[str]) -> Layout:
    cursor = 0

    def place(dtype: torch.dtype, shape: tuple[int, ...]) -> Field:
        nonlocal cursor
        placed = Field(cursor, dtype, shape)
        cursor += -(-placed.nbytes // ALIGNMENT) * ALIGNMENT
        return placed

    low = place(torch.int16, (elements,)) if coding == "split" else None
    master = place(torch.float32, (elements,)) if coding == "whole" else None
    entries = {key: place(dtype, shape) for key, (dtype, shape) in kinds.items()}
    carrier = None
    if coding == "split":
        able = (
            k for k, (dtype, shape) in kinds.items() if dtype == torch.float32 and torch.Size(shape).numel() == elements
        )
        carrier = next((key for key in able if key in carriers), None)
    bitmap = place(torch.uint8, (-(-elements // 8),)) if coding == "split" and carrier is None else None
    return Layout(entries, low, master, carrier, bitmap, cursor)


@dataclass(eq=False)
class Record:
    """The host memory of one unit.

    Attributes:
        planned: bytes it will have when every part has the state that the probe at set-up showed.
        landed: event of the last copy to the host; ``None`` before the first.
    """

    unit: Unit
    parts: Sequence[Part]
    planned: int = 0
    bases: dict[Part, int] = field(default_factory=dict)
    nbytes: int = 0
    slab: HostSlab | None = None
    bytes: Tensor | None = None
    landed: Any = None

    def arrange(self, layouts: Mapping[Part, Layout | None], device: torch.device) -> HostSlab | None:
        """Give parts new layouts and the record new, uninitialised host memory; returns the old memory."""
        self._place(layouts)
        old = self.slab
        self._take_memory(self.nbytes, device)
        return old

    def rearrange_on_host(self, layouts: Mapping[Part, Layout | None], device: torch.device) -> None:
        """:meth:`arrange` that keeps the bytes of all other parts; nothing may be under way in the lanes.

        Memory that is large enough is kept, and new memory is as large as is planned: parts are loaded one by one.
        """
        if all(part.layout == layout for part, layout in layouts.items()):
            return
        before, old, old_bytes = self.bases, self.slab, self.bytes
        self._place(layouts)
        new_memory = old is None or not self.nbytes or old.nbytes < self.nbytes
        kept = [part for part in self.parts if part not in layouts and part.layout is not None and part.layout.nbytes]
        moving = {
            part: old_bytes[before[part] :][: part.layout.nbytes].clone()
            for part in kept
            if (new_memory or before[part] != self.bases[part]) and part.layout is not None and old_bytes is not None
        }
        if new_memory:
            self._take_memory(max(self.nbytes, self.planned), device)
        self.bytes = None if self.slab is None or not self.nbytes else self.slab.tensor(torch.uint8, self.nbytes)
        for part, region in moving.items():
            assert self.bytes is not None
            self.bytes[self.bases[part] :][: region.numel()].copy_(region)
        if new_memory and old is not None:
            old.close()

    def _place(self, layouts: Mapping[Part, Layout | None]) -> None:
        """One part behind the other."""
        for part, layout in layouts.items():
            part.layout = layout
        self.bases, cursor = {}, 0
        for part in self.parts:
            self.bases[part] = cursor
            cursor += part.layout.nbytes if part.layout is not None else 0
        self.nbytes = cursor

    def _take_memory(self, size: int, device: torch.device) -> None:
        self.slab, self.bytes = None, None
        if self.nbytes:
            self.slab = HostSlab(size, device=device, what=f"optimizer state of {self.unit.label}")
            self.bytes = self.slab.tensor(torch.uint8, self.nbytes)

    def views(self, part: Part, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """The part's entries, in the record itself or in a slot that holds it."""
        assert part.layout is not None
        return {key: self.view(part, entry, buffer) for key, entry in part.layout.entries.items()}

    def view(self, part: Part, where: Field, buffer: Tensor | None = None) -> Tensor:
        """One field of the part."""
        buffer = self.bytes if buffer is None else buffer
        if buffer is None:  # a record without a single byte
            return torch.empty(where.shape, dtype=where.dtype, device="cpu")
        return where.view(buffer, self.bases[part])

    def region(self, part: Part, buffer: Tensor) -> Tensor:
        """All bytes of the part in a slot."""
        assert part.layout is not None
        return buffer[self.bases[part] :][: part.layout.nbytes]

    def extra(self, part: Part, buffer: Tensor | None = None) -> Tensor:
        """Where the split master's extra bits are: flat fp32 (signs) or uint8 (bitmap)."""
        layout = part.layout
        assert layout is not None
        if layout.carrier is not None:
            return self.view(part, layout.entries[layout.carrier], buffer).view(-1)
        assert layout.bitmap is not None
        return self.view(part, layout.bitmap, buffer)

    def close(self) -> None:
        if self.slab is not None:
            self.slab.close()
        self.slab, self.bytes, self.nbytes = None, None, 0

"""Reads and writes state in records as entries and masters of the parameter's local shape.

Works where the records live, on host or device. Nothing may be under way meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.state.record import Entry, History, Part, Record, coded_in, is_loaded_to_record, make_layout
from lightstep.state.schema import EntrySpec, adopt_entry, entry_dtype
from lightstep.state.segment import MasterSplitter

__all__ = ["Entries", "equals_rounded", "was_rounded_from"]

_PIECE = 1 << 15  # elements; torch's CPU kernels do not divide so few among threads
_CPU = torch.device("cpu")


class Entries:
    """Reads and writes parts of records.

    Args:
        splitters: the splitter of bf16 masters for each device where records live.
        allocate: returns memory for results, shaped like a tensor, in another dtype; by default new memory.
    """

    def __init__(
        self,
        splitters: Mapping[torch.device, MasterSplitter],
        allocate: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    ) -> None:
        self._splitters, self._allocate = splitters, allocate or _new

    def read(self, record: Record, part: Part) -> dict[str, Any]:
        """The part's entries and ``"master"`` (unless it is its own master).

        Tensors are live, except counters, which parts share, and entries with coded bits.
        """
        rows, layout = record.rows(part), part.block.layout
        assert part.history is not None
        entries = {entry.key: self._entry(part, rows, entry) for entry in layout.entries}
        values = part.history.copy_values()
        found = {key: entries[key] if key in entries else values[key] for key in part.keys}
        if part.coding == "whole":
            found["master"] = rows["master"].view(part.shape)
        elif part.coding == "split":
            low = rows["low half"]
            master, weight = self._allocate(low, torch.float32), self._weight(part, low.device)
            found["master"] = master.view(part.shape)
            if layout.carrier is None:
                self._splitters[low.device].join(weight, low, rows["bitmap"], master)
            else:
                carrier = entries[layout.carrier].view(-1)
                found[layout.carrier] = self._join_carrier(weight, low, carrier, master).view(part.shape)
        return found

    def _entry(self, part: Part, rows: Mapping[str, Tensor], entry: Entry) -> Tensor:
        """The entry in its shape: live, or decoded if it is kept in another dtype than it is read."""
        row = rows[entry.key]
        if entry.codec is not None and row.dtype != entry.dtype:
            row = self._allocate(row, entry.dtype)
            coded_in(rows, entry).decode(row)
        return row if entry.shape is not None else row.view(part.shape)

    def _join_carrier(self, weight: Tensor, low: Tensor, carrier: Tensor, master: Tensor) -> Tensor:
        """Join ``master``, and return the carrier without the bits in its signs."""
        splitter, found = self._splitters[low.device], self._allocate(carrier, carrier.dtype)
        if carrier.dtype == torch.float32:
            splitter.join(weight, low, carrier, master, found)
            return found
        extra = carrier.float()
        splitter.join(weight, low, extra, master)
        return found.copy_(extra)

    def read_all(
        self, parts: Sequence[Part], record_of: Mapping[Part, Record], device: torch.device | None
    ) -> dict[str, Any]:
        """:meth:`read` for a whole parameter, given its parts in order.

        Args:
            device: where what is in the records is returned; ``None``: where they live.
        """
        found = [_on(device, part, self.read(record_of[part], part)) for part in parts]
        if len(found) == 1:
            return found[0]
        head = parts[0]
        assert head.history is not None
        rows = [key for key in found[0] if key not in head.history.values]
        joined = {key: torch.cat([one[key] for one in found]).view(head.owner.local.shape) for key in rows}
        return {key: joined.get(key, value) for key, value in found[0].items()}

    def describe(self, head: Part) -> dict[str, Any]:
        """:meth:`read_all` with all tensors on the meta device, given the parameter's first part."""
        owner, history = head.owner, head.history
        assert history is not None
        described: dict[str, Any] = {
            entry.key: torch.empty(entry.shape or owner.local.shape, dtype=entry.dtype, device="meta")
            for entry in head.block.layout.entries
        }
        values = history.copy_values()
        found = {key: described[key] if key in described else values[key] for key in head.keys}
        if not owner.own_master:
            found["master"] = torch.empty(owner.local.shape, dtype=torch.float32, device="meta")
        return found

    def write(self, record: Record, part: Part, values: Mapping[str, Any], master: Tensor | None) -> None:
        """Replace the part's state by entries of the parameter's local shape. Without a master: the weight's value."""
        part.clear_state()
        if not values and master is None:
            return
        rows = {k: self._row(part, k, v) for k, v in values.items() if is_loaded_to_record(k, v, part.owner)}
        known = part.block.layout
        layout = make_layout(part.coding, rows, part.shape, part.owner)
        if any(_has_negative(part.owner.schema.get(key), value) for key, value in rows.items()):
            layout = type(layout)(layout.coding, layout.entries)  # no carrier: a checkpoint may hold any values
        if {*layout.entries} != {*known.entries} or (layout.carrier is None and known.carrier is not None):
            record.relayout({part: layout})
        record.allocate()
        places = record.rows(part)
        for entry in part.block.layout.entries:
            value = rows[entry.key]
            if entry.codec is None:
                places[entry.key].view(value.shape).copy_(value)
            else:
                own = value.to(device=places[entry.key].device, dtype=torch.float32).contiguous().view(-1)
                coded_in(places, entry).encode(own)
        part.keys = tuple(values)
        part.history = self._history(record, part, {k: v for k, v in values.items() if k not in rows})
        self.write_master(record, part, master)

    def _history(self, record: Record, part: Part, values: Mapping[str, Any]) -> History:
        """The history that other parts loaded with equal values, or a new one."""
        origin: Any = (
            part.coding,
            *((k, v.dtype, float(v)) if isinstance(v, Tensor) and not v.dim() else (k, v) for k, v in values.items()),
        )
        sharable = all(isinstance(one[-1], (int, float, str)) for one in origin[1:])
        known = record.histories.get(origin) if sharable else None
        if known is not None and known.origin == origin:
            known.parts += 1
            return known
        adopted = {k: adopt_entry(part.owner.schema.get(k), v, part.owner) for k, v in values.items()}
        history = History(adopted, 1, origin)
        if sharable:
            record.histories[origin] = history
        return history

    def write_master(self, record: Record, part: Part, master: Tensor | None) -> None:
        """Write ``master`` (local shape) to the record; without one, the weight's value."""
        part.expected_weight = None
        if not part.has_master:
            return
        rows = record.rows(part)
        device = next(iter(rows.values())).device
        weight = self._weight(part, device)
        loaded = weight.float() if master is None else part.slice(master.detach()).to(device, torch.float32).reshape(-1)
        rounded = torch.empty_like(weight)
        if part.coding == "whole":
            rows["master"].copy_(loaded)
            rounded.copy_(loaded)
        else:
            layout = part.block.layout
            entry = next((one for one in layout.entries if one.key == layout.carrier), None)
            extra = rows["bitmap"] if entry is None else rows[entry.key]
            if entry is None or entry.codec is None:
                self._splitters[device].split(loaded, rounded, rows["low half"], extra)
            else:
                extra, coded = torch.empty_like(loaded), coded_in(rows, entry)
                coded.decode(extra)
                self._splitters[device].split(loaded, rounded, rows["low half"], extra)
                coded.encode(extra)
        if record.fingerprints is not None:
            mark = torch.zeros(1, dtype=torch.int32, device=device)
            self._splitters[device].fingerprints(rounded, part.first, [(0, part.elements)], mark)
            record.fingerprints[part.index].copy_(mark[0])
            if not self._weight_is(part, rounded):
                part.expected_weight = rounded.view(torch.int16).to(_CPU)

    def was_edited(self, record: Record, part: Part) -> bool:
        """Whether somebody else wrote to the weight, which is on the host. One still to be loaded does not count."""
        known = record.fingerprints
        if part.expected_weight is not None or not part.has_master or known is None:
            return False
        found = torch.zeros(1, dtype=torch.int32, device=_CPU)
        self._splitters[_CPU].fingerprints(part.flat_weight(), part.first, [(0, part.elements)], found)
        return bool(found[0] != known[part.index])

    def awaits_weight(self, part: Part) -> bool:
        """Whether the weight still differs from the one that the loaded state belongs to."""
        if part.expected_weight is not None and self._weight_is(
            part, part.expected_weight.view(part.owner.local.dtype)
        ):
            part.expected_weight = None
        return part.expected_weight is not None

    def _weight_is(self, part: Part, rounded: Tensor) -> bool:
        """Whether the weight equals ``rounded`` (flat); if so, NaNs get the payloads of ``rounded``."""
        weight = part.flat_weight().to(rounded.device)
        same = weight.view(torch.int16) == rounded.view(torch.int16)
        if not bool((same | (weight.isnan() & rounded.isnan())).all()):
            return False
        if not bool(same.all()):
            part.slice(part.owner.resting).copy_(rounded.view(part.shape))
        return True

    def _weight(self, part: Part, device: torch.device) -> Tensor:
        """The 16-bit weight that the record belongs to, flat, on ``device``."""
        expected = None if part.expected_weight is None else part.expected_weight.view(part.owner.local.dtype)
        return (part.flat_weight() if expected is None else expected).to(device)

    def _row(self, part: Part, key: str, value: Tensor) -> Tensor:
        spec = part.owner.schema.get(key)
        dtype = None if spec is None else entry_dtype(spec, part.owner)
        # Only optimizers of whole tensors have entries of other shapes, and there `of` returns the tensor itself.
        return part.slice(value.detach()).to(dtype=dtype or value.dtype)


def _on(device: torch.device | None, part: Part, found: dict[str, Any]) -> dict[str, Any]:
    assert part.history is not None
    shared = part.history.values
    if device is None:
        return found
    return {key: value if key in shared and key != "master" else value.to(device) for key, value in found.items()}


def _new(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(like, dtype=dtype)


def _has_negative(spec: EntrySpec | None, value: Tensor) -> bool:
    return spec is not None and spec.never_negative and bool((value < 0).any())


def equals_rounded(local: Tensor, master: Tensor) -> bool:
    """Whether ``local`` is bit for bit ``master`` rounded to its dtype."""
    bits = torch.int32 if local.dtype == torch.float32 else torch.int16  # fp32: the model was cast afterwards
    codes = local.contiguous().view(bits)
    on_host = local.device.type == master.device.type == "cpu"
    if on_host and local.shape == master.shape and local.numel() > _PIECE:  # in pieces that stay in the cache
        pieces = zip(codes.view(-1).split(_PIECE), master.reshape(-1).split(_PIECE), strict=True)
        return all(torch.equal(other.to(local.dtype).view(bits), one) for one, other in pieces)
    return torch.equal(master.to(device=local.device, dtype=local.dtype).view(bits), codes)


def was_rounded_from(local: Tensor, master: Tensor) -> bool:
    """Whether ``local`` is ``master`` rounded, and ``master`` has bits that it lost."""
    return equals_rounded(local, master) and not torch.equal(master.to(local.device), local.float())

"""One unit's stay on the device: masters joined, entries handed to the base optimizer, both put back into the slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.state.backend import Piece, Schema
from lightstep.state.records import Layout, MasterSplitter, Part, Record, kinds_of, lay_out, plain_values
from lightstep.state.ring import Slot

__all__ = ["Visit", "scratch_elements"]

_ALIGNMENT = 64  # elements


def scratch_elements(parts: Sequence[Part]) -> int:
    """fp32 elements that the joined masters of these parts need."""
    return sum(_aligned(part.elements) for part in parts if part.coding == "split")


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


class _Held:
    """A part that is out for an update: what the base optimizer was given, and its entries in the slot."""

    def __init__(self, part: Part, master: Tensor, views: dict[str, Tensor]) -> None:
        state = {key: views[key] if key in views else part.values[key] for key in part.keys}
        self.part = part
        self.piece = Piece(part.owner, part.start, part.stop, master, state)
        self.views = views


class Visit:
    """A record in a slot, between ``acquire`` and ``release``. All work is queued where the caller queues its own.

    Args:
        scratch: fp32 memory for joined masters, as large as :func:`scratch_elements` says.
    """

    def __init__(self, record: Record, slot: Slot, splitter: MasterSplitter, schema: Schema, scratch: Tensor) -> None:
        self.record, self.slot = record, slot
        self._splitter, self._schema, self._scratch = splitter, schema, scratch
        self._held: list[_Held] = []

    # -- on the way in

    def bring(self, parts: Sequence[Part]) -> None:
        """Masters and entries of these parts as the base optimizer wants them."""
        cursor = 0
        for part in parts:
            master = self._master(part, cursor)
            cursor += _aligned(part.elements) if part.coding == "split" else 0
            self._held.append(_Held(part, master, self._views(part)))

    def pieces(self) -> list[Piece]:
        return [one.piece for one in self._held]

    def _views(self, part: Part) -> dict[str, Tensor]:
        return {} if part.layout is None else self.record.views(part, self.slot.buffer)

    def _master(self, part: Part, cursor: int) -> Tensor:
        """The part's fp32 master on the device; ``cursor`` is its place in the scratch."""
        weight, layout = part.of(part.owner.local), part.layout
        if part.coding == "own":
            return weight.contiguous()  # itself, but for a strided parameter
        if part.coding == "whole":
            if layout is not None and layout.master is not None:
                return self.record.view(part, layout.master, self.slot.buffer).view(part.shape)
            return weight.to(torch.float32, memory_format=torch.contiguous_format)
        master = self._scratch[cursor : cursor + part.elements]
        if layout is None:
            master.view(part.shape).copy_(weight)
        else:
            self._splitter.join(part.flat_weight(), *self._low_and_extra(part, layout), master)
        return master.view(part.shape)

    def _low_and_extra(self, part: Part, layout: Layout) -> tuple[Tensor, Tensor]:
        assert layout.low is not None
        return self.record.view(part, layout.low, self.slot.buffer), self.record.extra(part, self.slot.buffer)

    # -- on the way out

    def note(self, updated: Sequence[Piece]) -> dict[Part, Layout]:
        """Take over the plain entries of these pieces; layouts for parts whose other entries no longer fit theirs.

        That is so after a first update, and when an optimizer starts or stops keeping something.
        """
        changed = set(updated)
        outgrown = {}
        for one in self._held:
            if one.piece not in changed:
                continue
            part, state = one.part, one.piece.state
            part.keys, part.values = tuple(state), plain_values(state, self._schema)
            kinds = kinds_of(state, self._schema)
            if part.layout is None or part.layout.kinds() != kinds:
                outgrown[part] = lay_out(part, kinds, self._schema)
        return outgrown

    def lift(self) -> dict[Part, Tensor]:
        """Copy everything out of the slot, which is about to be arranged anew; returns the bytes of parts at rest."""
        held = {one.part for one in self._held}
        at_rest = [part for part in self.record.parts if part.layout is not None and part not in held]
        for one in self._held:
            for key, view in one.views.items():
                if one.piece.state.get(key) is view:
                    one.piece.state[key] = view.clone()
            if one.part.coding == "whole":
                one.piece.master = one.piece.master.clone()
        return {part: self.record.region(part, self.slot.buffer).clone() for part in at_rest}

    def settle(self, slot: Slot, at_rest: dict[Part, Tensor]) -> None:
        """After the record was arranged anew: into ``slot`` with what :meth:`lift` took out. ``send`` does the rest."""
        self.slot = slot
        for part, region in at_rest.items():
            self.record.region(part, slot.buffer).copy_(region)
        for one in self._held:
            one.views = self._views(one.part)

    def send(self) -> None:
        """Masters to weights and low halves; entries to the slot where the base optimizer has put them elsewhere."""
        for one in self._held:
            if one.part.layout is None:
                continue
            for key, view in one.views.items():
                value: Any = one.piece.state[key]
                if value is not view and value.data_ptr() != view.data_ptr():
                    view.copy_(value)
            self._write_weight(one.part, one.part.layout, one.piece.master)

    def _write_weight(self, part: Part, layout: Layout, master: Tensor) -> None:
        local = part.of(part.owner.local)
        if part.coding == "own":
            if master.data_ptr() != local.data_ptr():
                local.copy_(master)
            return
        if layout.master is not None:
            whole = self.record.view(part, layout.master, self.slot.buffer)
            if whole.data_ptr() != master.data_ptr():  # its first update
                whole.copy_(master.reshape(-1))
            local.copy_(master)
            self._splitter.fingerprint(part.flat_weight(), part.mark)
            return
        weight = part.flat_weight()
        self._splitter.split(master.view(-1), weight, *self._low_and_extra(part, layout), part.mark)
        if weight.data_ptr() != local.data_ptr():  # not contiguous: it was split into a copy
            local.copy_(weight.view(part.shape))

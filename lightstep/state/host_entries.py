"""State in host records as others want to see it: entries and masters of local shape, read, written and compared.

Nothing may be under way in the lanes while any of this is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightstep.state.backend import EntrySpec, Schema, adopt_entry, entry_dtype
from lightstep.state.records import Layout, MasterSplitter, Part, Record, is_staged, kinds_of, lay_out

__all__ = ["HostEntries"]

_CPU = torch.device("cpu")


class HostEntries:
    """Reads and writes parts of records.

    Args:
        on_host, on_device: splitters of bf16 masters.
        device: of the parameters.
    """

    def __init__(
        self, on_host: MasterSplitter, on_device: MasterSplitter, schema: Schema, device: torch.device
    ) -> None:
        self._on_host, self._on_device = on_host, on_device
        self._schema, self._device = schema, device

    def read(self, record: Record, part: Part) -> dict[str, Any]:
        """The part's entries and ``"master"`` (unless it is its own): live, except where bits are coded into them.

        A weight that somebody else wrote is the master: the next step will take it for that.
        """
        layout = part.layout
        assert layout is not None
        found: dict[str, Any] = {**part.values, **record.views(part)}
        if layout.master is not None:
            found["master"] = record.view(part, layout.master).view(part.shape)
        elif layout.low is not None:
            extra = record.extra(part).clone()  # joining clears the signs: the copy becomes the moment
            master = torch.empty(part.elements, dtype=torch.float32, device=_CPU)
            self._on_host.join(self._weight(part), record.view(part, layout.low), extra, master)
            found["master"] = master.view(part.shape)
            if layout.carrier is not None:
                found[layout.carrier] = extra.view(layout.entries[layout.carrier].shape)
        if part.coding != "own" and part.codes is None and self.differs(part):
            found["master"] = self._weight(part).float().view(part.shape)
        return found

    def write(self, record: Record, part: Part, values: Mapping[str, Any], master: Tensor | None) -> None:
        """Replace the part's state by entries of the parameter's local shape; no master: the parameter's value."""
        if not values and master is None:
            record.rearrange_on_host({part: None}, self._device)
            part.forget()
            return
        staged = {k: self._staged(part, k, v) for k, v in values.items() if is_staged(k, v, self._schema)}
        part.keys = tuple(values)
        part.values = {k: adopt_entry(self._spec(k), v, part.owner) for k, v in values.items() if k not in staged}
        signs_are_free = not any(self._is_negative(key, value) for key, value in staged.items())
        layout = lay_out(part, kinds_of(staged, self._schema), self._schema, bits_in_signs=signs_are_free)
        record.rearrange_on_host({part: layout}, self._device)
        for key, view in record.views(part).items():
            view.copy_(staged[key])
        self.write_master(record, part, layout, master)

    def write_master(self, record: Record, part: Part, layout: Layout, master: Tensor | None) -> None:
        """``master`` (local shape) into the record; without one the parameter's value."""
        part.codes = None
        if part.coding == "own":
            return
        weight = self._weight(part)
        loaded = weight.float() if master is None else part.of(master.detach()).to(_CPU, torch.float32).reshape(-1)
        rounded = torch.empty_like(weight)
        if layout.master is not None:
            record.view(part, layout.master).copy_(loaded)
            rounded.copy_(loaded)
        else:
            assert layout.low is not None
            self._on_host.split(loaded, rounded, record.view(part, layout.low), record.extra(part))
        mark = torch.zeros((), dtype=torch.int64, device=_CPU)
        self._on_host.fingerprint(rounded, mark)
        part.mark.copy_(mark)
        if not self._has(part, rounded):
            part.codes = rounded.view(torch.int16)

    def differs(self, part: Part) -> bool:
        """Whether the weight is no longer the one that the record belongs to."""
        if part.codes is not None:
            if self._has(part, part.codes.view(part.owner.local.dtype)):
                part.codes = None
            return part.codes is not None
        mark = torch.zeros_like(part.mark)
        self._on_device.fingerprint(part.flat_weight(), mark)
        return not torch.equal(mark, part.mark)

    def _has(self, part: Part, rounded: Tensor) -> bool:
        """Whether the weight is this one (flat, on the host); NaN get its payload, splitting and ``copy_`` differ."""
        weight = part.flat_weight().to(_CPU)
        same = weight.view(torch.int16) == rounded.view(torch.int16)
        if not bool((same | (weight.isnan() & rounded.isnan())).all()):
            return False
        if not bool(same.all()):
            part.of(part.owner.local).copy_(rounded.view(part.shape))
        return True

    def _weight(self, part: Part) -> Tensor:
        """The 16-bit weight that the record belongs to, flat, on the host."""
        if part.codes is not None:
            return part.codes.view(part.owner.local.dtype)
        return part.flat_weight().to(_CPU)

    def _staged(self, part: Part, key: str, value: Tensor) -> Tensor:
        spec = self._spec(key)
        dtype = None if spec is None else entry_dtype(spec, part.owner)
        # Other shapes than the parameter's are whole-tensor optimizers' own; such a part is whole.
        return part.of(value.detach()).to(device=_CPU, dtype=dtype or value.dtype)

    def _is_negative(self, key: str, value: Tensor) -> bool:
        """A checkpoint may hold second moments that no update would make."""
        spec = self._spec(key)
        return spec is not None and spec.never_negative and bool((value < 0).any())

    def _spec(self, key: str) -> EntrySpec | None:
        return self._schema.get(key)

"""State on the device as it was at one moment, copied to the host behind whatever runs next.

The copies are queued in a lane at once, record by record, and the caller goes on: forward and backward run beside them,
and only an update of a record that is still being copied waits, on the device. Another thread reads the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightstep.state.backend import Managed
from lightstep.state.kept_copies import KeptCopies
from lightstep.state.kept_records import same_rounding
from lightstep.state.lanes import Lanes
from lightstep.state.record import Record
from lightstep.state.segment import MasterSplitter

__all__ = ["DeviceSnapshot"]


class DeviceSnapshot:
    """Entries of parameters, copied to memory of ``copies``, each taken by one thread.

    Whoever is about to write to a record calls :meth:`before_write`. The memory that is copied from stays alive until
    the copies are there, also where its owner has let go of it.

    Args:
        splitter: of bf16 masters on the host, used by nobody else; ``None``: all masters are whole.
    """

    def __init__(self, copies: KeptCopies, splitter: MasterSplitter | None) -> None:
        self._room, self._splitter = copies.room, splitter
        self._carriers: dict[Tensor, str | None] = {}  # of split masters that are not joined yet
        self._entries: dict[Tensor, dict[str, Tensor]] = {}
        self._weights: dict[Tensor, Callable[[], Tensor]] = {}
        self._record_of: dict[Tensor, Record] = {}
        self._copied: dict[Record, Any] = {}  # events
        self._awaited: dict[Record, Lanes] = {}  # by whoever writes next
        self._sources: dict[Record, list[Tensor]] = {}
        self.closed = False

    def add(
        self,
        record: Record,
        entries: Mapping[Managed, Mapping[str, Tensor]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        lanes: Lanes,
    ) -> None:
        """Entries of some parameters of one record, as the caller's current stream has them.

        Args:
            entries: as :meth:`take` returns them, or with the rows of a split master, which nobody else has written to.
            weight_of: later, a copy on the host of the parameter's local weight of this moment.
        """
        lane, event = lanes.device_to_host, lanes.event()
        lane.wait(lanes.caller().record(lanes.event()))
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for item, found in entries.items():
            self._record_of[item.param] = record
            self._entries[item.param] = copies = {}
            if "master" in found or "low half" in found:
                self._weights[item.param] = weight_of(item.param)
            if "low half" in found:
                (part,) = (part for part in record.parts if part.owner is item)
                self._carriers[item.param] = part.block.layout.carrier
            for key, value in found.items():
                copies[key] = self._room(value)
                sources.append(value)
                targets.append(copies[key])
        lane.copies(targets, sources, f"copying the state of {record.unit.label}")
        self._sources[record] = sources
        self._copied[record] = lane.record(event)
        self._awaited[record] = lanes

    def before_write(self, records: Iterable[Record]) -> None:
        """What the caller does next with these finds them copied."""
        for record in records:
            lanes = self._awaited.pop(record, None)
            if lanes is not None:
                lanes.caller().wait(self._copied[record])

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._record_of

    def take(self, parameter: Tensor, key: str) -> Tensor:
        """One entry of the parameter's local shape, on the host. The master of a weight that somebody else wrote is
        the weight."""
        record = self._record_of[parameter]
        self._copied[record].synchronize()
        self._sources.pop(record, None)
        if parameter in self._carriers:
            self._join(parameter, self._carriers.pop(parameter))
        value = self._entries[parameter].pop(key)
        if key == "master" and parameter in self._weights:
            weight = self._weights.pop(parameter)()
            if not same_rounding(weight, value):
                return weight.float()
        return value

    def _join(self, parameter: Tensor, carrier: str | None) -> None:
        entries, weight = self._entries[parameter], self._weights.pop(parameter)()
        low, bits = entries.pop("low half"), entries.pop("bitmap", None)
        master = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        extra = bits if carrier is None else entries[carrier].float().view(-1)  # in its own memory if it is fp32
        assert self._splitter is not None and extra is not None
        self._splitter.join(weight.reshape(-1), low, extra, master.view(-1))
        if carrier is not None and entries[carrier].dtype != torch.float32:
            entries[carrier].view(-1).copy_(extra)
        entries["master"] = master

    def written(self, parameter: Tensor, key: str) -> None:
        """The memory is kept for the next snapshot, and there is none before this one is closed."""

    def wait(self) -> None:
        """The calling thread waits for all copies; what they were made from is let go of."""
        for event in self._copied.values():
            event.synchronize()
        self._sources.clear()

    def close(self) -> None:
        """Nobody takes anything any more."""
        try:
            self.wait()
        finally:
            self.closed = True
            self._entries, self._weights = {}, {}

"""State on the device at one moment, copied to the host in the background.

The copies are queued in a lane, record by record, and the caller goes on. Forward and backward run concurrently with
them; only the update of a record that is still being copied waits, on the device. Another thread reads the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightstep.state.backend import Managed
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.lanes import Lanes
from lightstep.state.record import Record
from lightstep.state.record_backend import equals_rounded
from lightstep.state.segment import MasterSplitter

__all__ = ["DeviceSnapshot"]


class DeviceSnapshot:
    """Entries of parameters, copied to memory of ``copies``, each of which is taken once, by one thread.

    :meth:`before_write` must be called before a record is written to. The source memory stays alive until it has been
    copied, even if its owner drops it.

    Args:
        splitter: of bf16 masters on the host, used by nobody else; ``None``: all masters are whole.
    """

    def __init__(self, copies: HostCopyPool, splitter: MasterSplitter | None) -> None:
        self._allocate, self._splitter = copies.allocate, splitter
        self._carriers: dict[Tensor, str | None] = {}  # for split masters that are not joined yet
        self._entries: dict[Tensor, dict[str, Tensor]] = {}
        self._weights: dict[Tensor, Callable[[], Tensor]] = {}
        self._record_of: dict[Tensor, Record] = {}
        self._copied: dict[Record, Any] = {}  # events
        self._awaited: dict[Record, Lanes] = {}  # records whose next write must wait for the copy
        self._sources: dict[Record, list[Tensor]] = {}
        self.closed = False

    def add(
        self,
        record: Record,
        entries: Mapping[Managed, Mapping[str, Tensor]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        lanes: Lanes,
    ) -> None:
        """Copy entries of some parameters of one record, in the order of the caller's current stream.

        Args:
            entries: as :meth:`take` is to return them, or with the rows of a split master whose weight nobody edited.
            weight_of: for a parameter, a function that returns its present local weight on the host, later.
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
                copies[key] = self._allocate(value)
                sources.append(value)
                targets.append(copies[key])
        lane.copies(targets, sources, f"copying the state of {record.unit.label}")
        self._sources[record] = sources
        self._copied[record] = lane.record(event)
        self._awaited[record] = lanes

    def before_write(self, records: Iterable[Record]) -> None:
        """Order the caller's next work after the copies of these records."""
        for record in records:
            lanes = self._awaited.pop(record, None)
            if lanes is not None:
                lanes.caller().wait(self._copied[record])

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._record_of

    def take(self, parameter: Tensor, key: str) -> Tensor:
        """One entry on the host, in the parameter's local shape. The master of a weight that somebody else wrote to is
        that weight."""
        record = self._record_of[parameter]
        self._copied[record].synchronize()
        self._sources.pop(record, None)
        if parameter in self._carriers:
            self._join(parameter, self._carriers.pop(parameter))
        value = self._entries[parameter].pop(key)
        if key == "master" and parameter in self._weights:
            weight = self._weights.pop(parameter)()
            if not equals_rounded(weight, value):
                return weight.float()
        return value

    def _join(self, parameter: Tensor, carrier: str | None) -> None:
        entries, weight = self._entries[parameter], self._weights.pop(parameter)()
        low, bits = entries.pop("low half"), entries.pop("bitmap", None)
        master = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        extra = bits if carrier is None else entries[carrier].float().view(-1)  # the entry's own memory if it is fp32
        assert self._splitter is not None and extra is not None
        self._splitter.join(weight.reshape(-1), low, extra, master.view(-1))
        if carrier is not None and entries[carrier].dtype != torch.float32:
            entries[carrier].view(-1).copy_(extra)
        entries["master"] = master

    def written(self, parameter: Tensor, key: str) -> None:
        """Nothing to do: the next snapshot reuses the memory, after this one is closed."""

    def wait(self) -> None:
        """Wait for all copies, and drop the references to their sources."""
        for event in self._copied.values():
            event.synchronize()
        self._sources.clear()

    def close(self) -> None:
        """Release everything: no entry will be taken any more."""
        try:
            self.wait()
        finally:
            self.closed = True
            self._entries, self._weights = {}, {}

"""Weights that somebody else than the optimizer has written to, found by comparing them with the records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from lightstep.state.entries import Entries, equals_rounded
from lightstep.state.record import Part, Record, Records
from lightstep.state.schema import Managed
from lightstep.state.segment import Segment, segments_of
from lightstep.state.staging import MasterSplitter, StagingOfDevices

__all__ = ["WeightComparison"]


class Compared(NamedTuple):
    """Parts of a record whose weights are compared with those that the record belongs to, and their segments."""

    record: Record
    segments: Sequence[Segment]
    parts: Sequence[Part]


class WeightComparison:
    """Compares weights with their records: by fingerprints, or whole masters by their values.

    Nothing may be under way on records that live on the device.

    Args:
        entries: reads and writes the records.
        splitters: the splitter of each device.
    """

    def __init__(
        self,
        records: Records,
        entries: Entries,
        staging: StagingOfDevices,
        splitters: Mapping[torch.device, MasterSplitter],
    ) -> None:
        self._records, self._entries = records, entries
        self._staging, self._splitters = staging, splitters

    def changed(self, items: Iterable[Managed]) -> list[Managed]:
        """The parameters that no longer equal their rounded masters, because somebody else wrote to them. May wait for
        the device."""
        wanted = dict.fromkeys(items)
        initial = [item for item in self._records.initial_masters if item in wanted]
        found = {item for item in initial if not equals_rounded(item.resting, self._records.initial_masters[item])}
        listed = self._records.by_unit.values()
        records = [one for one in listed if one.has_masters and not wanted.keys().isdisjoint(one.unit.owners)]
        compared = [self._compared_parts(record, wanted) for record in records]  # first: the next line may change it
        found.update(part.owner for record in records for part in self._overwritten_parts(record, wanted))
        if compared := [one for one in compared if one.segments]:
            found.update(part.owner for part in self._differing_parts(compared))
        return [item for item in wanted if item in found]

    def was_edited(self, part: Part) -> bool:
        """Whether somebody else wrote to the weight. A weight that is still to be loaded does not count."""
        alone = Compared(self._records.of_part[part], [Segment([part])], [part])
        return part.expected_weight is None and bool(self._differing_parts([alone]))

    def _overwritten_parts(self, record: Record, wanted: Collection[Managed]) -> list[Part]:
        """The record's parts whose weights were to be loaded, and are others now."""
        waiting = (part for part in record.parts if part.expected_weight is not None and part.owner in wanted)
        return [part for part in waiting if self._entries.awaits_weight(part)]

    def _compared_parts(self, record: Record, wanted: Collection[Managed]) -> Compared:
        """The record's parts whose weights have to be compared."""
        segments = [segment for segment in segments_of(record, wanted) if segment.has_state and segment.has_master]
        parts = [part for segment in segments for part in segment.parts if part.expected_weight is None]
        return Compared(record, segments, parts)

    def _differing_parts(self, compared: Sequence[Compared]) -> list[Part]:
        """The parts whose weights are not those that their records belong to. The host waits once for each device."""
        if compared[0].record.fingerprints is None:
            return [part for one in compared for part in self._parts_with_other_masters(one)]
        differs: dict[torch.device, list[Tensor]] = {}
        for record, segments, _ in compared:
            differs.setdefault(record.device, []).append(self._differs(record, segments))
        flags = {device: iter(torch.cat(found).tolist()) for device, found in differs.items()}
        differing = []
        for record, _, parts in compared:
            own = list(islice(flags[record.device], len(record.parts)))
            differing += [part for part in parts if own[part.index]]
        self._staging.free_unless_kept()
        return differing

    def _differs(self, record: Record, segments: Sequence[Segment]) -> Tensor:
        """For each of the record's parts, whether its weight's fingerprint is another one; only for these segments."""
        staging, splitter = self._staging[record.device], self._splitters[record.device]
        known = record.fingerprints
        assert known is not None
        found = known.clone()
        for segment in segments:
            segment.weights(staging)
        splitter.fingerprint_rows([segment.weight_row(staging) for segment in segments], found)
        return found != known

    def _parts_with_other_masters(self, compared: Compared) -> list[Part]:
        """The parts whose weights are not their masters, which are whole, rounded."""
        record, segments, parts = compared
        if record.bytes is None:
            return []
        staging = self._staging[record.device]
        changed: set[Part] = set()
        for segment in segments:
            master = segment.parts[0].block.rows(record.bytes, segment.first, segment.stop)["master"]
            if not equals_rounded(segment.weights(staging), master):
                masters = ((part, self._entries.read(record, part)["master"]) for part in segment.parts)
                changed.update(
                    part for part, master in masters if not equals_rounded(part.slice(part.owner.local), master)
                )
        return [part for part in parts if part in changed]

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

__all__ = ["KeptRecords", "changed_weights", "was_edited"]


class Compared(NamedTuple):
    """Parts of a record whose weights are compared with those that the record belongs to, and their segments."""

    record: Record
    segments: Sequence[Segment]
    parts: Sequence[Part]


class KeptRecords(NamedTuple):
    """The records that weights are compared with, and what the comparison needs.

    Attributes:
        entries: reads and writes the records.
        splitters: the splitter of each device.
    """

    records: Records
    entries: Entries
    staging: StagingOfDevices
    splitters: Mapping[torch.device, MasterSplitter]


def changed_weights(kept: KeptRecords, items: Iterable[Managed]) -> list[Managed]:
    """The parameters that no longer equal their rounded masters, because somebody else wrote to them.

    Nothing may be under way on records that live on the device. May wait for the device.
    """
    wanted = dict.fromkeys(items)
    initial = kept.records.initial_masters
    found = {item for item in initial if item in wanted and not equals_rounded(item.resting, initial[item])}
    listed = kept.records.by_unit.values()
    records = [one for one in listed if one.has_masters and not wanted.keys().isdisjoint(one.unit.owners)]
    compared = [_compared_parts(record, wanted) for record in records]  # first: the next lines may change it
    waiting = (part for record in records for part in record.parts if part.owner in wanted)  # to be loaded
    found.update(p.owner for p in waiting if p.expected_weight is not None and kept.entries.awaits_weight(p))
    if compared := [one for one in compared if one.segments]:
        found.update(part.owner for part in _differing_parts(kept, compared))
    return [item for item in wanted if item in found]


def was_edited(kept: KeptRecords, part: Part) -> bool:
    """Whether somebody else wrote to the weight. A weight that is still to be loaded does not count."""
    alone = Compared(kept.records.of_part[part], [Segment([part])], [part])
    return part.expected_weight is None and bool(_differing_parts(kept, [alone]))


def _compared_parts(record: Record, wanted: Collection[Managed]) -> Compared:
    """The record's parts whose weights have to be compared."""
    segments = [segment for segment in segments_of(record, wanted) if segment.has_state and segment.has_master]
    parts = [part for segment in segments for part in segment.parts if part.expected_weight is None]
    return Compared(record, segments, parts)


def _differing_parts(kept: KeptRecords, compared: Sequence[Compared]) -> list[Part]:
    """The parts whose weights are not those that their records belong to. The host waits once for each device."""
    if compared[0].record.fingerprints is None:
        return [part for one in compared for part in _parts_with_other_masters(kept, one)]
    differs: dict[torch.device, list[Tensor]] = {}
    for record, segments, _ in compared:
        differs.setdefault(record.device, []).append(_differs(kept, record, segments))
    flags = {device: iter(torch.cat(found).tolist()) for device, found in differs.items()}
    differing = []
    for record, _, parts in compared:
        own = list(islice(flags[record.device], len(record.parts)))
        differing += [part for part in parts if own[part.index]]
    if not kept.staging.is_kept:
        kept.staging.free_temporary()
    return differing


def _differs(kept: KeptRecords, record: Record, segments: Sequence[Segment]) -> Tensor:
    """For each of the record's parts, whether its weight's fingerprint is another one; only for these segments."""
    staging, splitter = kept.staging[record.device], kept.splitters[record.device]
    known = record.fingerprints
    assert known is not None
    found = known.clone()
    for segment in segments:
        segment.weights(staging)
    splitter.fingerprint_rows([segment.weight_row(staging) for segment in segments], found)
    return found != known


def _parts_with_other_masters(kept: KeptRecords, compared: Compared) -> list[Part]:
    """The parts whose weights are not their masters, which are whole, rounded."""
    record, segments, parts = compared
    if record.bytes is None:
        return []
    staging = kept.staging[record.device]
    changed: set[Part] = set()
    for segment in segments:
        master = segment.parts[0].block.rows(record.bytes, segment.first, segment.stop)["master"]
        if not equals_rounded(segment.weights(staging), master):
            masters = ((part, kept.entries.read(record, part)["master"]) for part in segment.parts)
            changed.update(part for part, master in masters if not equals_rounded(part.slice(part.owner.local), master))
    return [part for part in parts if part in changed]

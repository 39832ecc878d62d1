"""All records of a store, and which parameter has which parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightstep.state.record import Part, Record
from lightstep.state.schema import Managed, Unit

__all__ = ["Records"]


class Records:
    """Iterates over the records in update order.

    Attributes:
        by_unit: the record of each unit.
        parts: of each parameter, in order.
        of_part: the record of each part.
        initial_masters: fp32 values that masters start from in their first update, where they are not the weights.
        fingerprints: of each record's 16-bit weights, by part, on the parameters' device; ``None`` if masters are
            whole. Comparing weights with them shows edits.
    """

    def __init__(self, fingerprints: bool) -> None:
        self.by_unit: dict[Unit, Record] = {}
        self.parts: dict[Managed, list[Part]] = {}
        self.of_part: dict[Part, Record] = {}
        self.initial_masters: dict[Managed, Tensor] = {}
        self.fingerprints: dict[Record, Tensor] | None = {} if fingerprints else None

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
        if self.fingerprints is not None:
            for record in listed:
                if record not in self.fingerprints:
                    self.fingerprints[record] = torch.zeros(len(record.parts), dtype=torch.int32, device=record.device)
            for record in leaving:
                self.fingerprints.pop(record, None)
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

    def parts_with_state(self, managed: Managed) -> list[Part]:
        """The parts of a parameter; none before all of them have state."""
        parts = self.parts.get(managed, [])
        return [] if any(part.history is None for part in parts) else parts

    def of(self, managed: Managed) -> list[Record]:
        """The records with parts of a parameter."""
        return list(dict.fromkeys(self.of_part[part] for part in self.parts.get(managed, ())))

    def fingerprints_of(self, record: Record) -> Tensor | None:
        return None if self.fingerprints is None else self.fingerprints[record]

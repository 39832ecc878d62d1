"""Masters and state stay on the device: nothing moves, the most memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightstep.state.backend import EntrySpec, Managed, Piece, Schema, StateBackend, Unit, adopt_entry
from lightstep.state.parking import Parking


class ResidentBackend(StateBackend):
    """One piece per parameter, kept where the parameter is; row-major, whatever the parameter's strides.

    Units only bound the fp32 gradient staging of one update; they are whole parameters, ``unit_elements`` together.
    """

    name: ClassVar[str] = "resident"
    unit_elements: ClassVar[int] = 128 * 2**20

    def __init__(self) -> None:
        self._pieces: dict[Managed, Piece] = {}
        self._units: list[Unit] = []
        self._schema: Schema = {}
        self._parking = Parking()

    def register(self, managed: Sequence[Managed], schema: Schema, whole_tensors: bool = False) -> None:
        self._parking.bring_back()
        self._schema = schema
        self._pieces = {item: self._pieces.get(item) or _new_piece(item) for item in managed}
        self._units = _pack(managed, self.unit_elements)

    def units(self) -> Sequence[Unit]:
        return self._units

    def prepare(self) -> None:
        self._parking.bring_back()

    def begin(self, managed: Collection[Managed], backwards: bool = False) -> None:
        self._parking.bring_back()

    def acquire(self, unit: Unit) -> list[Piece]:
        pieces = [self._pieces[item] for item, _, _ in unit.parts]
        for piece in pieces:
            if piece.owner.own_master:
                piece.master = piece.owner.local.contiguous()  # itself, but for a strided parameter
        return pieces

    def release(self, unit: Unit, updated: Sequence[Piece]) -> None:
        write_back(updated)
        for item, _, _ in unit.parts:
            if item.own_master:
                self._pieces[item].master = item.local

    def entries(self, managed: Managed) -> dict[str, Any]:
        piece = self._pieces.get(managed)
        if piece is None or not managed.updated:
            return {}
        return dict(piece.state) if managed.own_master else {**piece.state, "master": piece.master}

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        self._parking.bring_back()
        piece = self._pieces[managed]
        if not managed.own_master and "master" in entries:
            piece.master.copy_(entries["master"])
        else:
            self.refresh(managed)
        piece.state.clear()
        piece.state.update({k: adopt_entry(self._spec(k), v, managed) for k, v in entries.items() if k != "master"})

    def _spec(self, key: str) -> EntrySpec | None:
        return self._schema.get(key)

    def refresh(self, managed: Managed) -> None:
        self._parking.bring_back()
        piece = self._pieces[managed]
        if managed.own_master:
            piece.master = managed.local
        else:
            piece.master.copy_(managed.local)

    def differs(self, managed: Managed) -> bool:
        self._parking.bring_back()
        return not managed.own_master and not same_rounding(managed.local, self._pieces[managed].master)

    def memory(self) -> dict[str, int]:
        held = [tensor for piece in self._pieces.values() for tensor in _tensors_of(piece)]
        device = sum(tensor.nbytes for tensor in held if tensor.dim() > 0)
        away, host = self._parking.away_bytes(), self._parking.host_bytes()
        return {"device_bytes": max(device - away, 0), "host_bytes": host, "ring_bytes": 0}

    def release_device_memory(self) -> None:
        """Masters and state are on the host until the next step, or until they are loaded; readers find them there."""
        held = [tensor for piece in self._pieces.values() for tensor in _tensors_of(piece)]
        weights = [item.local for item in self._pieces]
        self._parking.park([tensor for tensor in held if tensor.dim() > 0], staying=weights)

    def close(self) -> None:
        self._pieces, self._units = {}, []
        self._parking.close()


def write_back(pieces: Sequence[Piece]) -> None:
    """``parameter.copy_(master)`` for whole pieces that are not the parameter itself, rounding to nearest even."""
    rounded = [piece for piece in pieces if piece.master.data_ptr() != piece.owner.local.data_ptr()]
    if rounded:
        torch._foreach_copy_([piece.owner.local for piece in rounded], [piece.master for piece in rounded])


def same_rounding(local: Tensor, master: Tensor) -> bool:
    """Whether ``local`` holds exactly ``master`` rounded to its dtype (bits; NaN equals itself)."""
    rounded = master.to(device=local.device, dtype=local.dtype)
    bits = torch.int32 if local.dtype == torch.float32 else torch.int16  # fp32: the model was cast since
    return torch.equal(rounded.view(bits), local.contiguous().view(bits))


def _new_piece(item: Managed) -> Piece:
    master = item.local if item.own_master else item.local.to(torch.float32, memory_format=torch.contiguous_format)
    return Piece(item, 0, item.local.numel(), master)


def _tensors_of(piece: Piece) -> list[Tensor]:
    state = [value for value in piece.state.values() if isinstance(value, Tensor)]
    return state if piece.owner.own_master else [*state, piece.master]


def _pack(managed: Sequence[Managed], limit: int) -> list[Unit]:
    """Consecutive parameters of one device, together at most ``limit`` elements, at least one each."""
    units: list[list[Managed]] = []
    filled = 0
    for item in managed:
        size = item.local.numel()
        fits = units and filled + size <= limit and units[-1][0].local.device == item.local.device
        if fits:
            units[-1].append(item)
            filled += size
        else:
            units.append([item])
            filled = size
    return [Unit(i, tuple((m, 0, m.local.numel()) for m in unit)) for i, unit in enumerate(units)]

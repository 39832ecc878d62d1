"""Memory on the host for tensors that are on the device while somebody works on them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightstep.distributed import dense_strides, writes
from lightstep.state.host_memory import HostSlab
from lightstep.state.lanes import Lanes
from lightstep.state.spare_memory import GIB, AutoBudget, device_memory

__all__ = ["Field", "KeptWeights", "Ranges", "StayingFields"]

logger = logging.getLogger(__name__)

_ALIGNMENT = 512
"""Bytes: tensors in a field begin as aligned as memory of their own on a device."""

_LARGE = 1 << 20
"""Elements that are not converted by way of other memory."""

Ranges = Iterable[tuple[int, int]]


class Field:
    """One tensor for each parameter of a group: on the host, and in device memory that is there or not.

    Args:
        likes: tensors with the shapes and dtypes.
        dtype: of all of them; ``None``: their own.
        is_used_once: in a step. Its device memory is the first to be freed.
        room: elements of memory for each, if that is more than it has.
        also_as_likes: each tensor's memory may hold one in the dtype of its ``like`` instead, at its beginning.

    Attributes:
        on_host, on_device: a tensor for each parameter. Those on the device are empty unless the field is held.
        as_likes: those on the device, in the dtypes of ``likes``: the same tensors, or others in the same memory.
        room_on_host, room_on_device: the memory of each, 1-dim. On the host each has a storage of its own: savers
            (accelerate, safetensors) take tensors of one storage for tied ones, and write one of them.
        nbytes: size in either place.
        lanes: those of its copies.
        what: for messages.
    """

    def __init__(
        self,
        likes: Sequence[Tensor],
        dtype: torch.dtype | None,
        lanes: Lanes,
        what: str,
        is_used_once: bool = False,
        room: Sequence[int] | None = None,
        also_as_likes: bool = False,
    ) -> None:
        self.is_used_once = is_used_once
        places, end = [], 0
        for like, elements in zip(likes, room or [like.numel() for like in likes], strict=True):
            size = elements * (dtype or like.dtype).itemsize
            places.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end
        self._places = places
        self._slab = HostSlab(max(end, 1), device=lanes.device, what=what)
        self.host = self._slab.tensor(torch.uint8, end)
        memory: list[Tensor] = []
        lane = lanes.host_to_device
        lane.run(lambda: memory.append(torch.empty(end, dtype=torch.uint8, device=lanes.device)))
        if lane.stream is None:
            lane.synchronize()
        (flat,) = memory
        self._storage = flat.untyped_storage()
        self._bytes = flat.data  # with a version counter of its own: copies are no writes that autograd should see
        self._dtypes = [dtype or like.dtype for like in likes]
        self.room_on_host = [torch.from_dlpack(memory) for memory in self._memories(self.host)]
        self.room_on_device = self._memories(flat)
        self.on_host = [_shaped(memory, like) for memory, like in zip(self.room_on_host, likes, strict=True)]
        self.on_device = [_shaped(memory, like) for memory, like in zip(self.room_on_device, likes, strict=True)]
        self._rooms = list(zip(self.room_on_host, self._memories(self._bytes), strict=True))
        self._narrow_rooms, self.as_likes = self._rooms, self.on_device
        if also_as_likes:
            pairs = list(zip(self._rooms, likes, strict=True))
            self._narrow_rooms = [(_as(host, like), _as(device, like)) for (host, device), like in pairs]
            self.as_likes = [
                own if own.dtype == like.dtype else _shaped(_as(room, like), like)
                for own, room, like in zip(self.on_device, self.room_on_device, likes, strict=True)
            ]
        self._narrow: set[int] = set()  # the tensors that are on the host in the dtype of their `like`
        self.what, self.lanes = what, lanes
        self._storage.resize_(0)
        self.arrived, self.used, self.updated, self.returned = (lanes.event() for _ in range(4))
        self.holds = 0
        self.is_present = False
        self.is_expected = False
        """It was brought ahead, and nobody has held it since."""
        self.is_fresh = False
        """An update has written it, and no forward has read it since."""
        self._copies = itertools.count(1)
        self._coming = self._returning = 0  # the last copy to the device, and to the host
        self._has_come = self._has_returned = 0  # the last of them that has ended for sure

    def _memories(self, flat: Tensor) -> list[Tensor]:
        """The memory of each tensor in ``flat``, 1-dim."""
        pairs = zip(self._places, self._dtypes, strict=True)
        return [flat[start:stop].view(dtype) for (start, stop), dtype in pairs]

    def take_over(self, other: Field) -> None:
        """Copy another field's tensors, in the dtypes of ``likes``, on the host, which waits until they are there."""
        other.settle()
        for (own, _), tensor in zip(self._narrow_rooms, other.on_host, strict=True):
            _shaped(own, tensor).copy_(tensor)
        self._note_dtypes(dict(enumerate(other.on_host)))

    def _note_dtypes(self, tensors: dict[int, Tensor]) -> None:
        for number, tensor in tensors.items():
            (self._narrow.discard if tensor.dtype == self._dtypes[number] else self._narrow.add)(number)

    def widen(self, number: int) -> None:
        """Convert a tensor on the device from the dtype of its ``like`` to the field's own, in its place.

        In halves, the last one first: what is written to has been read.
        """
        wide = self.room_on_device[number]
        stop = self.as_likes[number].numel()
        narrow = wide.view(self.as_likes[number].dtype)
        while stop > _LARGE:
            start = (stop + 1) // 2
            wide[start:stop].copy_(narrow[start:stop])
            stop = start
        wide[:stop].copy_(narrow[:stop].to(wide.dtype))

    def bring(self) -> None:
        """Queue the copy to the device."""
        lane, size = self.lanes.host_to_device, self.nbytes
        lane.wait(self.returned)
        lane.allocate(lambda: self._storage.resize_(size), f"memory for {self.what}")
        if self._narrow:
            pairs = enumerate(zip(self._rooms, self._narrow_rooms, strict=True))
            sources, targets = zip(
                *(narrow if n in self._narrow else whole for n, (whole, narrow) in pairs), strict=True
            )
            lane.copies(targets, sources, f"bringing {self.what}")
        else:
            lane.copy(self._bytes, self.host, f"bringing {self.what}")
        lane.record(self.arrived)
        self.is_present, self._coming = True, next(self._copies)

    def free(self) -> None:
        """Free the device memory, once it is not used any more."""
        lane = self.lanes.host_to_device
        for event in (self.used, self.updated, self.returned):
            lane.wait(event)
        lane.run(lambda: self._storage.resize_(0))
        self.is_present = self.is_fresh = self.is_expected = False

    def put(self, tensors: dict[int, Tensor]) -> None:
        """Copy these tensors, by number, into the device memory, as the caller's work. The host does not get them."""
        caller = self.lanes.caller()
        for event in (self.arrived, self.used, self.updated, self.returned):
            caller.wait(event)
        caller.copies(*_flat([device for _, device in self._rooms], tensors), f"keeping {self.what}")
        self.note_written()

    def note_written(self) -> None:
        """The device has other values than the host, as the caller's work so far has left them."""
        self.lanes.caller().record(self.arrived)
        self._coming = next(self._copies)

    @property
    def has_memory(self) -> bool:
        """Whether there is memory for it on the device."""
        return self._storage.nbytes() == self.nbytes

    def take_back(self, ranges: Ranges | None = None) -> None:
        """Queue the copy to the host of these bytes (``None``: all), as the caller's work so far has left them."""
        self.lanes.device_to_host.wait(self.lanes.caller().record(self.updated))
        self._copy_back([(0, self.nbytes)] if ranges is None else list(ranges))

    def copy_back(self) -> None:
        """Queue the copy to the host of all, as whoever has put it there or held it has left it."""
        for event in (self.arrived, self.used, self.updated):
            self.lanes.device_to_host.wait(event)
        self._copy_back([(0, self.nbytes)])

    def _copy_back(self, whole: Sequence[tuple[int, int]]) -> None:
        lane = self.lanes.device_to_host
        self._narrow -= {n for n in self._narrow if any(a <= self._places[n][0] < z for a, z in whole)}
        for start, stop in whole:
            lane.copy(self.host[start:stop], self._bytes[start:stop], f"taking back {self.what}")
        lane.record(self.returned)
        self._returning = next(self._copies)

    def fill(self, tensors: dict[int, Tensor]) -> None:
        """Queue copies of these tensors on the device, by number, straight to the host. They must live until then.

        Their strides are those of :attr:`on_host`.
        """
        lane = self.lanes.device_to_host
        self.lanes.caller().record(self.used)
        lane.wait(self.used)
        lane.wait(self.arrived)  # what was there before may still be read
        lane.copies(*_flat(self.room_on_host, tensors), f"taking {self.what} to the host")
        self._note_dtypes(tensors)
        lane.record(self.returned)
        self._returning = next(self._copies)

    def copy_to(self, host: Tensor, ranges: Ranges) -> None:
        """Queue copies of these bytes to other host memory of the field's size, as updates so far have left them."""
        lane = self.lanes.device_to_host
        for event in (self.arrived, self.updated):
            lane.wait(event)
        for start, stop in ranges:
            lane.copy(host[start:stop], self._bytes[start:stop], f"keeping {self.what}")
        lane.record(self.returned)
        self._returning = next(self._copies)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The tensors of the field in other host memory of its size (uint8, flat)."""
        pairs = zip(self._memories(flat), self.on_host, strict=True)
        return [_shaped(memory, like) for memory, like in pairs]

    def abandon(self) -> None:
        """The lanes have failed: nothing is on the device, or on its way."""
        self._storage.resize_(0)
        self.holds = 0
        self.is_present = self.is_fresh = self.is_expected = False
        self._has_come, self._has_returned = self._coming, self._returning

    def bytes_of(self, number: int, start: int, stop: int) -> tuple[int, int]:
        """The range of bytes of some elements of one tensor."""
        size, base = self.on_host[number].element_size(), self._places[number][0]
        return base + start * size, base + stop * size

    def settle(self) -> None:
        """Block the host until what is under way to it has arrived, and what is under way from it has been read.

        Several threads may wait at a time. An update in a lane may begin another copy meanwhile.
        """
        coming, returning = self._coming, self._returning
        if coming != self._has_come:
            self.arrived.synchronize()
            self._has_come = coming
        if returning != self._has_returned:
            self.returned.synchronize()
            self._has_returned = returning


def _flat(memories: Sequence[Tensor], tensors: dict[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Where these tensors go, by number, and the tensors, all 1-dim."""
    sources = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors.values()]
    targets = [memories[number].view(tensor.dtype)[: tensor.numel()] for number, tensor in tensors.items()]
    return targets, sources


def _as(memory: Tensor, like: Tensor) -> Tensor:
    """Its beginning, for as many elements of the dtype of ``like``."""
    return memory.view(like.dtype)[: like.numel()]


def _shaped(memory: Tensor, like: Tensor) -> Tensor:
    """With the shape and the order of elements (channels last) of ``like``."""
    return memory[: like.numel()].as_strided(like.shape, dense_strides(like))


class StayingFields:
    """The gradients that stay on the device from their arrival to their update: whole fields, in the order in which
    they first arrive, as many as a budget allows.

    They keep their device memory between steps, so the peak of a step is known after the first one that has them all.
    They keep their memory on the host, too, so each can leave at any time.

    Args:
        gib: ``weights.gradients_gib``.
    """

    def __init__(self, device: torch.device, gib: float | str) -> None:
        self._auto = AutoBudget(device_memory(device)) if gib == "auto" else None
        self._allowed = 0 if gib == "auto" else int(float(gib) * GIB)
        self._device = device
        self._fields: dict[Field, None] = {}

    def __contains__(self, field: Field) -> bool:
        return field in self._fields

    def __iter__(self) -> Iterator[Field]:
        return iter(list(self._fields))

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self._fields)

    def has_room(self, field: Field) -> bool:
        """Whether the budget allows one more."""
        return self.nbytes + field.nbytes <= self._allowed

    def add(self, field: Field) -> None:
        self._fields[field] = None

    def discard(self, field: Field) -> None:
        self._fields.pop(field, None)
        if self._auto is not None:
            self._auto.changed()

    def limit(self) -> None:
        """The device has no room for more than what stays now."""
        if self.nbytes < self._allowed:
            logger.warning(
                "weights.gradients_gib: %s has no room for more than %.2f GiB; that much stays on it",
                self._device,
                self.nbytes / GIB,
            )
        self._allowed = self.nbytes
        if self._auto is not None:
            self._auto.limit_to(self._allowed)

    def surplus(self) -> list[Field]:
        """What the budget of the next step does not allow any more. Called once in a step, when it has been begun."""
        if self._auto is not None:
            self._allowed = self._auto.before_step(self.nbytes)
        leaving, over = [], self.nbytes - self._allowed
        for field in reversed(self._fields):
            if over > 0:
                leaving.append(field)
                over -= field.nbytes
        return leaving

    def remeasure(self) -> None:
        """Something else may use the device now."""
        if self._auto is not None:
            self._auto.remeasure()


class KeptWeights:
    """A second copy of a group's weights on the host, for the time when an update has changed them and may be undone.

    It is made while the weights are on the device for a forward, when that direction of the link is idle: in backward
    it is full.

    Args:
        field: the weights.
        slab: the memory, of the field's size.
        lock: held while this object changes.

    Attributes:
        on_host: a tensor for each parameter.
        wanted: the numbers of those that will be needed.
        uses: updates of these weights that may still be undone.
    """

    def __init__(
        self, field: Field, parameters: Sequence[nn.Parameter], slab: HostSlab, lock: AbstractContextManager[object]
    ) -> None:
        self.slab, self._field, self._parameters, self._lock = slab, field, parameters, lock
        self._bytes = slab.tensor(torch.uint8, field.nbytes)
        self.on_host = field.views_of(self._bytes)
        self.wanted: Sequence[int] = ()
        self.uses = 0
        self._versions: list[int | None] = [None] * len(parameters)  # of the weights in it
        self._copied = field.lanes.event()

    def keep(self) -> None:
        """Copy what is wanted and has changed. The weights are held on the device."""
        with self._lock:
            numbers = [number for number in self.wanted if not self.is_current(number)]
            if not numbers or self.uses:
                return
            for number in numbers:
                self._versions[number] = writes(self._parameters[number])
            self._copy([(number, 0, self.on_host[number].numel()) for number in numbers])

    def keep_now(self, places: Iterable[tuple[int, int, int]]) -> None:
        """Copy parts of weights, by number, first and last element, that the caller's next work changes."""
        self._copy(places)
        self.wait()

    def _copy(self, places: Iterable[tuple[int, int, int]]) -> None:
        self._field.copy_to(self._bytes, _joined(self._field.bytes_of(*place) for place in places))
        self._field.lanes.device_to_host.record(self._copied)

    def wait(self) -> None:
        """The caller's next work may change the weights."""
        self._field.lanes.caller().wait(self._copied)

    def is_current(self, number: int) -> bool:
        """Whether it has the weights of this parameter."""
        return self._versions[number] == writes(self._parameters[number])

    def note_written(self, numbers: Iterable[int]) -> None:
        """These parameters have changed on the device."""
        with self._lock:
            for number in numbers:
                self._versions[number] = None


def _joined(ranges: Ranges) -> list[tuple[int, int]]:
    """The ranges in order, those with nothing but padding in between as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start - found[-1][1] < _ALIGNMENT:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found

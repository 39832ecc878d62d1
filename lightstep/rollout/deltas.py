"""Deltas: the weights of a bucket that are not those of an earlier set, and how a receiver applies them.

A bucket's buffer counts as words of 2 bytes. A delta has the positions of changed words and their new values, 6 bytes
for each: absolute values, so that a word too many does no harm. Every set has an identifier of its own. A receiver
applies a delta only to the complete set that the delta names, which it keeps in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightstep.rollout.link import WeightLink
from lightstep.rollout.transport import Bucket, BucketDelta, WeightInfo

__all__ = [
    "HeldWeights",
    "changed_words",
    "has_words",
    "joined",
    "receive_bucket",
    "shard_in_bucket",
]

_WORD = 2
_PIECE = 1 << 24
"""Words that are compared at a time."""


class HeldWeights:
    """The last complete set that a receiver got, for deltas to it.

    Attributes:
        set_id: of the complete set; ``None`` if there is none, or while another one replaces it.
    """

    def __init__(self) -> None:
        self.set_id: str | None = None
        self._receiving: str | None = None
        self._has_last = False  # the last bucket has arrived
        self._buffers: dict[tuple[str, ...], Tensor] = {}

    def refuse_other_base(self, base: str) -> None:
        """Raise ``RuntimeError`` unless ``base`` is the complete set here."""
        if self.set_id != base:
            raise RuntimeError(f"deltas to set {base}, and {self.set_id or 'no complete set'} is here")

    def begin(self, set_id: str, base: str) -> None:
        """The next bucket is of this set, whose deltas are to ``base``; empty: all buckets are whole."""
        if self._receiving == set_id:
            return
        if base:
            self.refuse_other_base(base)
        else:
            self._buffers.clear()
        self.set_id, self._receiving, self._has_last = None, set_id, False

    def forget(self) -> None:
        """A set begins that is not kept."""
        self.set_id = self._receiving = None
        self._buffers.clear()

    def keep(self, bucket: Bucket, is_last: bool) -> None:
        """A bucket arrived whole."""
        key = tuple(info.name for info in bucket.infos)
        if key in self._buffers and len(self._buffers[key]) == len(bucket.buffer):
            self._buffers[key].copy_(bucket.buffer)
        else:
            self._buffers[key] = bucket.buffer.to("cpu", copy=True)
        self._has_last = is_last

    def apply(self, infos: Sequence[WeightInfo], data: Tensor, is_last: bool) -> Bucket:
        """The whole bucket, of which ``data`` is the delta's."""
        key = tuple(info.name for info in infos)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) != Bucket.nbytes_of(infos):
            raise RuntimeError(f"a delta to a bucket that is not here: {key[0]}, ...")
        delta = BucketDelta(infos, data.cpu())
        buffer.view(torch.int16)[delta.positions.long()] = delta.values
        self._has_last = is_last
        return Bucket(infos, buffer)

    def end(self) -> None:
        """The set ends here. It counts as complete if its last bucket has arrived."""
        self.set_id = self._receiving if self._has_last else None
        self._receiving = None


class BucketPlace(Protocol):
    """How a bucket belongs to a set that is kept: see ``BucketInfo`` of the plugin."""

    set_id: str
    base: str
    is_last: bool
    changed: int | None


def receive_bucket(link: WeightLink, held: HeldWeights, infos: Sequence[WeightInfo], place: BucketPlace) -> Bucket:
    """Receive one bucket, whole or as a delta, and keep it if its set is kept.

    Raises:
        RuntimeError: the sender is gone, or a delta is to another set than the one that is held.
    """
    if place.set_id:
        held.begin(place.set_id, place.base)
    else:
        held.forget()
    if place.changed is not None:
        data = torch.empty(BucketDelta.nbytes_of(place.changed), dtype=torch.uint8, device=link.device)
        if place.changed:
            link.broadcast(data)
        whole = held.apply(infos, data, place.is_last)
        return Bucket(infos, whole.buffer.to(link.device, copy=True))  # an engine may keep what it is given
    bucket = Bucket(infos, torch.empty(Bucket.nbytes_of(infos), dtype=torch.uint8, device=link.device))
    link.broadcast(bucket.buffer)
    if place.set_id:
        held.keep(bucket, place.is_last)
    return bucket


def has_words(infos: Sequence[WeightInfo]) -> bool:
    """Whether every element consists of whole words."""
    return all(info.dtype.itemsize % _WORD == 0 for info in infos)


def changed_words(tensor: Tensor, base: Tensor, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The words that differ, in contiguous tensors, piece by piece: positions (int64), and the words there (int16).

    Args:
        device: where they are compared, and where the results are.
    """
    pieces = zip(_words(tensor).split(_PIECE), _words(base).split(_PIECE), strict=True)
    for number, (own, other) in enumerate(pieces):
        words = own.to(device, non_blocking=True)
        positions = (words != other.to(device, non_blocking=True)).nonzero().view(-1)
        yield positions + number * _PIECE, words[positions]


def shard_in_bucket(
    positions: Tensor, start: int, info: WeightInfo, region: Sequence[slice], shape: Sequence[int]
) -> Tensor:
    """Positions of words in a shard, as positions in the whole bucket.

    Args:
        start: the tensor's first byte in the bucket.
        info: the whole tensor.
        region: the shard's place in it.
        shape: of the shard.
    """
    each = info.dtype.itemsize // _WORD
    element, within = positions // each, positions % each
    whole, stride = torch.zeros_like(element), 1
    for place, length, size in zip(reversed(region), reversed(shape), reversed(info.shape), strict=True):
        whole += (element % length + place.start) * stride
        element, stride = element // length, stride * size
    return whole * each + within + start // _WORD


def joined(infos: Sequence[WeightInfo], deltas: Sequence[BucketDelta]) -> BucketDelta:
    """One delta of all."""
    positions = torch.cat([delta.positions for delta in deltas])
    return BucketDelta.of_words(infos, positions, torch.cat([delta.values for delta in deltas]))


def _words(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.int16)

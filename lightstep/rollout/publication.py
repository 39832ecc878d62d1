"""One set of weights: the tensors that it consists of, and how they are gathered and handed to a transport."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightstep.distributed import Ranks, gather_tensor
from lightstep.rollout.file_names import infos_in_files, tensors_in_files
from lightstep.rollout.published_model import PublishedModel
from lightstep.rollout.transport import Bucket, BucketDelta, WeightInfo, WeightTransferError, WeightTransport

__all__ = ["GatheredWeights", "Publication", "PublishedWeights", "WeightSource"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype of each size, in which elements are moved as they are."""


@dataclass(frozen=True)
class PublishedWeights:
    """What was sent.

    Attributes:
        version: of the set.
        nbytes: bytes that the first trainer sent to each receiver; 0 on the other trainers.
        whole_nbytes: bytes that it would have sent without deltas.
        seconds: from the first message to the receivers until all of them had the set.
    """

    version: int
    nbytes: int
    whole_nbytes: int
    seconds: float


class WeightSource(ABC):
    """Whole tensors of a model, bucket by bucket.

    Attributes:
        model: the published one.
        buckets: as they are in the model.
        device: of the buckets that are sent.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Sequence[WeightInfo]], device: torch.device) -> None:
        self.model, self.buckets, self.device = model, buckets, device

    @abstractmethod
    def bucket(self, number: int, buffer: Tensor | None) -> Bucket | None:
        """Gather a bucket. Called by all trainers, and returned where there is a buffer.

        Args:
            buffer: 1-D uint8, which may be used for the bucket; ``None`` on trainers that only take part.
        """

    def prepare_deltas(self) -> Sequence[bool]:
        """Compare with the base, before any bucket. Called by all trainers. Which buckets are smaller as deltas."""
        return [False] * len(self.buckets)

    def delta(self, number: int, is_sender: bool) -> BucketDelta | None:
        """What changed in a bucket since the base. Called by all trainers, and returned on the one that sends."""
        raise NotImplementedError


class GatheredWeights(WeightSource):
    """The present weights, gathered by the process groups that training uses."""

    def __init__(self, published: PublishedModel, ranks: Ranks) -> None:
        super().__init__(published.model, published.plan.buckets, published.device)
        self._published, self._ranks = published, ranks

    def bucket(self, number: int, buffer: Tensor | None) -> Bucket | None:
        infos = self.buckets[number]
        if buffer is None:
            for info in infos:
                self._gather(info)
            return None
        bucket = Bucket(infos, buffer)
        for info, target in bucket:
            target.copy_(self._gather(info))
        return bucket

    def _gather(self, info: WeightInfo) -> Tensor:
        named = self._published.named[info]
        sender = self._published.plan.senders.get(named.name)
        return gather_tensor(named.tensor, sender, self._ranks.group, info.dtype)


class Publication:
    """Sends one set of weights. All trainers create and call it in the same order.

    Args:
        source: of the weights.
        transport: ``None`` on ranks that only take part in gathering.
        ranks: the trainers, in a group that nothing else uses now.
    """

    def __init__(self, source: WeightSource, transport: WeightTransport | None, ranks: Ranks) -> None:
        self._source, self._transport, self._ranks = source, transport, ranks
        self._sent: Sequence[Sequence[WeightInfo]] = source.buckets
        self._nbytes = self._whole_nbytes = 0
        self._buffer: Tensor | None = None
        self._files_buffer: Tensor | None = None
        """For a bucket as the model's files have it, if these differ."""

    @torch.no_grad()
    def send(self, version: int) -> PublishedWeights:
        """Send all buckets.

        Raises:
            WeightTransferError: a receiver did not get all of them. All ranks raise.
        """
        transport, begin = self._transport, time.monotonic()
        try:
            self._run_on_all(lambda: self._begin(transport, version) if transport else None)
            if self._ranks.gather(transport is not None and transport.accepts_deltas)[0]:
                are_deltas = self._source.prepare_deltas()
            else:
                are_deltas = [False] * len(self._source.buckets)
            for number, is_delta in enumerate(are_deltas):
                step = self._send_delta if is_delta else self._send_bucket
                self._run_on_all(partial(step, number))
            self._run_on_all(lambda: transport.finish() if transport else None)
        except BaseException as error:
            if transport is not None:
                transport.abort(f"{type(error).__name__}: {error}")
            raise
        return PublishedWeights(version, self._nbytes, self._whole_nbytes, time.monotonic() - begin)

    def _begin(self, transport: WeightTransport, version: int) -> None:
        self._buffer = self._new_buffer(self._source.buckets)
        if transport.uses_file_names:
            found = infos_in_files(self._source.model, self._source.buckets)
            if found != list(map(list, self._source.buckets)):
                self._sent, self._files_buffer = found, self._new_buffer(found)
        transport.begin(version, self._sent)

    def _new_buffer(self, buckets: Sequence[Sequence[WeightInfo]]) -> Tensor:
        size = max(map(Bucket.nbytes_of, buckets), default=0)
        return torch.empty(size, dtype=torch.uint8, device=self._source.device)

    def _send_bucket(self, number: int) -> None:
        bucket = self._source.bucket(number, self._buffer)
        if self._transport is None or bucket is None:
            return
        if self._files_buffer is not None:
            bucket = self._in_files(bucket, Bucket(self._sent[number], self._files_buffer))
        self._transport.send(bucket)
        self._nbytes += len(bucket.buffer)
        self._whole_nbytes += len(bucket.buffer)

    def _in_files(self, bucket: Bucket, target: Bucket) -> Bucket:
        """Fill ``target`` with the same tensors, bit for bit, as the model's files have them."""
        bits = {info.name: tensor.view(_BITS[info.dtype.itemsize]) for info, tensor in bucket}
        found = tensors_in_files(self._source.model, bits)
        for info, tensor in target:
            tensor.view(_BITS[info.dtype.itemsize]).copy_(found[info.name])
        return target

    def _send_delta(self, number: int) -> None:
        delta = self._source.delta(number, self._transport is not None)
        if self._transport is None or delta is None:
            return
        if self._files_buffer is not None:
            delta = self._delta_in_files(number, delta)
        self._transport.send_delta(delta)
        self._nbytes += len(delta.buffer)
        self._whole_nbytes += Bucket.nbytes_of(self._sent[number])

    def _delta_in_files(self, number: int, delta: BucketDelta) -> BucketDelta:
        """The same changes, as positions in the bucket that the model's files have."""
        assert self._buffer is not None and self._files_buffer is not None
        bucket, target = Bucket(delta.infos, self._buffer), Bucket(self._sent[number], self._files_buffer)
        positions, words = delta.positions.long(), bucket.buffer.view(torch.int16)
        words.zero_()
        words[positions] = 1
        target.buffer.zero_()
        found = self._in_files(bucket, target).buffer.view(torch.int16).nonzero().view(-1)
        words[positions] = delta.values
        values = self._in_files(bucket, target).buffer.view(torch.int16)[found]
        return BucketDelta.of_words(target.infos, found, values)

    def _run_on_all(self, step: Callable[[], object]) -> None:
        """Run ``step`` on all ranks. If it fails on one of them, all raise."""
        error: BaseException | None = None
        try:
            step()
        except BaseException as caught:
            error = caught
        text = f"{type(error).__name__}: {error}"
        failures = self._ranks.gather(None if error is None else (text, getattr(error, "ranks", ())))
        if isinstance(error, WeightTransferError) or (error is not None and not isinstance(error, Exception)):
            raise error
        if error is not None:
            raise WeightTransferError(f"weights were not published: {text}") from error
        for trainer, failure in enumerate(failures):
            if failure is not None:
                raise WeightTransferError(f"trainer {trainer}: {failure[0]}", failure[1])

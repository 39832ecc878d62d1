"""Publishing: how a model is sent, and one set of its weights, which all trainers gather or have copied before."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.huggingface import find_senders
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import LostRankError, Ranks, RemoteRankError, gather_tensor, layout_of, local_tensor
from lightstep.optimizer.changed_weights import Changes
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import layer_of
from lightstep.rollout.transport import (
    Bucket,
    BucketDelta,
    WeightInfo,
    WeightTransferError,
    WeightTransport,
    buckets_of,
)
from lightstep.sharding.dtypes import planned_by_tensor
from lightstep.sharding.model_names import NamedTensor, named_tensors
from lightstep.sharding.prepared_model import PreparedModel

_MIB = 2**20


@dataclass(frozen=True)
class Part:
    """One trainer's shard of a tensor.

    Attributes:
        info: the whole tensor.
        region: where the shard is in it.
        shard: the shard as a tensor of its own.
    """

    info: WeightInfo
    region: tuple[slice, ...]
    shard: WeightInfo


@dataclass
class SendingPlan:
    """What follows from names, dtypes and shards of a model's tensors. It refers to none of them.

    Attributes:
        described: these names, dtypes and shards.
        senders: a rank that has a tensor of which the first trainer has no part, by name.
        buckets: the tensors as they are sent.
        parts: by bucket and trainer: its shards. Each is the first trainer's that has it.
        in_files: the buckets as the model's files have them; ``None`` until somebody asks.
    """

    described: Hashable
    senders: Mapping[str, int]
    infos: Sequence[WeightInfo]
    buckets: Sequence[Sequence[WeightInfo]]
    parts: Sequence[Sequence[Sequence[Part]]]
    in_files: list[list[WeightInfo]] | None = None


class PublishedModel:
    """The tensors of a model, in the dtypes and buckets in which they are sent. Created by all trainers.

    Args:
        model: without wrappers, and without pending updates.
        dtype: weights are sent in it, except those that a rollout model keeps in another one.
        bucket_mib: size of a bucket in MiB.
        ranks: the trainers.
        plans: of earlier sets. A model whose tensors look as before is not planned again.

    Raises:
        WeightTransferError: ranks have different tensors of one name.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        bucket_mib: float,
        ranks: Ranks,
        plans: MutableMapping[nn.Module, SendingPlan],
    ) -> None:
        self.model = model
        tensors = named_tensors(model)
        described = (dtype, bucket_mib, tuple(map(_description, tensors)))
        plan = plans.get(model)
        if plan is None or not all(ranks.gather_integer(plan.described == described)):
            plan = plans[model] = _planned(model, tensors, described, ranks)
        self.plan = plan
        self.named: Mapping[WeightInfo, NamedTensor] = dict(zip(plan.infos, tensors, strict=True))
        self.device = next((local_tensor(named.tensor).device for named in tensors), torch.device("cpu"))

    def changes(self, rank: int) -> tuple[Changes | None, dict[str, Tensor]]:
        """What has changed since the last call, and the parameters of which that is known, by name.

        ``None`` if it is known of less than 7/8 of this trainer's elements.
        """
        optimizers = list(PreparedModel.of(self.model).optimizers)
        shards = {part.info: part.shard for parts in self.plan.parts for part in parts[rank]}
        sent = {self.named[info].tensor: shard for info, shard in shards.items() if shard.dtype.itemsize == 2}
        if len(optimizers) != 1 or not isinstance(optimizers[0], MixedPrecisionOptimizer):
            return None, {}
        least = sum(torch.Size(shard.shape).numel() for shard in shards.values()) * 7 / 8
        dtypes = {parameter: shard.dtype for parameter, shard in sent.items()}
        changes = optimizers[0].engine.weight_changes(dtypes, least)
        return changes, {} if changes is None else {sent[parameter].name: parameter for parameter in changes.known}


def _description(named: NamedTensor) -> Hashable:
    """What the plan depends on."""
    tensor = named.tensor
    return named.names, type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, layout_of(tensor)


def _planned(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    described: tuple[torch.dtype, float, Hashable],
    ranks: Ranks,
) -> SendingPlan:
    dtype, bucket_mib, _ = described
    try:
        senders = find_senders(tensors, ranks)
    except CheckpointError as error:  # all ranks raise it
        raise WeightTransferError(f"{error}; engines know one tensor of a name") from error
    planned = planned_by_tensor(model, dtype)
    infos = [WeightInfo.of(named, planned.get(named.tensor)) for named in tensors]
    buckets = buckets_of(infos, [layer_of(info.name) for info in infos], bucket_mib * _MIB)
    return SendingPlan(described, senders, infos, buckets, _parts(tensors, infos, buckets, ranks))


def _parts(
    tensors: Sequence[NamedTensor],
    infos: Sequence[WeightInfo],
    buckets: Sequence[Sequence[WeightInfo]],
    ranks: Ranks,
) -> list[list[list[Part]]]:
    shards = [shard_of(named.tensor) for named in tensors]
    own = {number: shard for number, shard in enumerate(shards) if shard is not None and shard.numel}
    bucket_of = {info: number for number, bucket in enumerate(buckets) for info in bucket}
    parts: list[list[list[Part]]] = [[[] for _ in range(ranks.size)] for _ in buckets]
    known: set[tuple[int, torch.Size]] = set()
    for trainer, listed in enumerate(ranks.gather(own)):
        for number, shard in listed.items():
            if (number, shard.offsets) not in known:
                known.add((number, shard.offsets))
                info = infos[number]
                own_info = WeightInfo(info.names, tuple(shard.lengths), info.dtype)
                parts[bucket_of[info]][trainer].append(Part(info, shard.region, own_info))
    return parts


# -- sending -----------------------------------------------------------------------------------------------------------

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

    def __init__(self, published: PublishedModel, device: torch.device) -> None:
        self.model, self.buckets, self.device = published.model, published.plan.buckets, device
        self._plan = published.plan

    def buckets_in_files(self) -> list[list[WeightInfo]]:
        """The buckets as the model's files have them.

        Raises:
            WeightTransferError: some tensors in a file are made of tensors in several buckets.
        """
        if self._plan.in_files is None:
            self._plan.in_files = infos_in_files(self.model, self.buckets)
        return self._plan.in_files

    @abstractmethod
    def bucket(self, number: int, buffer: Tensor | None) -> Bucket | None:
        """Gather a bucket. Called by all trainers, and returned where there is a buffer.

        Args:
            buffer: 1-D uint8, which may be used for the bucket; ``None`` on trainers that only take part.
        """

    def moved(self, buffer: Tensor) -> Tensor:
        """Memory on the model's device instead of ``buffer``, if buckets are put together and there is room."""
        return buffer

    def prepare(self, number: int, compares: bool) -> int | None:
        """Make this trainer's part of a bucket ready. All trainers have called this when one gets the bucket.

        Args:
            compares: find what changed since the base.

        Returns: How many words changed; ``None``: the bucket has to be sent whole.
        """
        return None

    def delta(self, number: int, changed: Sequence[int], is_sender: bool) -> BucketDelta | None:
        """What :meth:`prepare` found. Called by all trainers, and returned on the one that sends.

        Args:
            changed: by trainer.
        """
        raise NotImplementedError


class GatheredWeights(WeightSource):
    """The present weights, gathered by the process groups that training uses."""

    def __init__(self, published: PublishedModel, ranks: Ranks) -> None:
        super().__init__(published, published.device)
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
            compares = bool(self._run_on_all(lambda: self._begin(transport, version) if transport else None)[0])
            changed: list[int | None] = []
            for number in range(len(self._source.buckets) + 1):
                changed = self._run_on_all(partial(self._advance, number, changed, compares))
        except BaseException as error:
            if transport is not None:
                transport.abort(f"{type(error).__name__}: {error}")
            raise
        return PublishedWeights(version, self._nbytes, self._whole_nbytes, time.monotonic() - begin)

    def _begin(self, transport: WeightTransport, version: int) -> int:
        """Returns whether receivers accept deltas."""
        self._buffer = self._new_buffer(self._source.buckets)
        if transport.uses_file_names:
            found = self._source.buckets_in_files()
            if found != list(map(list, self._source.buckets)):
                self._sent, self._files_buffer = found, self._new_buffer(found)
        transport.begin(version, self._sent)
        if transport.takes_device and self._files_buffer is None:
            self._buffer = self._source.moved(self._buffer)
        return int(transport.accepts_deltas)

    def _new_buffer(self, buckets: Sequence[Sequence[WeightInfo]]) -> Tensor:
        size = max(map(Bucket.nbytes_of, buckets), default=0)
        return torch.empty(size, dtype=torch.uint8, device=self._source.device)

    def _advance(self, number: int, changed: Sequence[int | None], compares: bool) -> int | None:
        """Send the bucket before this one, and prepare this one; or end the set.

        Args:
            changed: by trainer: what :meth:`WeightSource.prepare` returned for the bucket before.
        """
        if number > 0:
            self._send_prepared(number - 1, changed)
        if number < len(self._source.buckets):
            return self._source.prepare(number, compares)
        if self._transport is not None:
            self._transport.finish()
        return None

    def _send_prepared(self, number: int, changed: Sequence[int | None]) -> None:
        counts = [count for count in changed if count is not None]
        is_whole = len(counts) < len(changed)
        if is_whole or BucketDelta.nbytes_of(sum(counts)) > Bucket.nbytes_of(self._source.buckets[number]):
            self._send_bucket(number)
        else:
            self._send_delta(number, counts)

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

    def _send_delta(self, number: int, changed: Sequence[int]) -> None:
        delta = self._source.delta(number, changed, self._transport is not None)
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
        delta = BucketDelta(delta.infos, delta.buffer.to(self._source.device))
        bucket, target = Bucket(delta.infos, self._buffer), Bucket(self._sent[number], self._files_buffer)
        positions, words = delta.positions.long(), bucket.buffer.view(torch.int16)
        words.zero_()
        words[positions] = 1
        target.buffer.zero_()
        found = self._in_files(bucket, target).buffer.view(torch.int16).nonzero().view(-1)
        words[positions] = delta.values
        values = self._in_files(bucket, target).buffer.view(torch.int16)[found]
        return BucketDelta.of_words(target.infos, found, values)

    def _run_on_all(self, step: Callable[[], int | None]) -> list[int | None]:
        """Run ``step`` on all trainers, and return what each returned. If it fails on one of them, all raise."""

        def counted() -> int:
            found = step()
            return 0 if found is None else 1 + found

        try:
            told = self._ranks.agree(counted)
        except RemoteRankError as error:
            raise WeightTransferError(f"trainer {error.rank}: {error.text}", error.ranks) from error
        except (WeightTransferError, LostRankError):
            raise
        except Exception as error:
            raise WeightTransferError(f"weights were not published: {type(error).__name__}: {error}") from error
        return [each - 1 if each else None for each in told]


# -- names in a model's files: transformers joins some tensors in memory, such as those of experts --------------------


def tensors_in_files(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some of a model's tensors as its files have them: cut, and under other names, where transformers joins them."""
    conversions: Any = sys.modules.get("transformers.core_model_loading")
    models: Any = sys.modules.get("transformers.modeling_utils")
    if conversions is None or models is None or not isinstance(model, models.PreTrainedModel):
        return dict(tensors)
    return conversions.revert_weight_conversion(model, dict(tensors))


def infos_in_files(model: nn.Module, buckets: Sequence[Sequence[WeightInfo]]) -> list[list[WeightInfo]]:
    """Each bucket's tensors as its files have them.

    Raises:
        WeightTransferError: some in a file are made of tensors in several buckets.
    """
    listed = [_converted(model, infos) for infos in buckets]
    together = _converted(model, [info for infos in buckets for info in infos])
    if {info.name: info.shape for infos in listed for info in infos} != {info.name: info.shape for info in together}:
        raise WeightTransferError(
            f"tensors of {type(model).__name__} are joined in its files that are in several buckets here; set a larger "
            "roles.rollout.bucket_mib"
        )
    return listed


def _converted(model: nn.Module, infos: Sequence[WeightInfo]) -> list[WeightInfo]:
    tied = {info.name: info.names for info in infos}
    described = {info.name: torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos}
    found = tensors_in_files(model, described)
    return [WeightInfo(tied.get(name, (name,)), tuple(t.shape), t.dtype) for name, t in found.items()]

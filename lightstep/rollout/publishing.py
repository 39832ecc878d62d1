"""Publishing: how a model is sent, one set of its weights, and sets that are sent while training goes on.

With ``wait=False`` the loop copies the weights, and a thread sends them. Each trainer copies its own shards, cast to
the dtype in which they are sent, behind what its training stream has queued. A shard that several trainers have is
copied by the first of them. On an accelerator that is a copy on the device, which takes milliseconds, and is made
before anything that training queues next; another stream brings it to the host, and the thread queues that. The first
trainer puts one bucket at a time together. It maps the memory that trainers on its host have; the others send it their
shards over a process group of the threads.

One set is on its way at a time. Another one waits for it, or with ``replace`` is copied beside it, and is replaced by
a third one that comes before it has been begun. All trainers decide alike: the first one's threads tell whether the
set that waits has been begun.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint.background import Pending, start_thread, thread_group
from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.huggingface import find_senders
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import Ranks, RemoteRankError, gather_tensor, layout_of, local_tensor
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
    changed_words,
    has_words,
    joined,
    shard_in_bucket,
)
from lightstep.sharding.dtypes import planned_by_tensor
from lightstep.sharding.model_names import NamedTensor, named_tensors
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostMemoryError, HostSlab
from lightstep.state.shared_memory import Address, SharedMemory

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

_NOTHING, _FAILED = -1, -2
"""What ranks tell each other of a step that returned ``None``, or failed; else what it returned."""


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
        """Run ``step`` on all ranks, and return what each of them returned. If it fails on one of them, all raise."""
        error: BaseException | None = None
        found = None
        try:
            found = step()
        except BaseException as caught:
            error = caught
        told = self._ranks.gather_integer(_FAILED if error is not None else _NOTHING if found is None else found)
        if _FAILED in told:
            self._raise_on_all(error)
        return [None if each == _NOTHING else each for each in told]

    def _raise_on_all(self, error: BaseException | None) -> None:
        """Raise this rank's error, or that of the first rank that has one."""
        text = f"{type(error).__name__}: {error}"
        told = self._ranks.gather(None if error is None else (text, getattr(error, "ranks", ())))
        if isinstance(error, WeightTransferError) or (error is not None and not isinstance(error, Exception)):
            raise error
        if error is not None:
            raise WeightTransferError(f"weights were not published: {text}") from error
        trainer, failure = next((trainer, failure) for trainer, failure in enumerate(told) if failure is not None)
        raise WeightTransferError(f"trainer {trainer}: {failure[0]}", failure[1])


# -- names in a model's files: transformers joins some tensors in memory, such as those of experts --------------------


def tensors_in_files(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some of a model's tensors as its files have them: cut, and under other names, where transformers joins them."""
    conversions: Any = sys.modules.get("transformers.core_model_loading")
    models: Any = sys.modules.get("transformers.modeling_utils")
    if conversions is None or models is None or not isinstance(model, models.PreTrainedModel):
        return dict(tensors)
    found: dict[str, Tensor] = conversions.revert_weight_conversion(model, dict(tensors))
    return found


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


# -- copies of a model's weights ---------------------------------------------------------------------------------------

_LARGEST = 2**31
"""Bytes of a bucket from which on it is sent whole."""


def staging_memory(is_shared: bool) -> HostCopyPool:
    """Host memory for one set at a time."""
    what = "copying weights that are published while training goes on"
    return HostCopyPool(what, "wait=True needs no copy", is_shared)


class MappedMemory:
    """Memory of other trainers on this host, page-locked for a device. It is kept for the next set."""

    def __init__(self) -> None:
        self._slabs: dict[Address, HostSlab | None] = {}  # None: it cannot be mapped

    def view(self, place: tuple[Address, int], nbytes: int, device: torch.device) -> Tensor | None:
        """``nbytes`` of another trainer's memory, as 1-D uint8; ``None`` if this process cannot map it."""
        address, start = place
        if address not in self._slabs:
            self._slabs[address] = self._mapped(address, device)
        slab = self._slabs[address]
        return None if slab is None else slab.tensor(torch.uint8, nbytes, start)

    def _mapped(self, address: Address, device: torch.device) -> HostSlab | None:
        shared = SharedMemory.find(address)
        try:
            return None if shared is None else HostSlab(address.nbytes, device=device, shared=shared)
        except HostMemoryError:
            return None


class StagedWeights(WeightSource):
    """Copies of this trainer's shards. Created by all trainers, without waiting for a device.

    Args:
        published: the model.
        pool: where the copies are. What it held before is overwritten.
        replaced: a set that is replaced by this one, and is not sent.
        for_deltas: the set may be sent as a delta, or be the base of some.
        ranks: the trainers, in a group that nothing else uses now.
        gathering: the trainers, in the group of the thread that sends.

    Raises:
        HostMemoryError: there is not enough memory for the copies.
        RemoteRankError: another trainer has not enough.

    Attributes:
        pool: as given.
        origin: the device of the model.
        set_id: identifies the set on the first trainer.
        base: an earlier set, to which :meth:`delta` gives deltas.
    """

    def __init__(
        self,
        published: PublishedModel,
        pool: HostCopyPool,
        ranks: Ranks,
        gathering: Ranks,
        for_deltas: bool = False,
        replaced: StagedWeights | None = None,
    ) -> None:
        super().__init__(published, torch.device("cpu"))
        self.pool, self.origin, self._ranks = pool, published.device, gathering
        self._parts = published.plan.parts
        self.set_id = uuid.uuid4().hex
        self.base: StagedWeights | None = None
        self._own: list[Bucket] = []
        self._on_device: deque[tuple[int, Tensor]] = deque()  # copies there, by bucket
        self._brought: dict[int, Any] = {}  # events
        self._bringing = threading.Lock()
        self._changed: tuple[Tensor, Tensor] | None = None  # positions in the compared bucket's own shards, and words
        self._incoming = self._landing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._mapped: dict[int, list[Tensor | None]] = {}  # the others' parts, by trainer and bucket
        self._is_mapped = False  # the first trainer reads this one's parts
        own = [[part.shard for part in parts[ranks.rank]] for parts in self._parts]
        sizes = [Bucket.nbytes_of(shards) for shards in own]
        ranks.agree(lambda: _reserve(pool, sum(sizes)))
        ranks.agree(lambda: self._copy(published, own, sizes))
        self._changes, self._known = published.changes(ranks.rank) if for_deltas and any(sizes) else (None, {})
        if self._changes is not None and replaced is not None and replaced._changes is not None:
            self._changes = self._changes.joined_to(replaced._changes)

    @torch.no_grad()
    def _copy(self, published: PublishedModel, own: Sequence[Sequence[WeightInfo]], sizes: Sequence[int]) -> int:
        tensors = {info.name: local_tensor(named.tensor).detach() for info, named in published.named.items()}
        has_room = published.device.type != "cpu"
        for number, (shards, size) in enumerate(zip(own, sizes, strict=True)):
            bucket = Bucket(shards, self.pool.allocate_bytes(size, published.device))
            memory = _device_memory(size, published.device) if has_room and size else None
            if memory is not None:
                _fill(Bucket(shards, memory), tensors)
                self._on_device.append((number, memory))
            elif size:
                has_room = False
                self.pool.wait_for_background()  # it may still write what another set left there
                _fill(bucket, tensors)
            self._own.append(bucket)
        self._filled = self.pool.seal()
        return 0

    def bring(self) -> None:
        """Queue the copies from the device to the host, if they are not. Any thread may call this."""
        with self._bringing:
            while self._on_device:
                number, memory = self._on_device[0]
                self._brought[number] = self.pool.bring(self._own[number].buffer, memory, self._filled)
                self._on_device.popleft()

    def _wait_for(self, number: int) -> None:
        """Until a bucket is on the host."""
        self.bring()
        if number in self._brought:
            self._brought[number].synchronize()
        else:
            self.pool.wait_for(self._own[number].buffer)

    def share(self, memory: MappedMemory) -> None:
        """Map the parts of trainers on this host, on the first one. Called by the threads of all trainers."""
        places = [self.pool.place_of(own.buffer) if own.infos else None for own in self._own]
        told = self._ranks.gather(places)
        if self._ranks.is_first:
            with suppress(Exception):  # the others wait for an answer: what is not mapped is sent
                for trainer, listed in enumerate(told[1:], start=1):
                    views = self._views(trainer, listed, memory)
                    if views is not None:
                        self._mapped[trainer] = views
        self._is_mapped = self._ranks.rank in self._ranks.gather(list(self._mapped))[0]

    def _views(
        self, trainer: int, places: Sequence[tuple[Address, int] | None], memory: MappedMemory
    ) -> list[Tensor | None] | None:
        """A trainer's part of each bucket; ``None`` if this process cannot map all of them."""
        views: list[Tensor | None] = []
        for parts, place in zip(self._parts, places, strict=True):
            nbytes = Bucket.nbytes_of(part.shard for part in parts[trainer])
            view = None if place is None else memory.view(place, nbytes, self.origin)
            if nbytes and view is None:
                return None
            views.append(view)
        return views

    def moved(self, buffer: Tensor) -> Tensor:
        if all(map(self._has_whole, range(len(self.buckets)))):
            return buffer
        sizes = [Bucket.nbytes_of(p.shard for p in listed) for parts in self._parts for listed in parts]
        try:
            landing = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.origin)
            buffer = torch.empty_like(buffer, device=self.origin)
        except torch.OutOfMemoryError:
            return buffer
        self._landing = landing
        return buffer

    def prepare(self, number: int, compares: bool) -> int | None:
        self._wait_for(number)
        return self._compare(number) if compares else None

    def bucket(self, number: int, buffer: Tensor | None) -> Bucket | None:
        own, self._changed = self._own[number], None
        if buffer is None:
            if own.infos and not self._is_mapped:
                dist.send(own.buffer, group=self._ranks.group, group_dst=0)
            return None
        if self._has_whole(number):
            return own
        bucket = Bucket(self.buckets[number], buffer)
        tensors = dict(bucket)
        for listed, part in zip(self._parts[number], self._gathered(number), strict=True):
            if listed and part is not None:
                shards = Bucket([each.shard for each in listed], self._near(part, buffer.device))
                targets = [tensors[each.info][each.region] for each in listed]
                torch._foreach_copy_(targets, [shard for _, shard in shards])
        return bucket

    def _has_whole(self, number: int) -> bool:
        """Whether the first trainer needs no other one for a bucket."""
        return [part.shard for part in self._parts[number][0]] == list(self.buckets[number])

    def _gathered(self, number: int) -> Iterator[Tensor | None]:
        """Every trainer's part of a bucket, on the first one's host; ``None``: it has none."""
        sizes = [Bucket.nbytes_of(part.shard for part in listed) for listed in self._parts[number]]
        others = range(1, self._ranks.size)
        received = self._received({trainer: sizes[trainer] for trainer in others if trainer not in self._mapped})
        yield self._own[number].buffer
        for trainer in others:
            yield self._mapped[trainer][number] if trainer in self._mapped else next(received)

    def _received(self, nbytes: Mapping[int, int]) -> Iterator[Tensor]:
        """What other trainers send, so many bytes each. All of them send at the same time."""
        total = sum(nbytes.values())
        if len(self._incoming) < total:
            self._incoming = torch.empty(total, dtype=torch.uint8, device="cpu")
        places = self._incoming[:total].split(list(nbytes.values())) if nbytes else ()
        arriving = [
            (place, dist.irecv(place, group=self._ranks.group, group_src=trainer) if len(place) else None)
            for trainer, place in zip(nbytes, places, strict=True)
        ]
        for place, work in arriving:
            if work is not None:
                work.wait()
            yield place

    def _near(self, part: Tensor, device: torch.device) -> Tensor:
        """A part on the device where its bucket is put together."""
        if device == part.device:
            return part
        landing = self._landing[: len(part)]
        self.pool.load(landing, part)
        return landing

    # -- deltas

    def can_follow(self, base: StagedWeights) -> bool:
        """Whether this trainer has the same parts of the same tensors as in ``base``, and can find what changed."""
        return self._parts == base._parts and (base.keeps_weights or self._has_changes_since(base))

    def give_up_memory(self) -> list[HostCopyPool]:
        """The memory of the copies, unless it was given up before. They are not read any more."""
        if not self._own:
            return []
        self._own = []
        if self._changes is not None:
            self._changes = self._changes.without_bits()
        return [self.pool]

    def _has_changes_since(self, base: StagedWeights) -> bool:
        return self._changes is not None and base._changes is not None and self._changes.follow(base._changes)

    @property
    def keeps_weights(self) -> bool:
        """Whether the copies are needed when this set is the base: the next one may have to be compared with it."""
        return self._changes is None

    def _compare(self, number: int) -> int | None:
        """A GPU compares, if it has room."""
        assert self.base is not None
        self._changed, infos = None, self.buckets[number]
        nbytes = Bucket.nbytes_of(infos)
        if not has_words(infos) or nbytes >= _LARGEST:
            return None
        most = nbytes // BucketDelta.nbytes_of(1)
        if self._has_changes_since(self.base):
            return self._find_changes(number, most)
        own, before = self._own[number].buffer, self.base._own[number].buffer
        try:
            self._changed = changed_words(own, before, self.origin, most)
        except torch.OutOfMemoryError:
            self._changed = changed_words(own, before, own.device, most)
        return None if self._changed is None else len(self._changed[0])

    def _find_changes(self, number: int, most: int) -> int | None:
        """:meth:`_compare`, by the bits that updates have set."""
        assert self._changes is not None
        own, device = self._own[number], self.origin
        listed = [torch.empty(0, dtype=torch.int64, device=device)]
        for shard, start in own.starts():
            words = shard.nbytes // 2
            if shard.name in self._known:
                found = self._changes.places_in(self._known[shard.name], words, device)
            else:
                found = torch.arange(words, device=device)
            listed.append(found + start // 2)
        if sum(map(len, listed)) > most:
            return None
        positions = torch.cat(listed)
        self._changed = positions.int(), own.buffer.view(torch.int16).to(device)[positions]
        return len(positions)

    def delta(self, number: int, changed: Sequence[int], is_sender: bool) -> BucketDelta | None:
        assert self._changed is not None
        infos, (positions, words) = self.buckets[number], self._changed
        self._changed = None
        own = BucketDelta.of_words(infos, self._in_bucket(number, positions), words)
        if not is_sender:
            if own.changed:
                dist.send(own.buffer.cpu(), group=self._ranks.group, group_dst=0)
            return None
        sent = {trainer: BucketDelta.nbytes_of(count) for trainer, count in enumerate(changed) if trainer and count}
        received = [part.to(own.buffer.device, copy=True) for part in self._received(sent)]
        deltas = [own, *(BucketDelta(infos, part) for part in received)]
        return joined(infos, deltas) if len(deltas) > 1 else own

    def _in_bucket(self, number: int, positions: Tensor) -> Tensor:
        """Positions of words in this trainer's shards of a bucket, ascending, as positions in the whole bucket."""
        infos, parts = self.buckets[number], self._parts[number][self._ranks.rank]
        own = Bucket([part.shard for part in parts], self._incoming)
        if not parts or list(own.infos) == list(infos):
            return positions
        firsts = [start // 2 for _, start in own.starts()]
        starts = dict(Bucket(infos, self._incoming).starts())
        cuts = torch.searchsorted(positions, positions.new_tensor(firsts)).tolist()
        pieces = positions.tensor_split(cuts[1:])
        return torch.cat(
            [
                shard_in_bucket(piece - first, starts[part.info], part.info, part.region, part.shard.shape)
                for piece, first, part in zip(pieces, firsts, parts, strict=True)
            ]
        )


def _device_memory(nbytes: int, device: torch.device) -> Tensor | None:
    """``None`` if there is no room: the copies are then made to the host at once, and training waits for the link."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def _fill(bucket: Bucket, tensors: Mapping[str, Tensor]) -> None:
    pairs = [(target, tensors[shard.name]) for shard, target in bucket]
    if not pairs:
        return
    bucket.zero_gaps()
    targets, sources = zip(*pairs, strict=True)
    if bucket.buffer.device != sources[0].device:  # cast there, and copy what is smaller
        sources = tuple(source.to(target.dtype) for target, source in pairs)
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _reserve(pool: HostCopyPool, nbytes: int) -> int:
    pool.reset()
    pool.reserve(nbytes)
    return 0


# -- sets --------------------------------------------------------------------------------------------------------------


class _Set:
    """A set that was copied.

    Attributes:
        begun: its thread sends it; before that it may be replaced.
        dropped: it is not sent: its copy broke off.
    """

    def __init__(self, version: int, staged: StagedWeights, transport: WeightTransport | None) -> None:
        self.version, self.staged, self.transport = version, staged, transport
        self.begun = self.dropped = False
        self.pending: Pending[PublishedWeights | None] = Pending()


class Publisher:
    """Sends sets of weights, each from a thread. Created and called by all trainers in one order."""

    def __init__(self) -> None:
        self._loop_ranks = thread_group(Ranks(), "publishing, in the loop")
        self._thread_ranks = thread_group(Ranks(), "publishing, in the thread")
        self._changed = threading.Condition()
        self._holds = False  # the loop replaces the set that waits; no thread begins to send it
        self._sets: list[_Set] = []  # whose results nobody has asked for
        self._free: list[HostCopyPool] = []
        self._memory = MappedMemory()
        self._last: PublishedWeights | None = None
        self._base: StagedWeights | None = None  # the last set, if its receivers keep it
        self._stream: torch.cuda.Stream | None = None

    def wait(self) -> PublishedWeights | None:
        """Wait for all sets. Returns the last one that was sent.

        Raises:
            WeightTransferError: one was not sent. It is raised once.
        """
        for each in self._sets:
            each.pending.join()
        self._collect()
        return self._last

    def _collect(self) -> None:
        """Forget the sets that have been sent. Raises the error of one that has not."""
        while self._sets and self._sets[0].pending.done():
            self._last = self._sets.pop(0).pending.result() or self._last

    def publish(
        self,
        model: Callable[[Ranks], PublishedModel],
        version: int,
        transport: WeightTransport | None,
        replace: bool,
    ) -> None:
        """Copy a model's weights, and send them from a thread.

        Args:
            model: called by the trainers when the weights are about to be copied.
            replace: do not wait for a set that is on its way.

        Raises:
            WeightTransferError: an earlier set was not sent. Nothing was copied.
            HostMemoryError: there is not enough memory for the copies.
        """
        try:
            self._loop_ranks.agree(lambda: self._arrive(replace))
            published = model(self._loop_ranks)
            try:
                if self._hold():
                    self._replace(self._sets[-1], published, version, transport)
                else:
                    self._start(published, version, transport)
            finally:
                self._hold_threads(False)
        except RemoteRankError as error:
            raise WeightTransferError(f"weights were not published: {error}") from error

    def _arrive(self, replace: bool) -> int:
        if replace:
            self._collect()
        else:
            self.wait()
        return 0

    def _hold(self) -> bool:
        """Whether nobody has begun to send the last set. Nobody does then, until all trainers have replaced it."""
        last = self._sets[-1] if self._sets else None
        with self._changed:
            self._holds = self._loop_ranks.is_first and last is not None and not last.begun
        holds = bool(self._loop_ranks.gather_integer(self._holds)[0])
        self._hold_threads(holds)
        return holds

    def _hold_threads(self, holds: bool) -> None:
        with self._changed:
            self._holds = holds
            self._changed.notify_all()

    def _replace(
        self, waiting: _Set, published: PublishedModel, version: int, transport: WeightTransport | None
    ) -> None:
        waiting.staged.bring()  # its thread uses the memory no more
        try:
            waiting.staged = self._staged(published, waiting.staged.pool, transport, waiting.staged)
        except BaseException:
            waiting.dropped = True
            raise
        waiting.staged.bring()
        waiting.version, waiting.transport = version, transport

    def _start(self, published: PublishedModel, version: int, transport: WeightTransport | None) -> None:
        with self._changed:
            pool = self._free.pop() if self._free else staging_memory(self._loop_ranks.size > 1)
        previous = self._sets[-1] if self._sets else None
        try:
            new = _Set(version, self._staged(published, pool, transport), transport)
        except BaseException:
            with self._changed:
                self._free.append(pool)
            raise
        start_thread(new.pending, lambda: self._send(new, previous), ExitStack(), "lightstep-publisher")
        self._sets.append(new)

    def _staged(
        self,
        published: PublishedModel,
        pool: HostCopyPool,
        transport: WeightTransport | None,
        replaced: StagedWeights | None = None,
    ) -> StagedWeights:
        for_deltas = bool(self._loop_ranks.gather_integer(transport is not None and transport.deltas)[0])
        return StagedWeights(published, pool, self._loop_ranks, self._thread_ranks, for_deltas, replaced)

    # -- in the thread

    def _send(self, item: _Set, previous: _Set | None) -> PublishedWeights | None:
        with suppress(Exception):  # reading a bucket tries again, where all trainers hear of an error
            item.staged.bring()
        if previous is not None:
            previous.pending.join()
        keeps = self._begin(item)
        staged, done = item.staged, None
        try:
            if not item.dropped:
                with self._own_stream(staged.origin):
                    done = self._publication(item, keeps).send(item.version)
            return done
        finally:
            staged.base = None
            if not item.dropped:
                self._keep(staged if keeps and done is not None else None, staged)

    def _begin(self, item: _Set) -> bool:
        """Whether the set's receivers keep it for deltas."""
        if self._thread_ranks.is_first:
            with self._changed:
                self._changed.wait_for(lambda: not self._holds)
                item.begun = True
        # the first trainer's thread decides when; on others the loop may just be replacing the set
        keeps = self._thread_ranks.gather_integer(item.transport is not None and item.transport.deltas)[0]
        with self._changed:
            self._changed.wait_for(lambda: not self._holds)
        return bool(keeps)

    def _publication(self, item: _Set, keeps: bool) -> Publication:
        staged, base = item.staged, self._base
        if self._thread_ranks.size > 1:
            staged.share(self._memory)
        if keeps:
            follows = base is not None and staged.can_follow(base)
            staged.base = base if all(self._thread_ranks.gather_integer(follows)) else None
            if item.transport is not None:
                item.transport.identify(staged.set_id, None if staged.base is None else staged.base.set_id)
        return Publication(staged, item.transport, self._thread_ranks)

    def _keep(self, base: StagedWeights | None, sent: StagedWeights) -> None:
        """Keep what was sent as the base of deltas, or nothing. After a failure nobody knows what receivers hold."""
        with self._changed:
            if self._base is not None:
                memory = self._base.give_up_memory()
                self._free += (
                    memory if base is None or base.keeps_weights else []
                )  # one copy less is needed from now on
            if base is None or not base.keeps_weights:
                self._free += sent.give_up_memory()
            self._base = base

    def _own_stream(self, device: torch.device) -> torch.cuda.StreamContext:
        """A stream of the threads' own: their work does not wait for what training has queued.

        It is kept: memory that was allocated for one stream is not used again for another one.
        """
        if device.type != "cuda":
            return torch.cuda.stream(None)
        self._stream = self._stream or torch.cuda.Stream(device, priority=-1)
        return torch.cuda.stream(self._stream)

"""Publishing while training goes on: copies of a model's weights, and threads that send them.

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

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightstep.checkpoint.background import Pending, start_thread, thread_group
from lightstep.distributed import Ranks, RemoteRankError, local_tensor
from lightstep.rollout.publishing import Publication, PublishedModel, PublishedWeights, WeightSource
from lightstep.rollout.transport import (
    Bucket,
    BucketDelta,
    WeightInfo,
    WeightTransferError,
    WeightTransport,
    changed_words,
    has_words,
    joined,
    shard_in_bucket,
)
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostMemoryError, HostSlab
from lightstep.state.shared_memory import Address, SharedMemory

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
            self._slabs[address] = None
            with suppress(HostMemoryError):
                if (shared := SharedMemory.find(address)) is not None:
                    self._slabs[address] = HostSlab(address.nbytes, device=device, shared=shared)
        slab = self._slabs[address]
        return None if slab is None else slab.tensor(torch.uint8, nbytes, start)


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
        pool.reset()
        ranks.agree(lambda: pool.reserve(sum(sizes)))
        ranks.agree(lambda: self._copy(published, own, sizes))
        self._changes, self._known = published.changes(ranks.rank) if for_deltas and any(sizes) else (None, {})
        if self._changes is not None and replaced is not None and replaced._changes is not None:
            self._changes = self._changes.joined_to(replaced._changes)

    @torch.no_grad()
    def _copy(self, published: PublishedModel, own: Sequence[Sequence[WeightInfo]], sizes: Sequence[int]) -> None:
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
        self._collect(waits=True)
        return self._last

    def _collect(self, waits: bool) -> None:
        """Forget the sets that have been sent. Raises the error of one that has not."""
        for each in self._sets if waits else ():
            each.pending.join()
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
            self._loop_ranks.agree(lambda: self._collect(waits=not replace))
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

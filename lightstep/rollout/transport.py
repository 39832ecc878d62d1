"""What is published: tensors in buckets, whole or what changed in them; the interface for transports that send it; and
the process group by which ours do.

A bucket's buffer counts as words of 2 bytes. A delta has the positions of changed words and their new values, 6 bytes
for each: absolute values, so that a word too many does no harm. Every set has an identifier of its own. A receiver
applies a delta only to the complete set that the delta names, which it keeps in host memory.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightstep.distributed import let_gloo_finish_at_exit
from lightstep.sharding.model_names import NamedTensor
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.lanes import LanesOfDevices


class WeightTransferError(RuntimeError):
    """Weights could not be sent or loaded.

    Attributes:
        ranks: the rollout workers that failed or did not answer, as ranks of the default process group.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TrainingEnded(Exception):
    """The trainers have closed their strategy or died. No further weights will be published."""


@dataclass(frozen=True)
class WeightInfo:
    """Describes one tensor of a set.

    Attributes:
        names: the trained model's names for it; several if weights are tied.
        shape: of the whole tensor.
        dtype: the one in which it is sent.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, named: NamedTensor, dtype: torch.dtype | None = None) -> WeightInfo:
        """The description of a model's tensor, which is sent in ``dtype`` if given."""
        return cls(named.names, tuple(named.tensor.shape), dtype or named.tensor.dtype)

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def as_json(self) -> list[Any]:
        """As plain values."""
        return [list(self.names), list(self.shape), str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> WeightInfo:
        """From :meth:`as_json`."""
        names, shape, dtype = values
        return cls(tuple(names), tuple(shape), getattr(torch, dtype))

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Bucket:
    """Tensors that are sent together in one buffer.

    Iterating yields each tensor's :class:`WeightInfo` and the tensor itself, a view of :attr:`buffer`.

    Args:
        infos: the tensors in the bucket.
        buffer: 1-D uint8, with at least :meth:`nbytes_of` ``infos`` bytes. The rest of it is not used.

    Attributes:
        infos: the tensors in the bucket.
        buffer: 1-D uint8: the bytes to send.
    """

    def __init__(self, infos: Sequence[WeightInfo], buffer: Tensor) -> None:
        self.infos = infos
        self.buffer = buffer[: self.nbytes_of(infos)]

    @staticmethod
    def nbytes_of(infos: Iterable[WeightInfo]) -> int:
        """The bytes of a buffer for these tensors."""
        return sum(-(-info.nbytes // _ALIGNMENT) * _ALIGNMENT for info in infos)

    def __iter__(self) -> Iterator[tuple[WeightInfo, Tensor]]:
        for info, start in self.starts():
            yield info, self.buffer[start : start + info.nbytes].view(info.dtype).view(info.shape)

    def starts(self) -> Iterator[tuple[WeightInfo, int]]:
        """Each tensor's description, and its first byte in the buffer."""
        start = 0
        for info in self.infos:
            yield info, start
            start += -(-info.nbytes // _ALIGNMENT) * _ALIGNMENT

    def zero_gaps(self) -> None:
        """Zero what is between tensors, so that buckets with equal tensors have equal bytes."""
        for info, start in self.starts():
            gap = -info.nbytes % _ALIGNMENT
            if gap:
                self.buffer[start + info.nbytes :][:gap].zero_()


_ALIGNMENT = 16  # bytes


class BucketDelta:
    """What changed in a bucket since an earlier set. :attr:`buffer` has the bytes to send.

    Args:
        infos: the tensors in the bucket.
        buffer: 1-D uint8: the positions, then the values.

    Attributes:
        infos: the tensors in the bucket.
        buffer: as given.
        changed: how many words of 2 bytes changed.
        positions: of these words in the bucket's buffer, int32.
        values: the words, int16.
    """

    def __init__(self, infos: Sequence[WeightInfo], buffer: Tensor) -> None:
        self.infos, self.buffer = infos, buffer
        self.changed = len(buffer) // self.nbytes_of(1)

    @staticmethod
    def nbytes_of(changed: int) -> int:
        """The bytes of a delta of so many words."""
        return 6 * changed

    @classmethod
    def of_words(cls, infos: Sequence[WeightInfo], positions: Tensor, values: Tensor) -> BucketDelta:
        """From positions (any integers) and values (int16)."""
        buffer = torch.cat([positions.int().view(torch.uint8), values.contiguous().view(torch.uint8)])
        return cls(infos, buffer)

    @property
    def positions(self) -> Tensor:
        return self.buffer[: 4 * self.changed].view(torch.int32)

    @property
    def values(self) -> Tensor:
        return self.buffer[4 * self.changed :].view(torch.int16)


class WeightTransport(ABC):
    """Sends sets of weights, one at a time, from the first trainer to engines, for example to a vLLM server.

    For each set ``begin`` is called, then ``send`` for every bucket in order, then ``finish``. If one of them or
    anything else fails, ``abort`` is called, and nothing more for that set. Any error that they raise becomes an error
    on all trainers. A transport needs timeouts of its own for receivers that have died.

    Attributes:
        uses_file_names: tensors are sent as the model's files have them. transformers joins some in memory, such as
            those of experts.
        deltas: the receivers keep each set, and get what changed since the last one. Sets have identifiers then: see
            :meth:`identify`.
        accepts_deltas: read after ``begin``: every receiver holds the set to which deltas were announced.
        takes_device: read after ``begin``: buckets that are put together from several trainers' shards may be on the
            trainer's device with ``wait=False``, too.
    """

    uses_file_names: ClassVar[bool] = False
    deltas: bool = False
    accepts_deltas: bool = False
    takes_device: bool = False

    @abstractmethod
    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        """Announce a set: check that the receivers can load it. Nothing is written yet."""

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Send the next tensors. They are whole, and valid until this returns.

        They are on the trainer's device. With ``publish_weights(wait=False)`` they are on the host, unless
        :attr:`takes_device`, and all methods are called by a thread.
        """

    def identify(self, set_id: str, base: str | None) -> None:  # noqa: B027  (most transports send whole sets)
        """Called before ``begin`` if there are :attr:`deltas`.

        Args:
            set_id: of the set that is sent; no other one has it.
            base: the set to which buckets may be deltas; ``None``: all buckets will be whole.
        """

    def send_delta(self, delta: BucketDelta) -> None:
        """Instead of ``send``, if :attr:`accepts_deltas`."""
        raise NotImplementedError

    @abstractmethod
    def finish(self) -> None:
        """End the set. Returns when every receiver has all of it."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the set without completing it. Called after ``begin``, even if that raised. Should not raise."""


def buckets_of(infos: Sequence[WeightInfo], layers: Sequence[str], limit: float) -> list[list[WeightInfo]]:
    """Divide tensors into buckets: consecutive tensors of one layer, together at most ``limit`` bytes, or a single one.

    Args:
        layers: the layer of each of ``infos``.
    """
    buckets: list[list[WeightInfo]] = []
    nbytes, current = 0, None
    for info, layer in zip(infos, layers, strict=True):
        if layer != current or nbytes + info.nbytes > limit:
            buckets.append([])
            nbytes, current = 0, layer
        buckets[-1].append(info)
        nbytes += info.nbytes
    return buckets


def refuse_mismatch(offered: Sequence[WeightInfo], expected: Sequence[WeightInfo]) -> None:
    """Compare a set with the tensors that an engine expects.

    Raises:
        ValueError: tensors are missing, unknown, or have another shape or dtype; the message names the first ones.
    """
    targets = {name: info for info in expected for name in info.names}
    filled: dict[WeightInfo, str] = {}
    found: list[str] = []
    for info in offered:
        wanted = dict.fromkeys(targets[name] for name in info.names if name in targets)
        if not wanted:
            found.append(f"{info} is published and unknown to the engine")
        for target in wanted:
            if (target.shape, target.dtype) != (info.shape, info.dtype):
                found.append(f"{info} is published, and the engine has {target}")
            elif filled.setdefault(target, info.name) != info.name:
                found.append(f"{filled[target]} and {info.name} are published, and are one tensor in the engine")
    known = {name for info in offered for name in info.names}
    found += [f"the engine has {info}, which is not published" for info in expected if known.isdisjoint(info.names)]
    if found:
        raise ValueError(f"{'; '.join(found[:3])}{f'; {len(found) - 3} more' if len(found) > 3 else ''}")


# -- deltas ------------------------------------------------------------------------------------------------------------

_WORD = 2
_PIECE = 1 << 25
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
        self._pool = HostCopyPool("keeping the last set of weights for deltas", "Servers without deltas need none")
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
            self._clear()
        self.set_id, self._receiving, self._has_last = None, set_id, False

    def forget(self) -> None:
        """A set begins that is not kept."""
        self.set_id = self._receiving = None
        self._clear()

    def _clear(self) -> None:
        self._buffers.clear()
        self._pool.reset()

    def keep(self, bucket: Bucket, is_last: bool) -> None:
        """A bucket arrived whole."""
        key = tuple(info.name for info in bucket.infos)
        if key not in self._buffers or len(self._buffers[key]) != len(bucket.buffer):
            self._buffers[key] = self._pool.allocate_bytes(len(bucket.buffer), bucket.buffer.device)
        self._buffers[key].copy_(bucket.buffer)
        self._has_last = is_last

    def apply(self, infos: Sequence[WeightInfo], data: Tensor, is_last: bool) -> Bucket:
        """The whole bucket, of which ``data`` is the delta's, on the device of ``data``. An engine may keep it."""
        key = tuple(info.name for info in infos)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) != Bucket.nbytes_of(infos):
            raise RuntimeError(f"a delta to a bucket that is not here: {key[0]}, ...")
        delta, whole = BucketDelta(infos, data), buffer.to(data.device, copy=True)
        whole.view(torch.int16)[delta.positions.long()] = delta.values
        buffer.copy_(whole)
        self._has_last = is_last
        return Bucket(infos, whole)

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
        return held.apply(infos, data, place.is_last)
    bucket = Bucket(infos, torch.empty(Bucket.nbytes_of(infos), dtype=torch.uint8, device=link.device))
    link.broadcast(bucket.buffer)
    if place.set_id:
        held.keep(bucket, place.is_last)
    return bucket


def has_words(infos: Sequence[WeightInfo]) -> bool:
    """Whether every element consists of whole words."""
    return all(info.dtype.itemsize % _WORD == 0 for info in infos)


def changed_words(buffer: Tensor, base: Tensor, device: torch.device, most: int) -> tuple[Tensor, Tensor] | None:
    """The words that differ between two buffers: positions (int32, ascending), and the words in the first (int16).

    ``None``: more than ``most`` differ.

    Args:
        device: where they are compared piece by piece, and where the results are.
    """
    positions, words, count = [], [], 0
    pieces = zip(buffer.view(torch.int16).split(_PIECE), base.view(torch.int16).split(_PIECE), strict=True)
    for number, (own, other) in enumerate(pieces):
        here = own.to(device, non_blocking=True)
        found = (here != other.to(device, non_blocking=True)).nonzero().view(-1)
        count += len(found)
        if count > most:
            return None
        positions.append((found + number * _PIECE).int())
        words.append(here[found])
    return torch.cat(positions), torch.cat(words)


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


# -- the process group of the first trainer and rollout workers, which may fail without affecting any other group ------

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

CHANNELS = 8
"""Of NCCL: each takes a multiprocessor of a GPU while a broadcast is under way, or waits for another member."""

_POLL = 0.001
"""Seconds. Each look takes the interpreter from the training loop."""


class WeightLink:
    """Broadcasts from its first member to the others. It is not registered with ``torch.distributed``.

    If a member dies, the others' next broadcast raises: with gloo at once, with NCCL after ``timeout``. (NCCL's own
    watchdog, which would end the process, is off.)

    Broadcasts leave the processors of a GPU to what it computes: those of NCCL use :data:`CHANNELS` of them, or as many
    as NCCL likes where another member is not of this class.

    Args:
        number: identifies the link; the same for all members.
        store: for the rendezvous of this link only.
        rank: this process's rank in the link; rank 0 sends.
        size: the number of members.
        device: of the tensors that are sent.
        timeout: seconds for one broadcast.
        own_kind: all members are of this class.
    """

    def __init__(
        self,
        number: int,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        own_kind: bool = True,
    ) -> None:
        self.number, self.device = number, device
        self._timeout = timeout
        self._connected = False
        self._lanes = LanesOfDevices(small_pieces=True)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        limit = datetime.timedelta(seconds=timeout)
        self._group: Any
        if device.type == "cpu":
            let_gloo_finish_at_exit()
            self._group = dist.ProcessGroupGloo(store, rank, size, limit)
            return
        with _without_nccl_error_handling():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit * 2
            if own_kind:  # all have to have as many
                options.config.max_ctas = CHANNELS
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def send(self, data: Tensor) -> None:
        """Broadcast from the first member, 1-D uint8 from any device. Returns when ``data`` may be reused."""
        if data.device.type == "cpu" and self.device.type != "cpu":
            if len(self._buffer) < len(data):
                self._buffer = torch.empty(len(data), dtype=torch.uint8, device=self.device)
            buffer = self._buffer[: len(data)]
            self._lanes[buffer.device].load(buffer, data)
            data = buffer
        self.broadcast(data.to(self.device))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast the first member's values in place. Returns when the tensor may be read (or reused, by the sender).

        Raises:
            RuntimeError: another member has died, or did not take part in time.
        """
        if self.device.type == "cpu":
            self._group.broadcast(tensor, 0).wait()
            return
        self._complete(lambda: self._group.broadcast(tensor, 0))

    def connect(self) -> None:
        """Meet the other members in the sum of one number, as vLLM's own engine begins."""
        one = torch.zeros(1, device=self.device)
        self._complete(lambda: self._group.allreduce([one]))

    def _complete(self, start: Callable[[], Any]) -> None:
        """Start work of NCCL, and wait for it.

        Raises:
            RuntimeError: another member has died, or did not take part in time.
        """
        deadline = time.monotonic() + self._timeout
        work = self._start(start, deadline)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer within {self._timeout:g} s")
            time.sleep(_POLL)
        work.wait()

    def _start(self, start: Callable[[], Any], deadline: float) -> Any:
        """Launch work. The first one connects the members, which in NCCL has no timeout, so a thread does it."""
        if self._connected:
            return start()
        outcome: list[Any] = []

        def connect() -> None:
            torch.cuda.set_device(self._buffer.device)
            try:
                outcome.append(start())
            except Exception as error:
                outcome.append(error)

        torch.cuda.current_stream().synchronize()  # the thread has another current stream
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
        if not outcome:
            raise RuntimeError(f"the members did not connect within {self._timeout:g} s")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        self._connected = True
        return outcome[0]

    def close(self) -> None:
        """Abort the group; the other members' next broadcast raises."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, AttributeError):  # some torch versions cannot abort every backend
                group.abort()


@contextlib.contextmanager
def _without_nccl_error_handling() -> Iterator[None]:
    """NCCL groups that are created in the block raise errors in ``wait()`` and do not end the process."""
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = before


def link_device(device_ids: list[str]) -> str:
    """``"cuda"`` if every member has a GPU of its own and NCCL is available, else ``"cpu"``.

    Args:
        device_ids: each member's, from :func:`device_id`.
    """
    own_gpus = all(one != "cpu" for one in device_ids) and len(set(device_ids)) == len(device_ids)
    return "cuda" if own_gpus and dist.is_nccl_available() else "cpu"


def device_id(device: torch.device) -> str:
    """A GPU's UUID, which is unique over all hosts; ``"cpu"`` for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"

"""Streams on the CPU that know what runs behind what, and tell which accesses to memory nothing orders.

On a GPU the host submits work to streams in the order of the program, and only events order the work of two streams. A
missing wait gives wrong bits if one stream happens to be late; a test sees it there, and only then. Here every stream
runs its work at once, so results are right whatever is missing, and each stream, event and access has a vector clock:
an access that is not behind the last write to the same bytes, or a write that is not behind the last reads, is a
conflict. That needs no delays, and finds what no thread of the CPU can: FSDP2 gathers on streams of its own.

``torch.cpu``'s streams and events, which FSDP2 uses and which do nothing, are replaced, and so are the lanes and the
broadcasts of replicas. Not seen: what DDP and autograd do in C++, tensors that are freed while another stream uses
them, and what only a GPU does (kernels of Triton, copies in pieces).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightstep.distributed import Replicas
from lightstep.state.host_memory import HostSlab
from lightstep.state.lanes import COMPUTE, CallerStream, Lanes, StreamLane

Clock = dict[int, int]

_MOST = 20
"""Conflicts that are kept."""

_here = threading.local()


def _join(clock: Clock, other: Clock) -> None:
    for number, count in other.items():
        if clock.get(number, 0) < count:
            clock[number] = count


class _Host:
    """What the host has waited for: all that it submits later runs behind it."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.waits = 0
        """How often it has waited."""

    def wait(self, clock: Clock) -> None:
        _join(self.clock, clock)
        self.waits += 1


_host = _Host()


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _host.wait(self.clock)

    def query(self) -> bool:
        return True


class Stream:
    """Stands for ``torch.cpu.Stream``, and for a stream of ``torch.Stream`` in a lane."""

    _numbers = itertools.count()

    def __init__(self, priority: int = 0, name: str = "of FSDP2", is_lane: bool = False) -> None:
        self.number, self.is_lane = next(self._numbers), is_lane
        self.name, self.clock, self.device = f"{name} ({self.number})", {self.number: 0}, torch.device("cpu")
        self.seen = 0  # of the host's waits

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _stack().pop()

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.clock = dict(self.clock)
        return event

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        _join(self.clock, other.clock)

    def synchronize(self) -> None:
        _host.wait(self.clock)

    def tick(self) -> int:
        """The count of one more piece of work."""
        if self.seen != _host.waits:
            _join(self.clock, _host.clock)
            self.seen = _host.waits
        self.clock[self.number] += 1
        return self.clock[self.number]


def _stack() -> list[Stream]:
    if not hasattr(_here, "streams"):
        _here.streams = [Stream(name=f"of {threading.current_thread().name}")]
    streams: list[Stream] = _here.streams
    return streams


def current_stream(*_: Any) -> Stream:
    return _stack()[-1]


def wait_on_host() -> None:
    """The host waits for the current stream: on a GPU it has laid out its memory by itself."""
    current_stream().synchronize()


class _Use(NamedTuple):
    """An access: work on a stream, and the lines of code that it comes from, the innermost first."""

    stream: Stream
    count: int
    what: str
    lines: list[tuple[str, int]]

    def __str__(self) -> str:
        return f"{self.what} ({' < '.join(f'{name}:{line}' for name, line in self.lines)})"


class _Range:
    """Bytes that are accessed together: the last write, and the reads since then, by stream."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.write: _Use | None = None
        self.reads: dict[int, _Use] = {}


class Accesses:
    """All accesses so far, and the conflicts between them."""

    def __init__(self) -> None:
        self.conflicts: list[str] = []
        self.count = 0
        self._memory: dict[int, list[_Range]] = {}
        self._slabs: list[tuple[int, int, Tensor]] = []
        self._host = Stream(name="of the host")
        self._kept: dict[int, Any] = {}  # storages, whose addresses no others get meanwhile

    def allocate(self, tensor: Tensor, what: str) -> None:
        """New memory: the allocator gives it to the current stream, behind whoever had it."""
        self.forget(tensor.untyped_storage().data_ptr())
        if "empty" not in what:
            self.access(tensor, True, what)

    def forget(self, address: int) -> None:
        """The memory there has been freed, or is new."""
        self._memory.pop(address, None)

    def access(self, tensor: Tensor, writes: bool, what: str) -> None:
        if not tensor.numel():
            return
        stream = self._stream_of(tensor)
        this = _Use(stream, stream.tick(), what, _lines())
        if stream is self._host:
            stream.synchronize()
        self.count += 1
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.data_ptr()
        stop, own = start + reach * tensor.element_size(), None
        storage = tensor.untyped_storage()
        self._kept[storage.data_ptr()] = storage
        known = self._memory.setdefault(storage.data_ptr(), [])
        for found in known:
            if found.start < stop and start < found.stop:
                self._check(this, "writes" if writes else "reads", found.write, "written")
                if writes:
                    for read in found.reads.values():
                        self._check(this, "writes", read, "read")
            if (found.start, found.stop) == (start, stop):
                own = found
        if own is None:
            known.append(own := _Range(start, stop))
        if writes:
            own.write, own.reads = this, {}
        else:
            own.reads[stream.number] = this

    def add_slab(self, memory: Tensor) -> None:
        """Memory of the host, which is kept: whoever uses it outside of a lane is the host itself."""
        self._slabs.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes, memory))

    def _stream_of(self, tensor: Tensor) -> Stream:
        stream, address = current_stream(), tensor.data_ptr()
        if not stream.is_lane and any(start <= address < stop for start, stop, _ in self._slabs):
            return self._host
        return stream

    def _check(self, this: _Use, does: str, earlier: _Use | None, done: str) -> None:
        if earlier is None or len(self.conflicts) >= _MOST:
            return
        if this.stream.clock.get(earlier.stream.number, 0) < earlier.count:
            self.conflicts.append(
                f"{this} on the stream {this.stream.name} {does} what was {done} by {earlier} on the stream "
                f"{earlier.stream.name}, and nothing orders them"
            )


def _lines() -> list[tuple[str, int]]:
    """Lines of lightstep and of FSDP2 that are being run, the innermost first."""
    found: list[tuple[str, int]] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(found) < 8:
        name = _name_of(frame.f_code.co_filename)
        if name:
            found.append((name, frame.f_lineno))
        frame = frame.f_back
    return found


@functools.cache
def _name_of(path: str) -> str:
    return os.path.basename(path) if "/lightstep/" in path or "_fully_shard" in path else ""


_WRITTEN_FIRST = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_", "coalesced_")
"""Collectives, by the end of their names, whose first argument is written."""

_SHAPES = ("empty_like", "new_empty")
"""What the tensor holds is not read."""

_WAITS = ("_local_scalar_dense", "equal", "is_nonzero")
"""The host waits for the device."""


class _Watch(TorchDispatchMode):
    def __init__(self, accesses: Accesses) -> None:
        super().__init__()
        self._accesses = accesses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its shards come by themselves
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return result  # without memory: torch finds out what a DTensor's operation returns
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        storages = set()
        for number, (argument, writes, reads) in enumerate(_arguments_of(func)):
            value = args[number] if number < len(args) else kwargs.get(argument)
            for tensor in _tensors(value):
                storages.add(tensor.untyped_storage().data_ptr())
                if writes or reads:
                    self._accesses.access(tensor, writes, func._opname)
        if func._opname in _WAITS:
            wait_on_host()
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in storages:
                self._accesses.allocate(tensor, func._opname)


@functools.cache
def _arguments_of(func: Any) -> list[tuple[str, bool, bool]]:
    """The name of each argument, and whether it is written or read: others are viewed, or only their shapes count."""
    collective = func.namespace == "c10d" and func._opname.endswith(_WRITTEN_FIRST)
    found = []
    for number, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        writes = (alias is not None and alias.is_write) or (collective and number == 0)
        found.append((argument.name, writes, alias is None and func._opname not in _SHAPES))
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.layout == torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


class _Broadcasts:
    """Broadcasts of replicas on a stream of their own, as NCCL's."""

    def __init__(self, accesses: Accesses) -> None:
        self._accesses, self._streams = accesses, dict[int, Stream]()

    def __call__(self, replicas: Replicas, tensor: Tensor, owner: int) -> Any:
        stream = self._streams.setdefault(id(replicas), Stream(name="of broadcasts"))
        stream.wait_stream(current_stream())
        with stream, torch.utils._python_dispatch._disable_current_modes():
            self._accesses.access(tensor, owner != replicas.rank, "broadcast")
            values = tensor.view(-1).view(torch.uint8)
            dist.broadcast(values, group=replicas.group_for(tensor.device), group_src=owner)
        return _Work(stream.record_event())


class _Work:
    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self) -> None:
        current_stream().wait_event(self._event)


@contextlib.contextmanager
def ordered_streams() -> Iterator[Accesses]:
    """In the body all lanes, and all streams of FSDP2, are such streams. Models and optimizers are made there, too."""
    _host.clock.clear()  # of streams that are gone
    vars(_here).clear()
    accesses = Accesses()
    broadcast = _Broadcasts(accesses)

    def lane(self: Lanes, name: str) -> StreamLane:
        return StreamLane(name, self._status, Stream(name=f"of the {name} lane", is_lane=True))  # type: ignore[arg-type]

    def caller(self: Lanes) -> CallerStream:
        return CallerStream(COMPUTE, self._status, current_stream())  # type: ignore[arg-type]

    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        if storage.nbytes():  # what reads it still must be in front of who gets this memory next
            with torch.utils._python_dispatch._disable_current_modes():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            accesses.access(whole, True, "resize_")
            del whole
        accesses.forget(storage.data_ptr())
        found = resize(storage, size)
        accesses.forget(storage.data_ptr())
        return found

    make_slab = HostSlab.__init__

    def slab(self: HostSlab, *arguments: Any, **named: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():  # the host zeroes its pages by itself
            make_slab(self, *arguments, **named)
            accesses.add_slab(self.tensor(torch.uint8, self.nbytes))

    tolist = Tensor.tolist

    def listed(tensor: Tensor) -> Any:
        wait_on_host()
        return tolist(tensor)

    replaced: Iterable[tuple[Any, str, Any]] = (
        (Tensor, "tolist", listed),
        (HostSlab, "__init__", slab),
        (torch.UntypedStorage, "resize_", resized),
        (torch.cpu, "Stream", Stream),
        (torch.cpu, "Event", Event),
        (torch.cpu, "current_stream", current_stream),
        (torch.cpu, "stream", lambda stream: contextlib.nullcontext() if stream is None else stream),
        (torch.accelerator, "current_stream", current_stream),
        (Tensor, "record_stream", lambda self, stream: None),
        (Lanes, "_lane", lane),
        (Lanes, "event", lambda self: Event()),
        (Lanes, "caller", caller),
        (Replicas, "broadcast", lambda self, tensor, owner: broadcast(self, tensor, owner)),
    )
    with contextlib.ExitStack() as stack:
        for where, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(where, name, stand_in))
        stack.enter_context(_Watch(accesses))
        yield accesses

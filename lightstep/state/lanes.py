"""Three lanes of ordered work: host→device copies, compute, device→host copies.

A lane runs its jobs in the order of submission. Only events order jobs of different lanes: ``record`` records an event
in one lane, ``wait`` makes another lane wait for it, and the host never waits. On an accelerator a lane is a stream
(two alternating ones for copies), and the calling thread queues the jobs. On the CPU a lane is a thread with the same
rules, so that tests on the CPU find what is ordered wrongly.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightstep.error_text import error_text

__all__ = ["COMPUTE", "DEVICE_TO_HOST", "HOST_TO_DEVICE", "Lane", "LaneError", "Lanes", "LanesOfDevices", "WaitTimes"]

HOST_TO_DEVICE = "host_to_device"
COMPUTE = "compute"
DEVICE_TO_HOST = "device_to_host"

Event = Any  # torch.Event, or ThreadEvent on the CPU: made by `Lanes.event()`
Delay = Callable[[str], None]


class LaneError(RuntimeError):
    """A job in a lane failed (its exception is the cause), or lanes were used after such a failure."""


class Lane(ABC):
    """Work that runs in the order it is submitted.

    Attributes:
        stream: an accelerator's; ``None`` on the CPU.
    """

    stream: torch.Stream | None = None

    def __init__(self, name: str, status: _Status) -> None:
        self.name, self._status = name, status

    @abstractmethod
    def run(self, job: Callable[[], object], label: str = "") -> None:
        """Submit ``job``; errors name it by ``label``."""

    def allocate(self, job: Callable[[], object], label: str = "") -> None:
        """:meth:`run` a job that may find no room on a device: its error is raised here as it is, and stops no lane."""
        self.run(job, label)

    def copy(
        self, target: Tensor, source: Tensor, label: str = "", on_error: Callable[[Exception], object] | None = None
    ) -> None:
        """Submit a copy between two flat uint8 tensors of the same size.

        Args:
            on_error: called with the error of a copy that fails, which then stops no lane.
        """
        job = partial(target.copy_, source, non_blocking=True)
        self.run(job if on_error is None else partial(_tried, job, on_error), label)

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor], label: str = "") -> None:
        """Submit copies between contiguous tensors of the same shapes and dtypes."""
        self.run(lambda: torch._foreach_copy_(list(targets), list(sources), non_blocking=True), label)

    @abstractmethod
    def record(self, event: Event) -> Event:
        """Record the event after all jobs submitted so far. Later waits are for this record, not for earlier ones."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make later jobs wait for the latest record of the event; does nothing if it was never recorded."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all submitted jobs are done."""


def _tried(job: Callable[[], object], on_error: Callable[[Exception], object]) -> None:
    try:
        job()
    except Exception as error:
        on_error(error)


class Lanes:
    """The three lanes of one device, created once and kept.

    ``delay`` is for tests: it is called in the lane, with the lane's name, before every job.

    Args:
        small_pieces: see :class:`CopyLane`.

    Attributes:
        threads: those of its lanes, by number.
    """

    def __init__(self, device: torch.device, small_pieces: bool = True) -> None:
        self.device = device
        self._index: int | torch.device = device if device.index is None else device.index  # quicker for torch
        self.small_pieces = small_pieces
        self._status = _Status()
        self.host_to_device, self.compute, self.device_to_host = (
            self._lane(name) for name in (HOST_TO_DEVICE, COMPUTE, DEVICE_TO_HOST)
        )
        self.threads = frozenset(lane.thread_id for lane in self._all() if isinstance(lane, ThreadLane))
        self._calling_thread = CallerLane(COMPUTE, self._status)
        self._last_caller: CallerStream | None = None
        self._updates = self.event()

    @property
    def delay(self) -> Delay | None:
        return self._status.delay

    @delay.setter
    def delay(self, delay: Delay | None) -> None:
        self._status.delay = delay

    def _lane(self, name: str) -> Lane:
        if self.device.type == "cpu":
            return ThreadLane(name, self._status)
        stream = torch.Stream(self.device)
        if name == COMPUTE:
            return StreamLane(name, self._status, stream)
        return CopyLane(name, self._status, stream, torch.Stream(self.device), self.small_pieces)

    def event(self) -> Event:
        """A new event for this device's lanes. Keep it, and record it again in the next step."""
        return self._status.event() if self.device.type == "cpu" else torch.Event(self.device)

    def caller(self) -> Lane:
        """The caller's own work as a lane: its current stream, or on the CPU the calling thread."""
        if self.device.type == "cpu":
            return self._calling_thread
        stream, last = torch.accelerator.current_stream(self._index), self._last_caller
        if last is None or last.stream != stream:
            last = self._last_caller = CallerStream(COMPUTE, self._status, stream)
        return last

    def wait_for_caller(self) -> None:
        """Make later jobs of all lanes wait for what the caller has queued.

        Needed for newly allocated device memory: queued work may still read what its last owner freed.
        """
        queued = self.event()
        self.caller().record(queued)
        for lane in self._all():
            lane.wait(queued)

    def caller_waits_for_updates(self) -> None:
        """Make the caller wait for what is queued in the compute lane, unless a job has failed."""
        if self._status.error is None:
            self.caller().wait(self.compute.record(self._updates))

    def load(self, target: Tensor, source: Tensor) -> None:
        """Copy from the host to the device in the lane, between what the caller has queued and what it queues next."""
        self.host_to_device.wait(self.caller().record(self.event()))
        self.host_to_device.copy(target, source)
        self.caller().wait(self.host_to_device.record(self.event()))

    def synchronize(self) -> None:
        """Wait for all jobs of all lanes; raises if one failed."""
        for lane in self._all():
            lane.synchronize()
        self.check()

    def check(self) -> None:
        """Raise if a job has failed: its own failure first, later an error that refers to it."""
        if self._status.error is not None:
            self._status.check()

    @property
    def failed(self) -> bool:
        return self._status.error is not None

    @property
    def error(self) -> LaneError | None:
        """The first failure."""
        return self._status.error

    def reset(self) -> None:
        """Clear a failure, and drop the jobs submitted before."""
        for lane in self._all():
            lane.synchronize()
        self._status.reset()

    def close(self) -> None:
        """Finish all submitted jobs and end the threads."""
        for lane in self._all():
            lane.synchronize()
            if isinstance(lane, ThreadLane):
                lane.close()

    def _all(self) -> tuple[Lane, Lane, Lane]:
        return self.host_to_device, self.compute, self.device_to_host


class LanesOfDevices(dict[torch.device, Lanes]):
    """The lanes of each device, made at the first use.

    Args:
        small_pieces: see :class:`CopyLane`.

    Attributes:
        threads: those of the lanes, by number.
    """

    def __init__(self, small_pieces: bool) -> None:
        super().__init__()
        self._small_pieces = small_pieces
        self.threads: frozenset[int | None] = frozenset()

    def __missing__(self, device: torch.device) -> Lanes:
        lanes = self[device] = Lanes(device, self._small_pieces)
        self.threads |= lanes.threads
        return lanes

    def wait_until_idle(self, device: torch.device) -> None:
        """Wait for all work on the device. Memory that several streams use may be freed then."""
        if device in self:
            self[device].synchronize()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def synchronize(self) -> None:
        """Wait for all jobs of all lanes; raises if one failed."""
        for lanes in list(self.values()):
            lanes.synchronize()


class StreamLane(Lane):
    """A stream of an accelerator. The calling thread queues the jobs, and errors are raised there."""

    stream: torch.Stream

    def __init__(self, name: str, status: _Status, stream: torch.Stream) -> None:
        self.name, self._status, self.stream = name, status, stream

    def run(self, job: Callable[[], object], label: str = "") -> None:
        status = self._status
        if status.error is not None:
            status.check()
        try:
            with self.stream:
                if status.delay is not None:
                    status.delay(self.name)
                job()
        except Exception as error:
            status.fail(self.name, label, error)
            status.check()

    def allocate(self, job: Callable[[], object], label: str = "") -> None:
        self._status.check()
        with self.stream:
            job()

    def record(self, event: Event) -> Event:
        self.stream.record_event(event)
        return event

    def wait(self, event: Event) -> None:
        self.stream.wait_event(event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CopyLane(StreamLane):
    """Large copies in one direction; while the model computes, in pieces on two alternating streams.

    A device's copy engine stays with a stream as long as that stream has copies ready. A small copy in the same
    direction on another stream (a number that the model reads on the host, FSDP2's table for unpacking weights) would
    wait for all copies that are queued here. In pieces it waits for one of them. Between two pieces the engine pauses
    (about 10 µs on an H200), so there are none if nothing else copies meanwhile.

    Args:
        other: the second stream.
        in_pieces: whether there are pieces.
    """

    PIECE: ClassVar[int] = 32 << 20
    """Bytes, about: a copy of up to half as many more is one piece."""

    def __init__(
        self, name: str, status: _Status, stream: torch.Stream, other: torch.Stream, in_pieces: bool = True
    ) -> None:
        super().__init__(name, status, stream)
        self._other, self._reached, self._in_pieces = other, torch.Event(stream.device), in_pieces

    def copy(
        self, target: Tensor, source: Tensor, label: str = "", on_error: Callable[[Exception], object] | None = None
    ) -> None:
        if not self._in_pieces:
            super().copy(target, source, label, on_error)
            return
        count = round(target.nbytes / self.PIECE)
        pieces = zip(target.chunk(count), source.chunk(count), strict=True) if count > 1 else [(target, source)]
        for piece, origin in pieces:
            self.stream.record_event(self._reached)
            self._other.wait_event(self._reached)
            self.stream, self._other = self._other, self.stream
            super().copy(piece, origin, label, on_error)

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor], label: str = "") -> None:
        for target, source in zip(targets, sources, strict=True):
            if target.numel():
                self.copy(_bytes(target), _bytes(source), label)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class WaitTimes:
    """How long streams wait for events, measured on the device between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Event, torch.Event]] = []  # kept for later measurements
        self._used, self._is_on = 0, False

    def start(self) -> None:
        """Measure the next waits, and forget the ones before."""
        self._used, self._is_on = 0, True

    def stop(self) -> None:
        """Measure no more waits."""
        self._is_on = False

    def wait(self, lane: Lane, event: Event) -> None:
        """Make the lane wait for the event."""
        if not self._is_on or lane.stream is None:
            lane.wait(event)
            return
        if self._used == len(self._pairs):
            device = lane.stream.device
            self._pairs.append((torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)))
        begin, end = self._pairs[self._used]
        self._used += 1
        lane.record(begin)
        lane.wait(event)
        lane.record(end)

    def milliseconds(self) -> list[float] | None:
        """Each wait's; ``None`` while one of them is not over."""
        measured = self._pairs[: self._used]
        if not all(end.query() for _, end in measured):
            return None
        return [begin.elapsed_time(end) for begin, end in measured]


class CallerStream(StreamLane):
    """The calling thread's current stream. A failure is raised there, and does not stop the lanes."""

    def run(self, job: Callable[[], object], label: str = "") -> None:
        self._status.run_here(job, self.name)

    def synchronize(self) -> None:
        self._status.check()
        super().synchronize()


class ThreadEvent:
    """An event for threads, with the meaning of a stream's event: a wait is for the latest record made before it."""

    def __init__(self, status: _Status) -> None:
        self._status = status
        self.numbers = itertools.count(1)  # of records; one that is interrupted leaves a gap
        self.recorded = 0  # the latest record
        self.completed = 0  # the latest that was reached

    def complete(self, number: int) -> None:
        with self._status.changed:
            self.completed = max(self.completed, number)
            self._status.changed.notify_all()

    def wait(self, number: int) -> None:
        """Block the calling thread until record ``number`` is reached, or a lane has failed."""
        if self.completed >= number:
            return
        with self._status.changed:
            self._status.changed.wait_for(lambda: self.completed >= number or self._status.error is not None)

    def synchronize(self) -> None:
        """As ``torch.Event.synchronize``."""
        self.wait(self.recorded)
        self._status.check()


class _Status:
    """Shared by the lanes of a device: whether one has failed, and the condition on which threads wait.

    Threads and events refer to this object alone, so that the lanes can be collected while jobs are pending.
    """

    def __init__(self) -> None:
        self.delay: Delay | None = None
        self.changed = threading.Condition()
        self.error: LaneError | None = None
        self._raised = False
        self._events: weakref.WeakSet[ThreadEvent] = weakref.WeakSet()

    def event(self) -> ThreadEvent:
        event = ThreadEvent(self)
        self._events.add(event)
        return event

    def fail(self, lane: str, label: str, cause: BaseException) -> None:
        with self.changed:
            if self.error is None:
                what = f"{label} failed" if label else "a job failed"
                self.error = LaneError(f"{what} in the {lane} lane: {error_text(cause)}")
                self.error.__cause__ = cause
            self.changed.notify_all()

    def check(self) -> None:
        if self.error is None:
            return
        if self._raised:
            raise LaneError(f"the lanes stopped because {self.error}; load a checkpoint to go on") from self.error
        self._raised = True
        raise self.error

    def run_here(self, job: Callable[[], object], name: str) -> None:
        """Run a job of the caller's lane."""
        if self.error is not None:
            self.check()
        if self.delay is not None:
            self.delay(name)
        job()

    def reset(self) -> None:
        with self.changed:
            self.error, self._raised = None, False
            for event in self._events:
                event.completed = event.recorded


class CallerLane(Lane):
    """The calling thread on the CPU: jobs run at once, and waits block it."""

    def run(self, job: Callable[[], object], label: str = "") -> None:
        self._status.run_here(job, self.name)

    def record(self, event: Event) -> Event:
        number = next(event.numbers)
        event.complete(number)
        event.recorded = number
        return event

    def wait(self, event: Event) -> None:
        event.wait(event.recorded)
        if self._status.error is not None:
            self._status.check()

    def synchronize(self) -> None:
        self._status.check()


class ThreadLane(Lane):
    """A thread on the CPU that runs its jobs in order. After a failure in any lane the remaining jobs are dropped."""

    def __init__(self, name: str, status: _Status) -> None:
        super().__init__(name, status)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        arguments = (self._jobs, self._status, name)
        # The thread must not refer to this lane: a lane without references is collected, and its thread then ends.
        self._thread = thread_joined_at_exit(partial(_thread_main, *arguments), f"lightstep-{name}")
        self.thread_id = self._thread.ident
        self._finalizer = weakref.finalize(self, self._jobs.put, None)
        self._finalizer.atexit = False  # `_join_threads` does it
        _lanes.add(self)

    def run(self, job: Callable[[], object], label: str = "") -> None:
        if self._status.error is not None:
            self._status.check()
        delay, name = self._status.delay, self.name
        if delay is None:
            self._submit(_Job(job, label))
        else:
            self._submit(_Job(lambda: (delay(name), job()), label))

    def record(self, event: Event) -> Event:
        number = next(event.numbers)
        self._submit(_Job(lambda: event.complete(number)))
        event.recorded = number  # after the job: else an interrupt in between would let everyone wait for ever
        return event

    def wait(self, event: Event) -> None:
        number = event.recorded
        self._submit(_Job(lambda: event.wait(number)))

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def synchronize(self) -> None:
        if self.is_this_thread:
            return
        done = threading.Event()
        self._submit(_Job(done.set, always=True))
        done.wait()

    def _submit(self, job: _Job) -> None:
        """Queue the job, or run it here after all others if the thread is ending.

        The collector ends the thread before it deletes an optimizer, which may still submit its last update.
        """
        if self._finalizer.alive:
            self._jobs.put(job)
        else:
            self._thread.join()
            _run(job, self._status, self.name)

    def close(self) -> None:
        self._finalizer()
        if not self.is_this_thread:
            self._thread.join()


_lanes: weakref.WeakSet[ThreadLane] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # some outlive their lanes
_LONGEST_EXIT = 10.0
"""Seconds. A thread may be waiting for another process, which in turn waits for this one to end."""


def thread_joined_at_exit(work: Callable[[], object], name: str) -> threading.Thread:
    """Run ``work`` in a thread. The interpreter waits for it before it ends, up to a limit."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


@atexit.register
def _join_threads() -> None:
    """Let the threads do the jobs that are left, and end them, before the interpreter ends: it aborts the process if a
    thread is in the middle of a torch operation."""
    end = time.monotonic() + _LONGEST_EXIT
    for lane in list(_lanes):
        lane._finalizer()
    for thread in list(_threads):
        thread.join(max(end - time.monotonic(), 0.0))


class _Job:
    """A job of a lane's thread; with ``always`` it runs after a failure, too."""

    __slots__ = ("always", "do", "label")

    def __init__(self, do: Callable[[], object], label: str = "", always: bool = False) -> None:
        self.do, self.label, self.always = do, label, always


def _thread_main(jobs: queue.SimpleQueue[_Job | None], status: _Status, name: str) -> None:
    """The body of a lane's thread."""
    torch.get_num_threads()  # from here on LAPACK has as many as torch.set_num_threads says: others give other bits
    while (job := jobs.get()) is not None:
        _run(job, status, name)
        del job  # a job refers to its submitter, which must be collectable while the thread waits


def _run(job: _Job, status: _Status, name: str) -> None:
    if status.error is not None and not job.always:
        return
    try:
        job.do()
    except BaseException as error:
        status.fail(name, job.label, error)

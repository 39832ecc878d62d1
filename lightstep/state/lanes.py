"""Three lanes of ordered work: host→device copies, compute, device→host copies.

A lane does what it is given in the order it was given. Across lanes only events order anything: ``record`` marks a
place in one lane, ``wait`` holds another back until that place is reached, and the host never waits. On an
accelerator a lane is a stream (for copies two by turns), and jobs are queued by the calling thread. On the CPU a lane
is a thread with the same rules, so that whatever is ordered wrongly there is ordered wrongly here.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["COMPUTE", "DEVICE_TO_HOST", "HOST_TO_DEVICE", "Lane", "LaneError", "Lanes"]

HOST_TO_DEVICE = "host_to_device"
COMPUTE = "compute"
DEVICE_TO_HOST = "device_to_host"

Event = Any  # torch.Event, or ThreadEvent on the CPU: made by `Lanes.event()`
Delay = Callable[[str], None]


class LaneError(RuntimeError):
    """A job in a lane failed (its exception is the cause), or lanes are used after such a failure."""


class Lane(ABC):
    """Work that runs in the order it is submitted."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def run(self, job: Callable[[], object], label: str = "") -> None:
        """Submit ``job``; ``label`` names it in errors."""

    def copy(self, target: Tensor, source: Tensor, label: str = "") -> None:
        """Submit a copy between two flat tensors of as many bytes (uint8)."""
        self.run(lambda: target.copy_(source, non_blocking=True), label)

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor], label: str = "") -> None:
        """Submit copies between contiguous tensors of the same shapes and dtypes."""
        self.run(lambda: torch._foreach_copy_(list(targets), list(sources), non_blocking=True), label)

    @abstractmethod
    def record(self, event: Event) -> Event:
        """Mark this place in the lane; for waits made from now on an earlier mark of the event no longer counts."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What is submitted from now on starts after the event's latest mark; nothing for an event without one."""

    @abstractmethod
    def synchronize(self) -> None:
        """The calling thread waits until all submitted work is done."""


class Lanes:
    """The three lanes of one device, made once and kept.

    ``delay`` is for tests: called with the lane's name in front of every job, in that lane.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._status = _Status()
        self.host_to_device, self.compute, self.device_to_host = (
            self._lane(name) for name in (HOST_TO_DEVICE, COMPUTE, DEVICE_TO_HOST)
        )

    @property
    def delay(self) -> Delay | None:
        return self._status.delay

    @delay.setter
    def delay(self, delay: Delay | None) -> None:
        self._status.delay = delay

    @property
    def in_own_thread(self) -> bool:
        """Whether the calling thread is that of a lane: it cannot wait for what it has to do itself."""
        return any(isinstance(lane, ThreadLane) and lane.is_this_thread for lane in self._all())

    def _lane(self, name: str) -> Lane:
        if self.device.type == "cpu":
            return ThreadLane(name, self)
        kind = StreamLane if name == COMPUTE else CopyLane
        return kind(name, torch.Stream(self.device), self)

    def event(self) -> Event:
        """A new event for this device's lanes. Events are meant to be kept and recorded again."""
        return self._status.event() if self.device.type == "cpu" else torch.Event(self.device)

    def caller(self) -> Lane:
        """What the calling thread does itself, as a lane: its current stream; on the CPU the thread itself."""
        if self.device.type == "cpu":
            return CallerLane(COMPUTE, self)
        return CallerStream(COMPUTE, torch.accelerator.current_stream(self.device), self)

    def wait_for_caller(self) -> None:
        """What is submitted from now on comes after what the caller has queued.

        For fresh device memory: it may still be read by what was queued when its last owner let go of it.
        """
        queued = self.event()
        self.caller().record(queued)
        for lane in self._all():
            lane.wait(queued)

    def synchronize(self) -> None:
        """Wait for everything in all lanes; raises what failed there."""
        for lane in self._all():
            lane.synchronize()
        self.check()

    def check(self) -> None:
        """Raise the failure of a job if there was one; once itself, and from then on as a refusal.

        A forked child is refused: threads and streams stay behind in the process that made them.
        """
        self._status.check()

    @property
    def failed(self) -> bool:
        return self._status.error is not None

    def reset(self) -> None:
        """Forget a failure, and everything that was still waiting behind it."""
        for lane in self._all():
            lane.synchronize()
        self._status.reset()

    def close(self) -> None:
        """Finish what is submitted and end the lanes' threads."""
        for lane in self._all():
            lane.synchronize()
            if isinstance(lane, ThreadLane):
                lane.close()

    def _all(self) -> tuple[Lane, Lane, Lane]:
        return self.host_to_device, self.compute, self.device_to_host


class StreamLane(Lane):
    """A stream of an accelerator. Jobs are queued by the calling thread and raise there."""

    def __init__(self, name: str, stream: torch.Stream, lanes: Lanes) -> None:
        super().__init__(name)
        self.stream = stream
        self._lanes = lanes

    def run(self, job: Callable[[], object], label: str = "") -> None:
        self._lanes.check()
        try:
            with self.stream:
                if self._lanes.delay is not None:
                    self._lanes.delay(self.name)
                job()
        except Exception as error:
            self._lanes._status.fail(self.name, label, error)
            self._lanes.check()

    def record(self, event: Event) -> Event:
        self.stream.record_event(event)
        return event

    def wait(self, event: Event) -> None:
        self.stream.wait_event(event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CopyLane(StreamLane):
    """Large copies in one direction, on two streams by turns, so that those of others get in between.

    A device's copy engine stays with a stream for as long as that one has copies ready. A small copy of another stream
    in the same direction (a number that a model reads on the host, the table by which FSDP2 unpacks gathered weights)
    would come behind all that are queued. Here it comes behind one piece of one.
    """

    PIECE: ClassVar[int] = 32 << 20
    """Bytes."""

    def __init__(self, name: str, stream: torch.Stream, lanes: Lanes) -> None:
        super().__init__(name, stream, lanes)
        self._other = torch.Stream(lanes.device)
        self._reached = lanes.event()

    def copy(self, target: Tensor, source: Tensor, label: str = "") -> None:
        for piece, origin in zip(target.split(self.PIECE), source.split(self.PIECE), strict=True):
            self.stream.record_event(self._reached)
            self._other.wait_event(self._reached)
            self.stream, self._other = self._other, self.stream
            super().copy(piece, origin, label)

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor], label: str = "") -> None:
        for target, source in zip(targets, sources, strict=True):
            if target.numel():
                self.copy(_bytes(target), _bytes(source), label)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class CallerStream(StreamLane):
    """The calling thread's current stream: what fails is the caller's own and stops no lane."""

    def run(self, job: Callable[[], object], label: str = "") -> None:
        self._lanes.check()
        if self._lanes.delay is not None:
            self._lanes.delay(self.name)
        job()

    def synchronize(self) -> None:
        self._lanes.check()
        super().synchronize()


class ThreadEvent:
    """A mark in a thread's work that means what a stream's does: a wait is for the latest mark made before it."""

    def __init__(self, fate: _Status) -> None:
        self._status = fate
        self.marks = 0  # made so far
        self.reached = 0  # of them

    def reach(self, mark: int) -> None:
        with self._status.changed:
            self.reached = max(self.reached, mark)
            self._status.changed.notify_all()

    def hold(self, mark: int) -> None:
        """Block the calling thread until ``mark`` is reached, or a lane has failed."""
        with self._status.changed:
            self._status.changed.wait_for(lambda: self.reached >= mark or self._status.error is not None)

    def synchronize(self) -> None:
        """As ``torch.Event.synchronize``."""
        self.hold(self.marks)
        self._status.check()


class _Status:
    """What lanes of threads share: whether one has failed, and the condition on which they all wait.

    They refer to nothing else: the collector may have taken the rest from them when it deletes an optimizer.
    """

    def __init__(self) -> None:
        self.delay: Delay | None = None
        self._process = os.getpid()
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
                self.error = LaneError(f"{what} in the {lane} lane: {type(cause).__name__}: {cause}")
                self.error.__cause__ = cause
            self.changed.notify_all()

    def check(self) -> None:
        if os.getpid() != self._process:
            raise LaneError(
                f"this optimizer's lanes belong to process {self._process} and this is its fork {os.getpid()}; make "
                "the optimizer in the process that trains"
            )
        if self.error is None:
            return
        if self._raised:
            raise LaneError(f"the lanes stopped because {self.error}; load a checkpoint to go on")
        self._raised = True
        raise self.error

    def reset(self) -> None:
        with self.changed:
            self.error, self._raised = None, False
            for event in self._events:
                event.reached = event.marks


class CallerLane(Lane):
    """The calling thread on the CPU: jobs run at once, waits block it."""

    def __init__(self, name: str, lanes: Lanes) -> None:
        super().__init__(name)
        self._lanes = lanes

    def run(self, job: Callable[[], object], label: str = "") -> None:
        self._lanes.check()
        if self._lanes.delay is not None:
            self._lanes.delay(self.name)
        job()

    def record(self, event: Event) -> Event:
        event.marks += 1
        event.reach(event.marks)
        return event

    def wait(self, event: Event) -> None:
        event.hold(event.marks)
        self._lanes.check()

    def synchronize(self) -> None:
        self._lanes.check()


class ThreadLane(Lane):
    """A thread on the CPU that does its jobs in order; after a failure in any lane the rest is dropped."""

    def __init__(self, name: str, lanes: Lanes) -> None:
        super().__init__(name)
        self._status = lanes._status
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        arguments = (self._jobs, self._status, name)
        # Started with nothing that refers to this lane, so that a forgotten lane is collected and its thread ends.
        self._thread = threading.Thread(target=_work, args=arguments, name=f"lightstep-{name}", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._jobs.put, None)
        self._finalizer.atexit = False  # the thread ends with the process

    def run(self, job: Callable[[], object], label: str = "") -> None:
        self._status.check()
        delay, name = self._status.delay, self.name
        if delay is None:
            self._submit(_Job(job, label))
        else:
            self._submit(_Job(lambda: (delay(name), job()), label))

    def record(self, event: Event) -> Event:
        event.marks += 1
        mark = event.marks
        self._submit(_Job(lambda: event.reach(mark)))
        return event

    def wait(self, event: Event) -> None:
        mark = event.marks
        self._submit(_Job(lambda: event.hold(mark)))

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
        """To the thread; to the caller behind it, once the thread was told to end.

        The collector does so before it deletes optimizers, whose last update may not have been submitted yet.
        """
        if self._finalizer.alive:
            self._jobs.put(job)
        else:
            self._thread.join()
            _do(job, self._status, self.name)

    def close(self) -> None:
        self._finalizer()
        if not self.is_this_thread:
            self._thread.join()


class _Job:
    """One thing for a lane's thread to do; ``always``: also after a failure."""

    __slots__ = ("always", "do", "label")

    def __init__(self, do: Callable[[], object], label: str = "", always: bool = False) -> None:
        self.do, self.label, self.always = do, label, always


def _work(jobs: queue.SimpleQueue[_Job | None], fate: _Status, name: str) -> None:
    """The body of a lane's thread."""
    while (job := jobs.get()) is not None:
        _do(job, fate, name)
        del job  # a job refers to whoever submitted it, who may be waiting to be collected


def _do(job: _Job, fate: _Status, name: str) -> None:
    if fate.error is not None and not job.always:
        return
    try:
        job.do()
    except BaseException as error:
        fate.fail(name, job.label, error)

"""Asynchronous saves: a thread writes while training continues. One save is pending at a time.

Its threads have a low priority while training goes on, and normal priority once somebody waits. On Linux each thread
has its own priority. It inherits that of the thread that starts it, and without privileges it can only lower it. So the
priority of a thread is not raised: a new thread takes its place after the present task.
"""

from __future__ import annotations

import atexit
import contextvars
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightstep.distributed import Ranks, new_group

logger = logging.getLogger(__name__)

_NICENESS = 10
"""How much nicer the threads are than training, if they compete for processors: they get about a tenth of the time."""


class Background:
    """The priority of a save's workers: low until :meth:`hurry`. The threads that use it have normal priority."""

    def __init__(self) -> None:
        self._is_urgent = False
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()

    def hurry(self) -> None:
        """Somebody waits for the save. Any thread may call this."""
        with self._lock:
            if not self._is_urgent:
                self._is_urgent = True
                for worker in self._workers:
                    with suppress(RuntimeError):  # no more threads can be started: the present one goes on
                        worker.start(low=False)

    def hurry_if_process_ends(self) -> None:
        if not threading.main_thread().is_alive():
            self.hurry()

    def add(self, worker: Worker) -> None:
        with self._lock:
            worker.start(low=not self._is_urgent)
            self._workers.add(worker)

    def remove(self, worker: Worker) -> None:
        with self._lock:
            self._workers.discard(worker)


class Worker:
    """A thread that does tasks in their order. After an error it cancels the others.

    Not an executor of ``concurrent.futures``: those take no work while the interpreter shuts down, and a save that is
    running then must still finish.

    Args:
        background: decides on the priority; ``None``: that of the creator.
    """

    def __init__(self, background: Background | None = None) -> None:
        self._background = background
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._failed = False
        self._context = contextvars.copy_context()  # torch's serialization options are context variables
        self._thread: threading.Thread | None = None
        self._is_replaced = False
        if background is None:
            self.start(low=False)
        else:
            background.add(self)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the thread. After an error tasks that have not begun are cancelled."""
        self._failed = self._failed or kind is not None
        if self._background is not None:
            self._background.remove(self)
        self._tasks.put(None)
        assert self._thread is not None
        self._thread.join()

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def start(self, low: bool) -> None:
        """Start a thread, which takes the place of the present one if there is one."""
        arguments = (self._run, low, self._thread)
        thread = threading.Thread(
            target=self._context.copy().run, args=arguments, name="checkpoint-worker", daemon=True
        )
        thread.start()
        self._is_replaced, self._thread = self._thread is not None, thread
        if self._is_replaced:
            self.submit(lambda: None)  # wakes the present one

    def _run(self, low: bool, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        if low:
            _lower_priority()
        while (entry := self._tasks.get()) is not None:
            self._do(*entry)
            del entry  # frees the tensor before the wait for the next one
            if low and self._is_replaced:
                return
        self._tasks.put(None)  # for a thread that takes this one's place just now

    def _do(self, future: Future[Any], task: Callable[[], Any]) -> None:
        if self._failed:
            future.cancel()
            return
        try:
            future.set_result(task())
        except BaseException as error:
            self._failed = True
            future.set_exception(error)


@contextmanager
def workers(count: int) -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    """So many workers, and a function that submits tasks to them in turn."""
    with ExitStack() as stack:
        started = itertools.cycle([stack.enter_context(Worker()) for _ in range(count)])
        yield lambda task: next(started).submit(task)


def _lower_priority() -> None:
    """Lower the priority of the calling thread."""
    if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


# -- what a thread does while training goes on -------------------------------------------------------------------------

Result = TypeVar("Result")


class Pending(Future[Result]):
    """A handle for what a thread does while training goes on. The process waits for it when it ends.

    ``done()``: whether it has ended. ``result(timeout=None)`` waits. It cannot be cancelled: ``cancel()`` returns
    ``False``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._thread: threading.Thread | None = None
        self._result_seen = False

    def hurry(self) -> None:
        """Somebody waits."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if timeout != 0 and not self.done():
            self.hurry()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Result:
        self.exception(timeout)  # raises TimeoutError if the thread is still running
        self._result_seen = True
        _unreported.discard(self)
        return super().result()

    def join(self) -> None:
        """Wait until it has ended, and its callbacks with it. Its error is kept for later."""
        if self._thread is not None:
            self.hurry()
            self._thread.join()

    def raise_if_failed(self) -> None:
        """Raise the thread's error, unless :meth:`result` has raised it before.

        What a save left in hidden folders is removed by then.
        """
        if self.done() and self.exception() is None:
            _unreported.discard(self)
        if self.done() and not self._result_seen and self.exception() is not None:
            self.join()  # callbacks remove folders
            self.result()


_unreported: set[Pending[Any]] = set()
"""Those that were started, and whose errors nobody has seen."""


def start_thread(pending: Pending[Result], work: Callable[[], Result], until_done: ExitStack, name: str) -> None:
    """Run ``work`` in a thread, which the process waits for when it ends. ``pending`` gets its result or error.

    Args:
        until_done: closed when ``work`` has returned or raised.
    """
    resources = until_done.pop_all()

    def run() -> None:
        try:
            with resources:
                result = work()
            pending.set_result(result)
        except BaseException as error:
            pending.set_exception(error)

    pending._thread = threading.Thread(target=run, name=name)
    _unreported.add(pending)
    try:
        pending._thread.start()
    except BaseException:
        _unreported.discard(pending)
        resources.close()
        raise


@atexit.register
def _log_unraised_errors() -> None:
    """Runs when the process ends, after its threads."""
    for pending in list(_unreported):
        try:
            pending.raise_if_failed()
        except BaseException as error:
            logger.error("%s", error)


# -- the pending save --------------------------------------------------------------------------------------------------


class PendingSave(Pending[Path]):
    """A handle for a save. ``done()``: whether it has ended. ``result(timeout=None)`` waits, and returns the folder.

    A save cannot be cancelled: ``cancel()`` returns ``False``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._background = Background()
        self._hook: Any = None
        """Handle of the step hook that raises the save's error."""

    def hurry(self) -> None:
        """Somebody waits for the save, or for what follows it."""
        self._background.hurry()


def completed_save(path: Path) -> PendingSave:
    """A handle for a save that has ended."""
    pending = PendingSave()
    pending.set_result(path)
    return pending


_pending: PendingSave | None = None


def start_save(
    write: Callable[[Background], Path], until_written: ExitStack, optimizer: torch.optim.Optimizer | None
) -> PendingSave:
    """Run ``write`` in a thread, which the process waits for when it ends.

    Args:
        write: its argument decides on the priority of its workers.
        until_written: closed when ``write`` has returned or raised.
        optimizer: its next step raises the thread's error.
    """
    global _pending
    pending = PendingSave()
    start_thread(pending, lambda: write(pending._background), until_written, "checkpoint-save")
    _pending = pending
    if optimizer is not None:
        pending._hook = optimizer.register_step_pre_hook(lambda *_: pending.raise_if_failed())
    return pending


def wait_for_pending() -> None:
    """Wait for the pending save, if there is one. Its error is kept for later."""
    if _pending is not None:
        _pending.join()


def finish_pending() -> None:
    """Wait for the pending save, if there is one, and raise its error."""
    global _pending
    wait_for_pending()
    pending, _pending = _pending, None
    if pending is None:
        return
    if pending._hook is not None:
        pending._hook.remove()
    pending.raise_if_failed()


_groups: dict[tuple[tuple[int, ...], str], tuple[Any, Any]] = {}
"""Ranks and purpose -> the default process group that they were part of, and their group."""


def thread_group(ranks: Ranks, purpose: str) -> Ranks:
    """The same ranks in a separate gloo group, so that collectives do not mix with training's. Called by all ranks.

    Args:
        purpose: collectives of two threads that run at the same time must not mix either: each has its own purpose.
    """
    if not ranks.is_distributed:
        return ranks
    world = dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(world if ranks.group is None else ranks.group))
    known = _groups.get((members, purpose))
    if known is None or known[0] is not world:
        group = new_group(members, "gloo")
        known = _groups[members, purpose] = (world, group)
    return Ranks(known[1])


def writer_group(ranks: Ranks) -> Ranks:
    """:func:`thread_group` of saves."""
    return thread_group(ranks, "save")

"""Asynchronous saves: a thread writes while training continues. One save is pending at a time.

On Linux it and the threads that it starts have a low priority: each thread has its own, inherits that of the thread
that starts it, and can only lower it.
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
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from lightstep.distributed import Ranks, new_group

logger = logging.getLogger(__name__)


class Worker:
    """A thread that does tasks in their order. After an error it cancels the others.

    Not an executor of ``concurrent.futures``: those take no work while the interpreter shuts down, and a save that is
    running then must still finish.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._failed = False
        context = contextvars.copy_context()  # torch's serialization options are context variables
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="checkpoint-worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the thread. After an error tasks that have not begun are cancelled."""
        self._failed = self._failed or kind is not None
        self._tasks.put(None)
        self._thread.join()

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            self._do(*entry)
            del entry  # frees the tensor before the wait for the next one

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

    def result(self, timeout: float | None = None) -> Result:
        self.exception(timeout)  # raises TimeoutError if the thread is still running
        self._result_seen = True
        _unreported.discard(self)
        return super().result()

    def join(self) -> None:
        """Wait until it has ended, and its callbacks with it. Its error is kept for later."""
        if self._thread is not None:
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
    """Runs when the process ends, after its threads, and waits for those that other such functions have started."""
    for pending in list(_unreported):
        pending.join()
        try:
            pending.raise_if_failed()
        except BaseException as error:
            logger.error("%s", error)


# -- the pending save --------------------------------------------------------------------------------------------------


class PendingSave(Pending[Path]):
    """A handle for a save. ``done()``: whether it has ended. ``result(timeout=None)`` waits, and returns the folder.

    A save cannot be cancelled: ``cancel()`` returns ``False``.
    """

    _hook: Any = None
    """Handle of the step hook that raises the save's error."""


def completed_save(path: Path) -> PendingSave:
    """A handle for a save that has ended."""
    pending = PendingSave()
    pending.set_result(path)
    return pending


_pending: list[PendingSave] = []
"""More than one if a signal handler has started a save while another one was being started."""

_NICENESS = 10
"""How much nicer a save's threads are than training: where processors are scarce, they get a tenth of the time."""


def start_save(
    write: Callable[[], Path], until_written: ExitStack, optimizer: torch.optim.Optimizer | None
) -> PendingSave:
    """Run ``write`` in a thread, which the process waits for when it ends.

    Args:
        until_written: closed when ``write`` has returned or raised.
        optimizer: its next step raises the thread's error.
    """

    def write_at_low_priority() -> Path:
        if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
            thread = threading.get_native_id()
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
        return write()

    pending = PendingSave()
    start_thread(pending, write_at_low_priority, until_written, "checkpoint-save")
    _pending.append(pending)
    if optimizer is not None:
        pending._hook = optimizer.register_step_pre_hook(lambda *_: pending.raise_if_failed())
    return pending


def wait_for_pending() -> None:
    """Wait for the pending save, if there is one. Its error is kept for later."""
    for pending in list(_pending):
        pending.join()


def finish_pending() -> None:
    """Wait for the pending save, if there is one, and raise its error."""
    wait_for_pending()
    while _pending:
        pending = _pending.pop(0)
        pending.join()  # a signal handler may have started it just now
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

"""Threads that write a save: of low priority while training goes on, of normal priority once somebody waits.

On Linux each thread has its own priority. It inherits that of the thread that starts it, and without privileges it can
only lower it. So the priority of a thread is not raised: a new thread takes its place after the present task.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

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


def _lower_priority() -> None:
    """Lower the priority of the calling thread."""
    if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)

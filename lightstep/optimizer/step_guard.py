"""Who may work on an optimizer now: whose process this is, whose thread, and whether a step is under way.

*Work* changes weights, state or the queue of updates: ``step()``, a wait that runs deferred updates, a read of one
parameter's state (it uses the same memory). One thread works at a time, and the others wait for it. Work that is asked
for in the middle of work, in the same thread, is refused: it comes from a signal handler, a finalizer or a hook, and
would see half of an update. The library's own code calls, from within work, the methods that are not guarded.

A *reader* (``state_dict()``, a save) works several times, and keeps other threads out in between.

A backward that updates weights keeps other threads out, too, apart from autograd's own: on an accelerator these run the
backward, and not the thread that called it.

A forked child has neither the threads nor the streams that updates run in, and a lock may be held there by a thread
that does not exist. So it is refused before any lock is touched. What it may read: :mod:`lightstep.optimizer.forks`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from lightstep.state.store import Store

__all__ = ["StepGuard"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class StepGuard:
    """Admits one thread at a time, of the process that made it.

    Args:
        backend: knows the threads in which updates run.

    Attributes:
        backward: held by the thread that runs a backward in which weights are updated.
        trainer: the thread that ran the last backward or step.
    """

    def __init__(self, backend: Store) -> None:
        self.backward = threading.RLock()
        self.trainer: int | None = None
        self._lock = threading.RLock()
        self._work: tuple[int, str] | None = None  # the thread that works, and what it does
        self._process, self._backend = os.getpid(), backend

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that made the optimizer."""
        return os.getpid() != self._process

    @property
    def is_busy(self) -> bool:
        """Whether some thread works."""
        return self._work is not None

    @property
    def is_busy_elsewhere(self) -> bool:
        """Whether another thread works."""
        return self._work is not None and not self.is_busy_here

    @property
    def is_busy_here(self) -> bool:
        """Whether this thread works."""
        work = self._work
        return work is not None and work[0] == threading.get_ident()

    @property
    def is_foreign(self) -> bool:
        """Whether this thread is not the one that trains, which may use other streams."""
        return self.trainer not in (None, threading.get_ident()) and torch._C._current_graph_task_id() == -1

    def check(self, what: str) -> None:
        """Raise ``RuntimeError`` in a forked child, and from within work."""
        if self.is_forked:
            raise RuntimeError(
                f"{what} in process {os.getpid()}, a fork of process {self._process}, which made the optimizer: a fork "
                "can neither train with it nor read its state. Do that in the process that made it, or make model and "
                "optimizer in the process that trains"
            )
        work = self._work
        if work is not None and self.is_busy_here:
            self._refuse(what, work[1])
        if (interrupted := self._backend.interrupted_work) is not None:
            self._refuse(what, interrupted)

    def _refuse(self, what: str, work: str) -> None:
        raise RuntimeError(
            f"{what} in the middle of {work} (in a signal handler, a finalizer or a hook): weights and state may be "
            "half updated there. Nothing has been done; set a flag in the handler, and do it after step()"
        )

    def work(
        self, what: str, body: Callable[Parameters, Result], *arguments: Parameters.args, **keywords: Parameters.kwargs
    ) -> Result:
        """Call ``body`` when no other thread works or reads.

        Args:
            what: names it in messages.

        Raises:
            RuntimeError: see :meth:`check`.
        """
        self.check(what)
        with self._first_lock(), self._lock:
            try:  # no call between these lines: a handler's exception there would leave the mark
                self._work = (threading.get_ident(), what)
                return body(*arguments, **keywords)
            finally:
                self._work = None

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """No other thread works in the body, and this one may.

        Raises:
            RuntimeError: see :meth:`check`.
        """
        self.check(what)
        with self._first_lock(), self._lock:
            yield

    def _first_lock(self) -> threading.RLock:
        in_autograd = torch._C._current_graph_task_id() != -1
        return self._lock if in_autograd else self.backward

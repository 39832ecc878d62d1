"""Asynchronous saves: a thread writes while training continues. One is pending at a time."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightstep.checkpoint.ranks import Ranks

logger = logging.getLogger(__name__)

_NICENESS = 10
"""How much nicer the thread is than training, if they compete for processors: it gets about a tenth of the time."""


class PendingSave(Future[Path]):
    """A handle for a save. ``done()``: whether it has ended. ``result(timeout=None)`` waits, and returns the folder.

    A save cannot be cancelled: ``cancel()`` returns ``False``.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._thread = thread
        self._result_seen = False

    def result(self, timeout: float | None = None) -> Path:
        self.exception(timeout)  # raises TimeoutError if the save is still running
        self._result_seen = True
        return super().result()

    def join(self) -> None:
        """Wait until the save has ended, and its callbacks with it. Its error is kept for later."""
        if self._thread is not None:
            self._thread.join()

    def raise_if_failed(self) -> None:
        """Raise the thread's error, unless :meth:`result` has raised it before.

        What the save left in hidden folders is removed by then.
        """
        if self.done() and not self._result_seen and self.exception() is not None:
            self.join()  # callbacks remove folders
            self.result()


def completed_save(path: Path) -> PendingSave:
    """A handle for a save that has ended."""
    pending = PendingSave()
    pending.set_result(path)
    return pending


_pending: PendingSave | None = None
_hook: Any = None
"""Handle of the step hook that raises the pending save's error."""


def start_save(
    write: Callable[[], Path], until_written: ExitStack, optimizer: torch.optim.Optimizer | None
) -> PendingSave:
    """Run ``write`` in a thread, which the process waits for when it ends.

    Args:
        until_written: closed when ``write`` has returned or raised.
        optimizer: its next step raises the thread's error.
    """
    global _pending, _hook
    resources = until_written.pop_all()

    def run() -> None:
        try:
            with resources:
                _let_training_go_first()
                path = write()
            pending.set_result(path)
        except BaseException as error:
            pending.set_exception(error)

    thread = threading.Thread(target=run, name="checkpoint-save")
    pending = PendingSave(thread)
    try:
        thread.start()
    except BaseException:
        resources.close()
        raise
    _pending = pending
    if optimizer is not None:
        _hook = optimizer.register_step_pre_hook(lambda *_: pending.raise_if_failed())
    return pending


def _let_training_go_first() -> None:
    """Lower the priority of the calling thread and of those that it will start."""
    if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


@atexit.register
def _log_unraised_error() -> None:
    """Runs when the process ends, after its threads."""
    if _pending is not None:
        try:
            _pending.raise_if_failed()
        except BaseException as error:
            logger.error("%s", error)


def wait_for_pending() -> None:
    """Wait for the pending save, if there is one. Its error is kept for later."""
    if _pending is not None:
        _pending.join()


def finish_pending() -> None:
    """Wait for the pending save, if there is one, and raise its error."""
    global _pending, _hook
    wait_for_pending()
    pending, hook, _pending, _hook = _pending, _hook, None, None
    if hook is not None:
        hook.remove()
    if pending is not None:
        pending.raise_if_failed()


_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Ranks -> the default process group that they were part of, and their writers' group."""


def writer_group(ranks: Ranks) -> Ranks:
    """The same ranks in a separate gloo group, so that collectives do not mix with training's. Called by all ranks."""
    if not ranks.is_distributed:
        return ranks
    world = dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(world if ranks.group is None else ranks.group))
    known = _groups.get(members)
    if known is None or known[0] is not world:
        group = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        known = _groups[members] = (world, group)
    return Ranks(known[1])

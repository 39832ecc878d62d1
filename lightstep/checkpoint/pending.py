"""Asynchronous saves: a thread writes while training continues. One is pending at a time."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.workers import Background

logger = logging.getLogger(__name__)


class PendingSave(Future[Path]):
    """A handle for a save. ``done()``: whether it has ended. ``result(timeout=None)`` waits, and returns the folder.

    A save cannot be cancelled: ``cancel()`` returns ``False``.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._thread = thread
        self._result_seen = False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if timeout != 0 and not self.done():
            _hurry()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Path:
        self.exception(timeout)  # raises TimeoutError if the save is still running
        self._result_seen = True
        return super().result()

    def join(self) -> None:
        """Wait until the save has ended, and its callbacks with it. Its error is kept for later."""
        if self._thread is not None:
            _hurry()
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
_background: Background | None = None
"""The priority of the pending save."""
_hook: Any = None
"""Handle of the step hook that raises the pending save's error."""


def start_save(
    write: Callable[[Background], Path], until_written: ExitStack, optimizer: torch.optim.Optimizer | None
) -> PendingSave:
    """Run ``write`` in a thread, which the process waits for when it ends.

    Args:
        write: its argument decides on the priority of its workers.
        until_written: closed when ``write`` has returned or raised.
        optimizer: its next step raises the thread's error.
    """
    global _pending, _background, _hook
    resources, background = until_written.pop_all(), Background()

    def run() -> None:
        try:
            with resources:
                path = write(background)
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
    _pending, _background = pending, background
    if optimizer is not None:
        _hook = optimizer.register_step_pre_hook(lambda *_: pending.raise_if_failed())
    return pending


def _hurry() -> None:
    """Somebody waits for the pending save, or for what follows it."""
    if _background is not None:
        _background.hurry()


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
    global _pending, _background, _hook
    wait_for_pending()
    pending, hook, _pending, _background, _hook = _pending, _hook, None, None, None
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

"""Saves that a thread writes while training goes on: one at a time."""

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

logger = logging.getLogger(__name__)


class PendingSave(Future[Path]):
    """A save under way. ``done()`` says whether it has ended; ``result(timeout=None)`` waits and returns the folder."""

    def __init__(self) -> None:
        super().__init__()
        self._told = False

    def result(self, timeout: float | None = None) -> Path:
        try:
            return super().result(timeout)
        finally:
            self._told = self.done()

    def raise_if_failed(self) -> None:
        """What the thread ran into, unless somebody has been told."""
        if self.done() and not self._told:
            self.result()


def ended(path: Path) -> PendingSave:
    """Of a save that was waited for."""
    pending = PendingSave()
    pending.set_result(path)
    return pending


_pending: PendingSave | None = None
_hook: Any = None


def start(write: Callable[[], Path], until_written: ExitStack, optimizer: torch.optim.Optimizer | None) -> PendingSave:
    """Write in a thread, which the process waits for when it ends.

    Args:
        until_written: what is held for it, taken over.
        optimizer: its next step raises what goes wrong.
    """
    global _pending, _hook
    pending, held = PendingSave(), until_written.pop_all()

    def run() -> None:
        try:
            with held:
                path = write()
            pending.set_result(path)
        except BaseException as error:
            pending.set_exception(error)

    try:
        threading.Thread(target=run, name="checkpoint-save").start()
    except BaseException:
        held.close()
        raise
    _pending = pending
    if optimizer is not None:
        _hook = optimizer.register_step_pre_hook(lambda *_: pending.raise_if_failed())
    return pending


@atexit.register
def _say_what_nobody_asked_for() -> None:
    """After the threads have ended."""
    if _pending is not None:
        try:
            _pending.raise_if_failed()
        except BaseException as error:
            logger.error("%s", error)


def wait_for_pending() -> None:
    """Wait for the save that is under way, if there is one; what it ran into is left to be told."""
    if _pending is not None:
        _pending.exception()


def finish_pending() -> None:
    """Wait for the save that is under way, if there is one, and raise what it ran into."""
    global _pending, _hook
    wait_for_pending()
    pending, hook, _pending, _hook = _pending, _hook, None, None
    if hook is not None:
        hook.remove()
    if pending is not None:
        pending.raise_if_failed()


_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""By ranks: the world that they belong to, and the group of their writers."""


def own_group(ranks: Ranks) -> Ranks:
    """The same ranks in a group of the writers' own, which no collective of training meets. Called by all of them."""
    if not ranks.several:
        return ranks
    world = dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(world if ranks.group is None else ranks.group))
    known = _groups.get(members)
    if known is None or known[0] is not world:
        own = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        known = _groups[members] = (world, own)
    return Ranks(known[1])

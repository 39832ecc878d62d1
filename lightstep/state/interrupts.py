"""Delays Ctrl-C while a finalizer runs: Python would print a traceback and go on without it, or exit with 0."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import cast

__all__ = ["uninterrupted"]

_AGAIN = 0.01
"""Seconds until an interrupt that found a finalizer running is sent again."""


def uninterrupted(work: Callable[[], object]) -> None:
    """Run a finalizer's work without interruption. An interrupt is raised afterwards, when no finalizer runs; during
    exit it ends the process at once."""
    main, before = threading.main_thread(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not main or not callable(before):  # nothing can be interrupted here
        work()
        return
    pending, instruction = False, _instruction(sys._getframe())

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        pending = True
        if not main.is_alive():  # an exception would be lost
            _end_as_interrupted()
        elif _in_finalizer(frame, instruction):
            threading.Timer(_AGAIN, again).start()
        else:
            signal.signal(signal.SIGINT, before)
            before(number, frame)

    def again() -> None:
        if signal.getsignal(signal.SIGINT) is interrupt:  # not raised yet
            signal.pthread_kill(cast(int, main.ident), signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    try:
        work()
    finally:
        if not pending and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _instruction(frame: FrameType | None) -> tuple[int, int] | None:
    """The frame and instruction at which the object was finalized; other objects may be finalized there, too."""
    while frame is not None and not _is_finalizer(frame):
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return None if caller is None else (id(caller), caller.f_lasti)


def _in_finalizer(frame: FrameType | None, instruction: tuple[int, int] | None) -> bool:
    """Whether Python would drop an exception raised in this frame: in a finalizer, or called at the same
    instruction."""
    raising = frame
    while frame is not None:
        if _is_finalizer(frame) or (frame is not raising and (id(frame), frame.f_lasti) == instruction):
            return True
        frame = frame.f_back
    return False


def _is_finalizer(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__del__" or frame.f_code is weakref.finalize.__call__.__code__


def _end_as_interrupted() -> None:
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)

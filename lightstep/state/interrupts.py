"""Ctrl-C while a finalizer runs: Python would print a traceback, drop the interrupt and go on, or exit with 0."""

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
"""Seconds until an interrupt is tried again that found a finalizer running."""


def uninterrupted(work: Callable[[], object]) -> None:
    """Do a finalizer's work to its end. The program is interrupted when no finalizer runs; at exit it ends at once."""
    main, before = threading.main_thread(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not main or not callable(before):  # nothing is interrupted here
        work()
        return
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if not main.is_alive():  # nobody would hear of an exception
            _end_as_interrupted()
        elif _in_finalizer(frame):
            threading.Timer(_AGAIN, again).start()
        else:
            signal.signal(signal.SIGINT, before)
            before(number, frame)

    def again() -> None:
        if signal.getsignal(signal.SIGINT) is interrupt:  # still to come
            signal.pthread_kill(cast(int, main.ident), signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    try:
        work()
    finally:
        if not came and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _in_finalizer(frame: FrameType | None) -> bool:
    """Whether an exception that is raised in this frame ends in a finalizer, where Python drops it."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code is weakref.finalize.__call__.__code__:
            return True
        frame = frame.f_back
    return False


def _end_as_interrupted() -> None:
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)

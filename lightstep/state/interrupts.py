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
    came, instruction = False, _instruction(sys._getframe())

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if not main.is_alive():  # nobody would hear of an exception
            _end_as_interrupted()
        elif _in_finalizer(frame, instruction):
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


def _instruction(frame: FrameType | None) -> tuple[int, int] | None:
    """Where the object went that is finalized: the frame and its instruction. Others go there as well."""
    while frame is not None and not _is_finalizer(frame):
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return None if caller is None else (id(caller), caller.f_lasti)


def _in_finalizer(frame: FrameType | None, instruction: tuple[int, int] | None) -> bool:
    """Whether Python would drop what is raised in this frame: in a finalizer, or in what is called in its place."""
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

"""Ctrl-C while a finalizer runs: Python would print a traceback, drop the interrupt and go on, or exit with 0."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable

__all__ = ["interrupt_later", "uninterrupted"]

_LATER = 0.01
"""Seconds in which the finalizer returns."""


def uninterrupted(wait: Callable[[], object]) -> None:
    """Wait to the end in a finalizer; an interrupt that comes meanwhile is the caller's, after it."""
    interrupted = False
    while True:
        try:
            wait()
            break
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        interrupt_later()


def interrupt_later() -> None:
    """For a finalizer that was interrupted: the program is, once it has returned; at exit here and now."""
    if threading.main_thread().is_alive():
        threading.Timer(_LATER, _interrupt).start()
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def _interrupt() -> None:
    if threading.main_thread().is_alive():
        _thread.interrupt_main()
    else:  # it waits for this thread, and would print the interrupt
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)

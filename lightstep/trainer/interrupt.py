"""Defers Ctrl-C and SIGTERM until the step is done."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from lightstep.trainer.ranks import highest

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Within this context a signal is recorded instead of raised, so that steps and saves are not interrupted.

    A second signal ends the process at once, except under torchrun, which forwards signals its workers already got.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        try:
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        except ValueError:  # not the main thread, which alone receives signals
            self._previous = {}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received and "RANK" not in os.environ:
            self._restore()
            signal.raise_signal(number)
        self._received = self._received or number

    def received(self) -> signal.Signals | None:
        """The signal that any rank has received. A collective: all ranks call it after every step."""
        number = highest(self._received)
        return signal.Signals(number) if number else None

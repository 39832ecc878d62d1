"""Python's collector of cycles, in processes that run many small tests."""

from __future__ import annotations

import gc

import torch


def collect_seldom() -> None:
    """A sixth of the time went there. Tests of lifetimes call it themselves.

    On a GPU as often as ever: memory is short there.
    """
    if not torch.accelerator.is_available():
        gc.set_threshold(10_000, 20, 50)


def collect_and_skip() -> None:
    """Collect, and never look at what is left again. On a GPU it is looked at: a cycle may come to hold memory."""
    gc.collect()
    if not torch.accelerator.is_available():
        gc.freeze()

"""Python's collector of cycles, in processes that run many small tests.

torch is imported by those that run some: who hands tests to workers imports this, too.
"""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """A sixth of the time went there. Tests of lifetimes call it themselves.

    On a GPU as often as ever: memory is short there.
    """
    if not _has_accelerator():
        gc.set_threshold(10_000, 20, 50)


def collect_and_skip() -> None:
    """Collect, and never look at what is left again. On a GPU it is looked at: a cycle may come to hold memory."""
    gc.collect()
    if not _has_accelerator():
        gc.freeze()


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
